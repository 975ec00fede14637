"""torch's own database of operators and sample inputs, each compiled and compared with eager.

    python -m tests.operators.op_db                 # all of it, as a table of counts and what is not right
    python -m tests.operators.op_db linalg          # names that contain a text

Operators run in processes of their own: what crashes one tells nothing about the next.
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

from lit_ort.backend.steps import dynamo_settings
from tests.compare import backend

SAMPLES = 2
SECONDS = 120.0
# Operators that share a process.
BATCH = 20
# In float64 the same operators run, at twice the time.
DTYPES = (torch.float32,)
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-7, 1e-7)}
# Right in ONNX Runtime; right with a graph in eager; another value; an error where eager has none; a crash or too slow.
RIGHT, FALLBACK, WRONG, RAISES, LOST = "right", "fallback", "wrong", "raises", "lost"
BAD = (WRONG, RAISES, LOST)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of an operator's samples in one type.

    Args:
        name: the operator, its variant and its type.
        kind: the worst of its samples.
        detail: of that sample.
    """

    name: str
    kind: str
    detail: str = ""


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def operators(text: str = "") -> list[OpInfo]:
    """Those whose name contains a text, and that compute in a type of `DTYPES`."""
    return [op for op in op_db if text in name_of(op) and any(op.supports_dtype(dtype, "cpu") for dtype in DTYPES)]


def sweep(text: str = "", part: int = 0, parts: int = 1) -> Iterator[Outcome]:
    """Outcomes of the operators whose name contains a text, or of one of several equal parts of them."""
    waiting = operators(text)[part::parts]
    while waiting:
        done = 0
        for found in _outcomes(waiting[:BATCH]):
            done += 1
            yield from found
        waiting = waiting[done:]


