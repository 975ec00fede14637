"""Compiles the sample inputs of torch's operator database, and compares the results with eager.

    python -m tests.operators.op_db                 # all operators; prints failures and counts
    python -m tests.operators.op_db linalg          # operators whose name contains a text

Operators run in separate processes, so that a crash does not affect other operators.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_unflatten

from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.runtime.random import SeededDropout
from tests.compare import backend

SAMPLES = 2
SECONDS = 120.0
# Operators that share a process.
BATCH = 20
# float64 uses the same operators and takes twice the time.
DTYPES = (torch.float32,)
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-7, 1e-7)}
# Correct; correct, but with a graph in eager; another value than eager; an error that eager doesn't raise; a crash or a
# timeout.
RIGHT, FALLBACK, WRONG, RAISES, LOST = "right", "fallback", "wrong", "raises", "lost"
BAD = (WRONG, RAISES, LOST)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of an operator's samples in one dtype.

    Args:
        name: the operator, its variant and the dtype.
        kind: the worst outcome of its samples.
        detail: the details of that sample.
    """

    name: str
    kind: str
    detail: str = ""


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def operators(text: str = "") -> list[OpInfo]:
    """The operators whose name contains a text and that support one of `DTYPES`."""
    return [op for op in op_db if text in name_of(op) and any(op.supports_dtype(dtype, "cpu") for dtype in DTYPES)]


def sweep(text: str = "", part: int = 0, parts: int = 1) -> Iterator[Outcome]:
    """Outcomes of the operators whose name contains a text, or of one of several equal parts of them."""
    yield from outcomes_in_processes(operators(text)[part::parts], _outcomes_of, name_of)


def outcomes_in_processes(
    subjects: Sequence[Any], outcomes_of: Callable[[Any], list[Outcome]], name_of: Callable[[Any], str]
) -> Iterator[Outcome]:
    """The outcomes of subjects, such as operators, in processes of their own.

    Args:
        subjects: the subjects.
        outcomes_of: compares one of them.
        name_of: the name of one of them.
    """
    while subjects:
        done = 0
        for outcomes in _outcomes(subjects[:BATCH], outcomes_of, name_of):
            done += 1
            yield from outcomes
        subjects = subjects[done:]


