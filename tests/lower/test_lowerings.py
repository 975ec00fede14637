"""Every entry of the lowering table compared with torch, in a run that is long enough for ONNX Runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_ort.lower.engines import SHORTEST_RUN
from lit_ort.lower.operators import LOWERINGS
from tests.compare import backend

aten = torch.ops.aten
Function = Callable[[Tensor, Tensor], Tensor]
# Torch operators around a run: views without an entry, and copies of views for ONNX Runtime or the caller.
VIEWS = {"aten.clone.default", "aten.slice.Tensor", "aten.select.int", "aten.permute.default"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Functions that use an entry.

    Args:
        onnx: the ONNX operator.
        functions: functions of a[3, 4] > 0 and b[3, 4].
        integers: whether the entry also supports integers.
    """

    onnx: str
    functions: tuple[Function, ...]
    integers: bool = False


ENTRIES: dict[object, Entry] = {
    aten.add.Tensor: Entry("Add", (lambda a, b: a + b, lambda a, b: a + b[:1], lambda a, b: 2 + a), True),
    aten.sub.Tensor: Entry("Sub", (lambda a, b: a - b, lambda a, b: a[:, :1] - b, lambda a, b: a - 2), True),
    aten.mul.Tensor: Entry(
        "Mul", (lambda a, b: a * b, lambda a, b: a[0] * b, lambda a, b: a * 3, lambda a, b: a * a), True
    ),
    aten.div.Tensor: Entry("Div", (lambda a, b: b / a, lambda a, b: b / a[:, :1], lambda a, b: b / 3.0)),
    aten.neg.default: Entry("Neg", (lambda a, b: -b,), True),
    aten.exp.default: Entry("Exp", (lambda a, b: b.exp(), lambda a, b: (b * 200).exp())),
    aten.sqrt.default: Entry("Sqrt", (lambda a, b: a.sqrt(), lambda a, b: b.sqrt())),
    aten.reshape.default: Entry("Reshape", (lambda a, b: b.reshape(2, 6), lambda a, b: b.flatten()), True),
    aten.unsqueeze.default: Entry(
        "Reshape", (lambda a, b: b.unsqueeze(1), lambda a, b: b.unsqueeze(-1) * a[:, None]), True
    ),
    aten.squeeze.dim: Entry("Reshape", (lambda a, b: aten.squeeze.dim(b[:, None], 1),), True),
    aten.squeeze.dims: Entry("Reshape", (lambda a, b: aten.squeeze.dims(b[None, :, None], [0, 2]),), True),
    aten.permute.default: Entry(
        "Transpose", (lambda a, b: b[None].permute(2, 0, 1), lambda a, b: b.permute(-1, 0)), True
    ),
    aten.transpose.int: Entry(
        "Transpose", (lambda a, b: b[None].transpose(-1, 0), lambda a, b: b.transpose(0, 1)), True
    ),
    aten.t.default: Entry("Transpose", (lambda a, b: b.t(), lambda a, b: b.t() * a.t()), True),
    aten.expand.default: Entry(
        "Expand", (lambda a, b: b[:1].expand(5, 4), lambda a, b: b[:, None].expand(3, 2, 4)), True
    ),
}


def negated(x: Tensor) -> Tensor:
    for _ in range(SHORTEST_RUN):
        x = -x
    return x


def shifted(x: Tensor) -> Tensor:
    for _ in range(SHORTEST_RUN // 2):
        x = (x + 2) - 2
    return x


def in_a_run(function: Function, onnx: str) -> Function:
    """A function between runs of other operators, each of which is long enough by itself."""
    chain = shifted if onnx == "Neg" else negated
    return lambda a, b: chain(function(chain(a), chain(b)))


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    if not dtype.is_floating_point:
        first, second = (torch.randint(1, 5, (3, 4), generator=generator, dtype=dtype) for _ in range(2))
        return first, second
    a = torch.rand(3, 4, generator=generator, dtype=dtype) + 0.5
    b = torch.randn(3, 4, generator=generator, dtype=dtype)
    return a.requires_grad_(), b.requires_grad_()


def cases_of_each_dtype() -> list[Any]:
    cases = []
    for target, entry in ENTRIES.items():
        for k in range(len(entry.functions)):
            dtypes = [torch.float32, *([torch.int64] if entry.integers else [])]
            cases += [pytest.param(target, k, dtype, id=f"{target}-{k}-{dtype}") for dtype in dtypes]
            others = [torch.float64, *([torch.int32] if entry.integers else [])]
            cases += [
                pytest.param(target, k, dtype, id=f"{target}-{k}-{dtype}", marks=pytest.mark.sweep) for dtype in others
            ]
    return cases


def test_every_entry_is_tested() -> None:
    assert ENTRIES.keys() == LOWERINGS.keys()


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("target", "position", "dtype"), cases_of_each_dtype())
def test_results_match_torch(target: object, position: int, dtype: torch.dtype) -> None:
    function = in_a_run(ENTRIES[target].functions[position], ENTRIES[target].onnx)
    a, b = inputs(dtype)
    engine = backend(disable_passes=("regions",))
    with torch.no_grad():
        actual, expected = torch.compile(function, backend=engine)(a, b), function(a, b)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    (report,) = engine.compile_log.graphs
    assert ENTRIES[target].onnx in report.operators_after
    assert report.torch_operators.keys() <= VIEWS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", ENTRIES, ids=str)
def test_gradients_match_torch(target: object) -> None:
    for tested in ENTRIES[target].functions:
        torch.compiler.reset()
        function = in_a_run(tested, ENTRIES[target].onnx)
        a, b = inputs(torch.float32)

        def step(a: Tensor, b: Tensor, function: Function = function) -> Tensor:
            value = function(a, b)
            # Each element has a different weight, so that errors don't cancel.
            weights = torch.linspace(0.3, 1.7, value.numel()).reshape(value.shape)
            return (value.nan_to_num(posinf=1) * weights).sum() + (a * b).sum()

        engine = backend(disable_passes=("regions",))
        actual = torch.autograd.grad(torch.compile(step, backend=engine)(a, b), (a, b))
        torch.testing.assert_close(actual, torch.autograd.grad(step(a, b), (a, b)), equal_nan=True)
        assert ENTRIES[target].onnx in engine.compile_log.graphs[0].operators_after


@pytest.mark.parametrize(
    ("onnx", "function"),
    [
        ("Reshape", lambda a, b: a.reshape(-1) * b.flatten()),
        ("Reshape", lambda a, b: a.reshape(a.shape[0] * 2, 2) - b.reshape(-1, 2)),
        ("Expand", lambda a, b: a.unsqueeze(1).expand(a.shape[0], 3, 4) + b.unsqueeze(1)),
        ("Transpose", lambda a, b: a.t() * b.t().reshape(4, -1)),
    ],
)
def test_dynamic_shapes(onnx: str, function: Function) -> None:
    engine = backend(disable_passes=("regions",))
    step = torch.compile(in_a_run(function, onnx), backend=engine)
    for rows in (3, 5, 2, 7):
        a, b = torch.randn(rows, 4), torch.randn(rows, 4)
        torch.testing.assert_close(step(a, b), function(a, b))
    assert len(engine.compile_log.graphs) == 2
    assert onnx in engine.compile_log.graphs[1].operators_after


def test_a_short_run_stays_in_torch() -> None:
    engine = backend(disable_passes=("regions",))
    a, b = inputs(torch.float32)
    torch.compile(lambda a, b: -(a + b), backend=engine)(a, b)
    assert engine.compile_log.graphs[0].torch_operators.keys() >= {"aten.add.Tensor", "aten.neg.default"}
