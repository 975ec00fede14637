"""Reports of compilation as plain data: graphs and their passes, graph breaks, recompiles, functions in eager."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import torch


@dataclasses.dataclass(frozen=True)
class PassReport:
    """The result of one fusion or pass on one graph.

    Args:
        name: the pass's name.
        fired: the number of matches that it rewrote.
        declined: for each match that it did not rewrite, the reason.
    """

    name: str
    fired: int
    declined: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """The report of one graph at one signature.

    Args:
        name: the graph's name: the step's name with a number, such as `training_step_0`.
        kind: `fused`, `split`, `forward` or `eager`.
        inputs: the number of tensor inputs.
        gradient_count: the number of inputs that receive gradients.
        shapes: name, dtype and shape of the inputs that are not parameters or buffers.
        operators_before: operator counts of the captured graph, which is the forward only.
        operators_after: operator counts of the ONNX models that run.
        passes: the reports of all fusions and passes, in order.
        seconds: the time from the graph to its sessions.
        fallback: why the graph runs in eager, or None.
        engine: the build of ONNX Runtime that runs it.
        cache: with a `cache_dir`, whether the graph was `read` from it, was `written`, or was not kept and why.
        precision: the precisions of its nodes.
        peak_bytes: the planned peak memory of one run, with gradients and without inputs.
        torch_operators: counts of the operators that torch nodes call.
        regions: what each of its regions computes, and how often a run calls it.
        verified: the number of its runs that were compared with eager.
        worst: the largest relative errors of the last comparison, as `gradient of head.weight 2.1e-07`.
        speed: why a step of the graph takes as long as in eager, or longer; None if something in it is faster.
        fixed_sizes: why the graph is compiled for these sizes only, although Dynamo made some symbolic.
        is_reused: whether another strategy of the process compiled it.
        is_small: whether it runs without a session, as a call of one would take longer than its operators.
        is_native: whether its sessions call no Python.
    """

    name: str
    kind: str
    inputs: int
    gradient_count: int
    shapes: tuple[str, ...]
    operators_before: dict[str, int]
    operators_after: dict[str, int]
    passes: tuple[PassReport, ...]
    seconds: float
    fallback: str | None = None
    engine: str = ""
    cache: str | None = None
    precision: str = "32-true"
    peak_bytes: int = 0
    torch_operators: dict[str, int] = dataclasses.field(default_factory=dict)
    regions: dict[str, int] = dataclasses.field(default_factory=dict)
    speed: str | None = None
    fixed_sizes: str | None = None
    verified: int = 0
    worst: tuple[str, ...] = ()
    is_reused: bool = False
    is_small: bool = False
    is_native: bool = False

    @property
    def head(self) -> str:
        """The report in one line."""
        counts = f"{self.inputs} inputs, {self.gradient_count} gradients"
        reused = ", reused" if self.is_reused else ""
        return f"{self.name}: {self.kind}, {counts}, {self.precision}, {self.seconds:.1f} s{reused}"

    def __str__(self) -> str:
        lines = [self.head, f"  data     {', '.join(self.shapes) or 'none'}"]
        if self.fallback is not None:
            return "\n".join([*lines, f"  fallback {self.fallback}"])
        lines.append(f"  engine   {self.engine}")
        if self.cache is not None:
            lines.append(f"  cache    {self.cache}")
        if self.verified:
            lines.append(f"  verified {self.verified} times; errors at most {', '.join(self.worst)}")
        if self.fixed_sizes is not None:
            lines.append(f"  sizes    these only: {self.fixed_sizes}")
        if self.speed is not None:
            lines.append(f"  speed    {self.speed}")
        lines.append(f"  memory   {self.peak_bytes / 1e6:.0f} MB planned peak, without inputs")
        lines.append(f"  forward  {_counts(self.operators_before)}")
        session = " without a session" if self.is_small else ", no call of Python" if self.is_native else ""
        lines.append(f"  runs     {_counts(self.operators_after)}{session}")
        if self.torch_operators:
            lines.append(f"  by torch {_counts(self.torch_operators)}")
        for summary, calls in self.regions.items():
            lines.append(f"  region   {calls} x {summary}")
        for report in (one for one in self.passes if one.fired or one.declined):
            lines.append(f"  pass     {report.name}: {report.fired} rewritten, {len(report.declined)} declined")
            lines.extend(f"             {reason}" for reason in report.declined[:MOST_REASONS])
            if len(report.declined) > MOST_REASONS:
                lines.append(f"             and {len(report.declined) - MOST_REASONS} more")
        return "\n".join(lines)


MOST_REASONS = 4


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """A statement at which Dynamo ends a graph; the code after it is another graph.

    Args:
        step: the step that is compiled, such as `training_step`, or None for a function of `torch.compile`.
        place: `file:line` in the user's code.
        reason: why Dynamo can't trace the statement, a sentence.
        remedy: what to change, a sentence, or None.
        by_design: whether lit_ort or the user asks for it, as for `torch.compiler.disable`.
    """

    step: str | None
    place: str
    reason: str
    remedy: str | None = None
    by_design: bool = False

    def __str__(self) -> str:
        step = "" if self.step is None else f" in {self.step}"
        what = "graphs end by design" if self.by_design else "graph break"
        return _sentences(f"{what}{step} at {self.place}: {self.reason}", self.remedy)


@dataclasses.dataclass(frozen=True)
class EagerFunction:
    """A function, or the rest of one, that has no graph: it runs in eager PyTorch, except for functions that it calls.

    Args:
        step: the step that it belongs to, or None for a function of `torch.compile`.
        name: the function's.
        place: `file:line` of the obstacle, or of the function.
        reason: why Dynamo can't trace it, a sentence.
        remedy: what to change, a sentence, or None.
        is_rest: whether it is the rest of a function, after a graph break.
    """

    step: str | None
    name: str
    place: str
    reason: str
    remedy: str | None = None
    is_rest: bool = False

    @property
    def label(self) -> str:
        """The function's name, and the step's unless it is the step's own function."""
        return _function_of(self.step, self.name)

    @property
    def message(self) -> str:
        """Everything but the place."""
        return self._text("")

    def __str__(self) -> str:
        return self._text(f" ({self.place})")

    def _text(self, place: str) -> str:
        head = f"{self.label} runs in eager PyTorch{place}: {self.reason}"
        return _sentences(head, self.remedy)