def _outcomes(ops: Sequence[OpInfo]) -> Iterator[list[Outcome]]:
    """Compares samples of operators in a process of their own, up to the one at which that is lost."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(ops, sender))
    process.start()
    sender.close()
    for op in ops:
        try:
            found = json.loads(receiver.recv()) if receiver.poll(SECONDS) else None
        except EOFError:
            found = None
        if found is None:
            process.kill()
            process.join()
            yield [Outcome(name_of(op), LOST, f"exit code {process.exitcode}")]
            return
        yield [Outcome(*parts) for parts in found]
    process.join()


def _send(ops: Sequence[OpInfo], sender: Any) -> None:
    warnings.simplefilter("ignore")
    # torch's vector units are per thread; a child of a process with threads has only one.
    torch.set_num_threads(1)
    for op in ops:
        sender.send(json.dumps([dataclasses.astuple(outcome) for outcome in _outcomes_of(op)]))


def _outcomes_of(op: OpInfo) -> list[Outcome]:
    """One outcome a type: of all samples in one graph, or the worst of each by itself."""
    steps = {dtype: _steps(op, dtype) for dtype in DTYPES if op.supports_dtype(dtype, "cpu")}
    names = {dtype: f"{name_of(op)} {str(dtype).removeprefix('torch.')}" for dtype in steps}
    flat = [step for own in steps.values() for step in own]
    if not flat or _compare(_together(flat))[0] == RIGHT:
        return [Outcome(name, RIGHT) for name in names.values()]
    ranks = (RIGHT, FALLBACK, LOST, RAISES, WRONG)
    found = {dtype: [(RIGHT, ""), *(_compare(step) for step in own)] for dtype, own in steps.items()}
    worst = {dtype: max(own, key=lambda outcome: ranks.index(outcome[0])) for dtype, own in found.items()}
    return [Outcome(names[dtype], *worst[dtype]) for dtype in steps]


def _steps(op: OpInfo, dtype: torch.dtype) -> list[Step]:
    """The first samples of a type, but for those that eager refuses."""
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    samples = islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), SAMPLES)
    return [step for step in (_step_of(op, sample, differentiable) for sample in samples) if _eager_takes(step)]


@dataclasses.dataclass(frozen=True)
class Step:
    """A function to compile, from tensors to a loss, or None, and results; and what it is called with."""

    call: Callable[[Sequence[Tensor]], tuple[Tensor | None, list[Tensor]]]
    tensors: Sequence[Tensor]
    summary: str


def _together(steps: Sequence[Step]) -> Step:
    """One function of all, which takes one compilation instead of many."""

    def call(tensors: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        remaining, losses, results = list(tensors), [], []
        for step in steps:
            loss, own = step.call(remaining[: len(step.tensors)])
            remaining = remaining[len(step.tensors) :]
            losses += [] if loss is None else [loss]
            results += own
        return (sum(losses[1:], losses[0]) if losses else None), results

    return Step(call, [tensor for step in steps for tensor in step.tensors], "all samples at once")


def _eager_takes(step: Step) -> bool:
    try:
        _run(step.call, step.tensors)
    # Whatever it raises is what eager does with this sample.
    except Exception:
        return False
    return True


def _compare(step: Step) -> tuple[str, str]:
    torch._dynamo.reset()
    expected, again = _run(step.call, step.tensors), _run(step.call, step.tensors)
    engine = backend(fallback="warn")
    try:
        with dynamo_settings("step", strict=False):
            actual = _run(torch.compile(step.call, backend=engine), step.tensors)
    # Whatever it raises, eager did not.
    except Exception:
        return RAISES, traceback.format_exc(limit=-1).strip().splitlines()[-1][:300]
    draws = not _are_close(again, expected, exact=True)
    if not _are_close(actual, expected, exact=False, shapes_alone=draws):
        return WRONG, step.summary[:300]
    fallbacks = [graph.fallback for graph in engine.compile_log.graphs if graph.fallback is not None]
    return (FALLBACK, fallbacks[0][:300]) if fallbacks else (RIGHT, "")


def _step_of(op: OpInfo, sample: SampleInput, differentiable: bool) -> Step:
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    call = op.get_op()

    def step(tensors: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        input, args, kwargs = tree_unflatten(filled, spec)
        results = call(input, *args, **kwargs)
        results = sample.output_process_fn_grad(results)
        flat = [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, Tensor)]
        if not differentiable:
            return None, flat
        parts = [_weighted(result) for result in flat if result.is_floating_point() or result.is_complex()]
        return (sum(parts[1:], parts[0]) if parts else None), flat

    return Step(step, [leaves[place] for place in places], sample.summary())


def _weighted(result: Tensor) -> Tensor:
    real = torch.view_as_real(result) if result.is_complex() else result
    weights = torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).view(real.shape)
    return (real * weights).sum()


def _run(call: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Any]:
    """The results and gradients."""
    own = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    loss, results = call(own)
    wanted = [tensor for tensor in own if tensor.requires_grad]
    gradients: Sequence[Any] = ()
    if loss is not None and loss.requires_grad:
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [*(result.detach() for result in results), *gradients]


def _are_close(actual: list[Any], expected: list[Any], exact: bool, shapes_alone: bool = False) -> bool:
    if len(actual) != len(expected):
        return False
    for own, reference in zip(actual, expected, strict=True):
        if (own is None) != (reference is None):
            return False
        if own is not None and not _is_close(own, reference, exact, shapes_alone):
            return False
    return True


def _is_close(own: Tensor, reference: Tensor, exact: bool, shapes_alone: bool) -> bool:
    if (own.shape, own.dtype, own.layout) != (reference.shape, reference.dtype, reference.layout):
        return False
    if shapes_alone or own.layout != torch.strided:
        return True
    rtol, atol = TOLERANCES.get(own.real.dtype if own.is_complex() else own.dtype, (1e-4, 1e-5))
    if exact:
        rtol = atol = 0.0
    try:
        torch.testing.assert_close(own, reference, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="", help="what the operators' names contain")
    parser.add_argument("--part", default="0/1", help="such as 3/16: the fourth of sixteen parts")
    parser.add_argument("--json", type=Path, help="a file to append the outcomes to, one a line")
    given = parser.parse_args()
    part, parts = (int(number) for number in given.part.split("/"))
    counts: Counter[str] = Counter()
    for outcome in sweep(given.text, part, parts):
        counts[outcome.kind] += 1
        if given.json is not None:
            with given.json.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        if outcome.kind != RIGHT:
            print(f"{outcome.kind:8} {outcome.name}: {outcome.detail}", flush=True)
    total = sum(counts.values())
    print(", ".join(f"{kind} {count} ({count / total:.1%})" for kind, count in counts.most_common()))


if __name__ == "__main__":
    main()
