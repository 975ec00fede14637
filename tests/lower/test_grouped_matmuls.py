"""Matmuls of groups of rows, as experts compute them, in sessions that call no Python and in torch nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import moe as moe  # registers the operator

from lit_ort._compat import openmp
from tests.compare import assert_same_step, compiled, gradients, relative_error
from tests.lower.test_native_phases import any_number_of_operators, assert_native
from tests.passes.reports import report_of

pytestmark = pytest.mark.usefixtures(any_number_of_operators.__name__)
INNER, COLUMNS = 20, 12


@dataclasses.dataclass(frozen=True)
class Options:
    transposed: bool = True
    dtype: torch.dtype = torch.float32
    ends_dtype: torch.dtype = torch.int32


OTHERS = [
    Options(transposed=False),
    Options(ends_dtype=torch.int64),
    Options(dtype=torch.float64),
    Options(transposed=False, dtype=torch.float64, ends_dtype=torch.int64),
]
# The ends of groups among 30 rows: empty groups, one group of all, none, rows after the last group and, as a slice has
# them, ends outside the rows.
ENDS = [(0, 15, 15, 30, 30), (30,), (0, 0), (4, 9), (9, 50), (12, 5, 20)]
CASES = [*((Options(), ends) for ends in ENDS), *((options, ENDS[0]) for options in OTHERS)]


@pytest.fixture
def on_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    if openmp.find_openmp() is None:
        pytest.skip("torch has no OpenMP here")
    monkeypatch.setattr(openmp, "uses_openmp", lambda: True)


class Experts(nn.Module):
    """Groups of rows through a layer of their own each, between layers that all rows have in common."""

    def __init__(self, groups: int, options: Options) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INNER, INNER), nn.Linear(COLUMNS, 5)
        shape = (COLUMNS, INNER) if options.transposed else (INNER, COLUMNS)
        self.weight = nn.Parameter(torch.randn(groups, *shape))
        self.transposed = options.transposed
        self.to(options.dtype)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        weight = self.weight.transpose(1, 2) if self.transposed else self.weight
        rows = torch.ops.transformers.grouped_mm_fallback(self.first(x).tanh(), weight, ends)
        return self.last(rows.sin()).square().mean()


def step(module: nn.Module, x: Tensor, ends: Tensor) -> Tensor:
    return module(x, ends)


def batch(ends: Sequence[int], options: Options, rows: int = 30) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, INNER, dtype=options.dtype), torch.tensor(ends, dtype=options.ends_dtype)


def tolerance(options: Options) -> float:
    return 1e-5 if options.dtype == torch.float32 else 1e-13


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("options", "ends"), CASES, ids=str)
@pytest.mark.usefixtures("on_openmp")
def test_a_session_computes_them(options: Options, ends: Sequence[int]) -> None:
    module = Experts(len(ends), options)
    engine = assert_same_step(module, step, *batch(ends, options), tolerance=tolerance(options))
    assert_native(engine)
    (graph,) = engine.compile_log.graphs
    # The rows times the matrices, and two gradients.
    assert graph.operators_after["GroupedMatmul"] == 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("options", "ends"), CASES, ids=str)
def test_a_torch_node_computes_them(options: Options, ends: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "uses_openmp", lambda: False)
    engine = assert_same_step(Experts(len(ends), options), step, *batch(ends, options), tolerance=tolerance(options))
    assert report_of(engine, "grouped_matmuls").fired == 2


@pytest.mark.usefixtures("on_openmp")
def test_rows_that_change() -> None:
    """One graph for all numbers of rows, whose groups end elsewhere in each batch."""
    options = Options()
    module = Experts(3, options)
    call = compiled(step)
    for rows in (30, 31, 47, 30, 90):
        x, ends = batch(sorted(torch.randint(0, rows, (2,)).tolist()) + [rows], options, rows)
        module.zero_grad()
        expected = step(module, x, ends)
        expected.backward()
        wanted = gradients(module)
        module.zero_grad()
        actual = call(module, x, ends)
        actual.backward()
        assert relative_error(actual.detach(), expected.detach()) <= 1e-5
        for name, gradient in gradients(module).items():
            assert relative_error(gradient, wanted[name]) <= 1e-5, name


@pytest.mark.usefixtures("on_openmp")
@pytest.mark.parametrize(("frozen", "left"), [("weight", 2), ("first", 2)])
def test_gradients_that_nothing_reads(frozen: str, left: int) -> None:
    """Frozen experts need no gradient of their matrices, and experts behind frozen layers none of their rows."""
    module = Experts(3, Options())
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    engine = assert_same_step(module, step, *batch((7, 15, 30), Options()))
    (graph,) = engine.compile_log.graphs
    assert graph.operators_after["GroupedMatmul"] == left


def test_other_dtypes_are_torch_nodes() -> None:
    """There is no kernel for bfloat16."""
    options = Options(dtype=torch.bfloat16)
    engine = assert_same_step(Experts(3, options), step, *batch((7, 15, 30), options), tolerance=0.05)
    (graph,) = engine.compile_log.graphs
    assert "GroupedMatmul" not in graph.operators_after