@dataclasses.dataclass(frozen=True)
class Recompile:
    """A function that is compiled again.

    Args:
        step: the step that it belongs to, or None for a function of `torch.compile`.
        name: the function's.
        place: `file:line` of the code that reads the value, or of the function.
        reason: what differs from the compiled code, a sentence.
        remedy: what to change, a sentence, or None.
        count: how often.
    """

    step: str | None
    name: str
    place: str
    reason: str
    remedy: str | None = None
    count: int = 1

    @property
    def is_for_any_size(self) -> bool:
        """Whether tensors of other sizes led to it, for the first time: the graph that follows is for any size."""
        return "size mismatch" in self.reason and self.count == 1

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" {self.count} times, the last time"
        head = f"{_function_of(self.step, self.name)} was compiled again{times} at {self.place}: {self.reason}"
        return _sentences(head, self.remedy)


# How a step runs.
EAGER, COMPILED = "eager", "compiled"


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a step runs, and why.

    Args:
        step: its name.
        way: `"eager"` or `"compiled"`.
        calls: the number of calls in eager, and compiled.
        seconds: the median of a call in eager, and compiled, with its backward; None if not measured.
        compile_seconds: the seconds that compiling took.
        estimate: for a step that was not compiled, the seconds that compiling was expected to take, and the expected
            gain as a share of each call's time; None if it was not timed.
        reason: why, if that was decided before the run.
    """

    step: str
    way: str
    calls: tuple[int, int]
    seconds: tuple[float | None, float | None]
    compile_seconds: float = 0.0
    estimate: tuple[float, float] | None = None
    reason: str | None = None

    @property
    def saved_seconds(self) -> float:
        """The seconds that compiled calls saved, less those that compiling took."""
        eager, compiled = self.seconds
        gain = 0.0 if eager is None or compiled is None else eager - compiled
        return self.calls[1] * gain - self.compile_seconds

    @property
    def hyperparameters(self) -> dict[str, str | float]:
        """The way and what was measured, with times in ms a call and in s."""
        names = (f"{EAGER}_ms", f"{COMPILED}_ms")
        times = {name: seconds * 1e3 for name, seconds in zip(names, self.seconds, strict=True) if seconds is not None}
        if self.compile_seconds:
            times |= {"compile_s": self.compile_seconds, "saved_s": self.saved_seconds}
        rounded = {f"lit_ort/{self.step}/{name}": round(value, 3) for name, value in times.items()}
        return {f"lit_ort/{self.step}": self.way, **rounded}

    def __str__(self) -> str:
        eager, compiled = ("?" if seconds is None else f"{seconds * 1e3:.1f} ms" for seconds in self.seconds)
        took = f"compiling took {self.compile_seconds:.1f} s"
        if self.reason is not None:
            return f"{self.step} runs {'in eager' if self.way == EAGER else 'compiled'}: {self.reason}"
        if self.way == COMPILED and None in self.seconds:
            return f"{self.step} is compiled, and too few calls followed to compare it with eager; {took}"
        if self.way == COMPILED:
            saved = self.saved_seconds
            balance = f"{saved:.1f} s were saved" if saved >= 0 else f"{-saved:.1f} s of it were not won back"
            return f"{self.step} is compiled: {compiled} a call, {eager} in eager (in turns); {took}, {balance}"
        if self.compile_seconds or self.seconds[1] is not None:
            return f"{self.step} runs in eager: {eager} a call, {compiled} compiled (in turns); {took}"
        if self.estimate is None:
            return f"{self.step} ran in eager: {self.calls[0]} calls are too few to be timed"
        seconds, gain = self.estimate
        if not gain:
            return f"{self.step} ran in eager, {eager} a call: its operators are too short for compiling to gain time"
        return (
            f"{self.step} ran in eager, {eager} a call: {self.calls[0]} calls are too few for about "
            f"{seconds:.0f} s of compiling (compile='always' compiles at once)"
        )


def _function_of(step: str | None, name: str) -> str:
    """A function's name, and the step's unless it is the step's own function."""
    return name if step is None or name.split(" ")[0] == step else f"{name} of {step}"


def _sentences(*parts: str | None) -> str:
    return " ".join(part for part in parts if part)


def _counts(operators: dict[str, int] | Iterable[tuple[str, int]]) -> str:
    return " ".join(f"{name} {count}" for name, count in dict(operators).items())


def describe(name: str, tensor: torch.Tensor, changing: Collection[int] = ()) -> str:
    """The name, dtype and shape of an input, with `any` for dynamic sizes."""
    sizes = ["any" if k in changing else str(size) for k, size in enumerate(tensor.shape)]
    return f"{name} {str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
