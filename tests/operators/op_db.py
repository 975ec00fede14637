"""torch's own database of operators and sample inputs, each compiled and compared with eager.

    python -m tests.operators.op_db                 # all of it, as a table of counts and what is not right
    python -m tests.operators.op_db linalg          # names that contain a text

Every operator runs in a process of its own: what crashes one tells nothing about the next.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lit_ort.backend.steps import dynamo_settings
from tests.compare import backend

SAMPLES = 5
SECONDS = 120.0
DTYPES = (torch.float32, torch.float64)
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


def outcomes(op: OpInfo) -> list[Outcome]:
    """Compares an operator's samples, in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(op, sender))
    process.start()
    sender.close()
    try:
        found = json.loads(receiver.recv()) if receiver.poll(SECONDS) else None
    except EOFError:
        found = None
    process.kill() if found is None else None
    process.join()
    if found is None:
        return [Outcome(name_of(op), LOST, f"exit code {process.exitcode}")]
    return [Outcome(*parts) for parts in found]


def _send(op: OpInfo, sender: Any) -> None:
    warnings.simplefilter("ignore")
    # torch's vector units are per thread; a child of a process with threads has only one.
    torch.set_num_threads(1)
    found = [dataclasses.astuple(_worst(op, dtype)) for dtype in DTYPES if op.supports_dtype(dtype, "cpu")]
    sender.send(json.dumps(found))


def _worst(op: OpInfo, dtype: torch.dtype) -> Outcome:
    name = f"{name_of(op)} {str(dtype).removeprefix('torch.')}"
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    found = [Outcome(name, RIGHT)]
    torch.manual_seed(0)
    for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), SAMPLES):
        torch._dynamo.reset()
        kind, detail = _compare(op, sample, differentiable)
        found.append(Outcome(name, kind, detail))
    ranks = (RIGHT, FALLBACK, LOST, RAISES, WRONG)
    return max(found, key=lambda outcome: ranks.index(outcome.kind))


def _compare(op: OpInfo, sample: SampleInput, differentiable: bool) -> tuple[str, str]:
    step = _step_of(op, sample, differentiable)
    try:
        expected, again = _run(step, sample), _run(step, sample)
    # Whatever it raises is what eager does with this sample.
    except Exception:
        return RIGHT, ""
    engine = backend(fallback="warn")
    try:
        with dynamo_settings("step", strict=False):
            actual = _run(torch.compile(step, backend=engine), sample)
    # Whatever it raises, eager did not.
    except Exception:
        return RAISES, traceback.format_exc(limit=-1).strip().splitlines()[-1][:300]
    draws = not _are_close(again, expected, exact=True)
    if not _are_close(actual, expected, exact=False, shapes_alone=draws):
        return WRONG, f"{sample.summary()}"[:300]
    fallbacks = [graph.fallback for graph in engine.compile_log.graphs if graph.fallback is not None]
    return (FALLBACK, fallbacks[0][:300]) if fallbacks else (RIGHT, "")


def _step_of(op: OpInfo, sample: SampleInput, differentiable: bool) -> Callable[[list[Tensor]], Any]:
    """A function of the sample's tensors, to a loss and the operator's results."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    call = op.get_op()

    def step(tensors: list[Tensor]) -> Any:
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
        return (sum(parts) if parts else None), flat

    return step


def _weighted(result: Tensor) -> Tensor:
    real = torch.view_as_real(result) if result.is_complex() else result
    weights = torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).view(real.shape)
    return (real * weights).sum()


def _run(step: Callable[..., Any], sample: SampleInput) -> list[Any]:
    """The results and gradients."""

    def fresh(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    leaves, _ = tree_flatten(tree_map(fresh, (sample.input, sample.args, sample.kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    loss, results = step(tensors)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
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


def sweep(text: str = "") -> Iterator[Outcome]:
    for op in operators(text):
        yield from outcomes(op)


def main() -> None:
    counts: Counter[str] = Counter()
    for outcome in sweep(*sys.argv[1:2]):
        counts[outcome.kind] += 1
        if outcome.kind != RIGHT:
            print(f"{outcome.kind:8} {outcome.name}: {outcome.detail}", flush=True)
    total = sum(counts.values())
    print(", ".join(f"{kind} {count} ({count / total:.1%})" for kind, count in counts.most_common()))


if __name__ == "__main__":
    main()