def _outcomes(
    subjects: Sequence[Any], outcomes_of: Callable[[Any], list[Outcome]], name_of: Callable[[Any], str]
) -> Iterator[list[Outcome]]:
    """Compares subjects in a separate process, up to the one that crashes it or times out."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(subjects, outcomes_of, sender))
    process.start()
    sender.close()
    for subject in subjects:
        try:
            outcomes = json.loads(receiver.recv()) if receiver.poll(SECONDS) else None
        except EOFError:
            outcomes = None
        if outcomes is None:
            process.kill()
            process.join()
            yield [Outcome(name_of(subject), LOST, f"exit code {process.exitcode}")]
            return
        yield [Outcome(*fields) for fields in outcomes]
    process.join()


def _send(subjects: Sequence[Any], outcomes_of: Callable[[Any], list[Outcome]], sender: Any) -> None:
    warnings.simplefilter("ignore")
    # The worker threads of the parent process don't exist in a forked process.
    torch.set_num_threads(1)
    for subject in subjects:
        sender.send(json.dumps([dataclasses.astuple(outcome) for outcome in outcomes_of(subject)]))


def _outcomes_of(op: OpInfo) -> list[Outcome]:
    """One outcome for each dtype: that of all samples in one graph, or the worst of the separate samples."""
    steps = {dtype: _steps(op, dtype) for dtype in DTYPES if op.supports_dtype(dtype, "cpu")}
    names = {dtype: f"{name_of(op)} {str(dtype).removeprefix('torch.')}" for dtype in steps}
    all_steps = [step for of_dtype in steps.values() for step in of_dtype]
    if not all_steps or _compare(_together(all_steps))[0] == RIGHT:
        return [Outcome(name, RIGHT) for name in names.values()]
    ranks = (RIGHT, FALLBACK, LOST, RAISES, WRONG)
    outcomes = {dtype: [(RIGHT, ""), *(_compare(step) for step in of_dtype)] for dtype, of_dtype in steps.items()}
    worst = {dtype: max(of_dtype, key=lambda outcome: ranks.index(outcome[0])) for dtype, of_dtype in outcomes.items()}
    return [Outcome(names[dtype], *worst[dtype]) for dtype in steps]


def _steps(op: OpInfo, dtype: torch.dtype) -> list[Step]:
    """The first samples of a dtype, without those for which eager raises an error."""
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    samples = islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), SAMPLES)
    return [step for step in (_step_of(op, sample, differentiable) for sample in samples) if _runs_in_eager(step)]


@dataclasses.dataclass(frozen=True)
class Step:
    """A function to compile and its arguments.

    Args:
        call: returns a loss or None, and results, for a list of tensors.
        tensors: the arguments.
        summary: a description of the sample.
    """

    call: Callable[[Sequence[Tensor]], tuple[Tensor | None, list[Tensor]]]
    tensors: Sequence[Tensor]
    summary: str


def _together(steps: Sequence[Step]) -> Step:
    """All steps in one function, which is compiled once."""

    def call(tensors: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        remaining, losses, results = list(tensors), [], []
        for step in steps:
            loss, step_results = step.call(remaining[: len(step.tensors)])
            remaining = remaining[len(step.tensors) :]
            losses += [] if loss is None else [loss]
            results += step_results
        return (sum(losses[1:], losses[0]) if losses else None), results

    return Step(call, [tensor for step in steps for tensor in step.tensors], "all samples at once")


def _runs_in_eager(step: Step) -> bool:
    try:
        _run(step.call, step.tensors)
    # Eager can raise any error for an unsupported sample.
    except Exception:
        return False
    return True


def _compare(step: Step) -> tuple[str, str]:
    torch._dynamo.reset()
    expected = _run(step.call, step.tensors)
    with other_dropout():
        again = _run(step.call, step.tensors)
    engine = backend(fallback="warn")
    try:
        with dynamo_settings("step", strict=False):
            actual = _run(torch.compile(step.call, backend=engine), step.tensors)
    # Any error is a failure, since eager raises none.
    except Exception:
        return RAISES, traceback.format_exc(limit=-1).strip().splitlines()[-1][:300]
    # Memory that is not initialized has no values of its own either.
    is_random = not _are_close(again, expected, exact=True)
    if not _are_close(actual, expected, exact=False, shapes_only=is_random):
        return WRONG, step.summary[:300]
    fallbacks = [graph.fallback for graph in engine.compile_log.graphs if graph.fallback is not None]
    return (FALLBACK, fallbacks[0][:300]) if fallbacks else (RIGHT, "")


def other_dropout() -> SeededDropout:
    """Draws other dropout in eager, as a session does, and the same numbers otherwise."""
    return SeededDropout(1, torch.device("cpu"))


def _step_of(op: OpInfo, sample: SampleInput, differentiable: bool) -> Step:
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    positions = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    call = op.get_op()

    def step(tensors: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        arguments = list(leaves)
        for position, tensor in zip(positions, tensors, strict=True):
            arguments[position] = tensor
        input, args, kwargs = tree_unflatten(arguments, spec)
        results = call(input, *args, **kwargs)
        results = sample.output_process_fn_grad(results)
        flat = [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, Tensor)]
        if not differentiable:
            return None, flat
        parts = [weighted(result) for result in flat if result.is_floating_point() or result.is_complex()]
        return (sum(parts[1:], parts[0]) if parts else None), flat

    return Step(step, [leaves[position] for position in positions], sample.summary())


def weighted(result: Tensor) -> Tensor:
    real = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
    weights = torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).view(real.shape)
    return (real * weights).sum()


def _run(call: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Any]:
    """The results and gradients of a call with copies of the tensors."""
    copies = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    torch.manual_seed(0)
    loss, results = call(copies)
    leaves = [tensor for tensor in copies if tensor.requires_grad]
    gradients: Sequence[Any] = ()
    if loss is not None and loss.requires_grad:
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*(result.detach() for result in results), *gradients]


def _are_close(actual: list[Any], expected: list[Any], exact: bool, shapes_only: bool = False) -> bool:
    if len(actual) != len(expected):
        return False
    for value, reference in zip(actual, expected, strict=True):
        if (value is None) != (reference is None):
            return False
        if value is not None and not is_close(value, reference, exact, shapes_only):
            return False
    return True


def is_close(value: Tensor, reference: Tensor, exact: bool, shapes_only: bool) -> bool:
    if (value.shape, value.dtype, value.layout) != (reference.shape, reference.dtype, reference.layout):
        return False
    if shapes_only or value.layout != torch.strided:
        return True
    rtol, atol = TOLERANCES.get(value.real.dtype if value.is_complex() else value.dtype, (1e-4, 1e-5))
    if exact:
        rtol = atol = 0.0
    try:
        torch.testing.assert_close(value, reference, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="", help="a text that the names of the operators contain")
    parser.add_argument("--part", default="0/1", help="for example, 3/16: the fourth of sixteen parts")
    parser.add_argument("--json", type=Path, help="a file to which the outcomes are appended, one in each line")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.part.split("/"))
    counts: Counter[str] = Counter()
    for outcome in sweep(options.text, part, parts):
        counts[outcome.kind] += 1
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        if outcome.kind != RIGHT:
            print(f"{outcome.kind:8} {outcome.name}: {outcome.detail}", flush=True)
    total = sum(counts.values())
    print(", ".join(f"{kind} {count} ({count / total:.1%})" for kind, count in counts.most_common()))


if __name__ == "__main__":
    main()
