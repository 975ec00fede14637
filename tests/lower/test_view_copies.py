"""Views that matmuls and results of native sessions read: regions copy them, and no operator of ONNX Runtime does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_ort.backend import build
from lit_ort.lower import native_operators
from tests.compare import backend, mostly, relative_error

pytestmark = pytest.mark.usefixtures("uses_openmp")
# Views of float[6, 4, 6, 4], all of two dimensions of 4.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a column": lambda x: x[1, :, 2],
    "a column of columns": lambda x: x[:4, :, :, 3][:, :, 5],
    "a row": lambda x: x[2, 3, 1:5],
    "a slice with a step": lambda x: x[0, :, ::2, 1][:, :1].expand(4, 4),
    "a permutation": lambda x: x.permute(3, 1, 0, 2)[:, :, 0, 5],
    "a slice from the end": lambda x: x[-1, :, -4:, -1],
    "a reshaped permutation": lambda x: x.permute(2, 0, 1, 3).reshape(36, 16)[7].view(4, 4),
    "a permutation of a slice": lambda x: x[1:5, 2].permute(2, 0, 1)[:, :, 3],
    "a transposed row": lambda x: x[3, :, 1].t(),
    "a merged slice": lambda x: x[:, :, 1:3].reshape(48, 4)[4:8],
    "a split": lambda x: x.split(2, dim=2)[1][3, :, 0],
    "an unbound row": lambda x: x.unbind(2)[4][0],
}
USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "left factor": lambda view, other: (view @ other).exp(),
    "right factor": lambda view, other: (other @ view).exp(),
    "transposed factor": lambda view, other: (view.t() @ other).exp() @ view,
    "added": lambda view, other: torch.addmm(view, other, other).exp(),
    "added and factor": lambda view, other: torch.addmm(view, view, other).exp(),
    "batch": lambda view, other: torch.bmm(view.expand(3, 4, 4), other.expand(3, 4, 4)).exp(),
    "result": lambda view, other: (view * 1.0, view.t().contiguous(), (other @ other).exp()),
}


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of the models that are built."""
    monkeypatch.setattr(native_operators, "FEWEST_OPERATORS", 0)
    monkeypatch.setattr(native_operators, "OPERATORS_OF_SWITCH", 0)
    found, lower = list[str](), build.lower

    def lowered(*args: Any) -> Any:
        result = lower(*args)
        assert result.phase.is_native
        found.extend(node.op_type for node in result.model.graph.node)
        return result

    monkeypatch.setattr(build, "lower", lowered)
    return found


def assert_same(function: Callable[..., Any], call: Callable[..., Any], *inputs: Tensor) -> None:
    found = []
    for run in (function, call):
        given = [x.detach().clone().requires_grad_() for x in inputs]
        results = run(*given)
        results = results if isinstance(results, tuple) else (results,)
        found.append([*results, *torch.autograd.grad(torch.stack([r.square().sum() for r in results]).sum(), given)])
    for actual, expected in zip(*reversed(found), strict=True):
        assert relative_error(actual.detach(), expected.detach()) < 1e-5


@pytest.mark.sampled(10)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("view", mostly(pytest.mark.sweep, VIEWS, 3))
def test_views_are_copied_by_regions(view: str, use: str, operators: list[str]) -> None:
    def function(x: Tensor, other: Tensor) -> Any:
        return USES[use](VIEWS[view](x.sin()), other)

    engine = backend()
    assert_same(function, torch.compile(function, backend=engine), torch.randn(6, 4, 6, 4), torch.randn(4, 4))
    assert not {"Slice", "Transpose", "Gather"} & set(operators)


def test_views_of_inputs(operators: list[str]) -> None:
    def function(x: Tensor, weights: Tensor) -> Tensor:
        columns = [x[:, :, k] @ weights[:, :, k] for k in range(weights.shape[-1])]
        return torch.stack(columns, -1).square().mean()

    compiled = torch.compile(function, backend=backend())
    assert_same(function, compiled, torch.randn(5, 3, 4), torch.randn(3, 2, 4))
    assert "Transpose" not in operators
    assert "Slice" not in operators


@pytest.mark.sampled(1)
def test_views_of_any_sizes(operators: list[str]) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        heads = x.view(x.shape[0], x.shape[1], 2, 4).permute(0, 2, 1, 3)
        last = x[:, -3:].flatten(1) @ weight
        return (heads @ heads.mT).exp().mean() + last.square().mean() + (heads[:, 1, 1:] @ weight[:4]).sum()

    engine = backend()
    compiled = torch.compile(function, backend=engine, dynamic=True)
    for rows, length in ((2, 5), (3, 7), (4, 6)):
        assert_same(function, compiled, torch.randn(rows, length, 8), torch.randn(24, 3))
    assert len(engine.compile_log.graphs) == 1
    assert not {"Slice", "Transpose"} & set(operators)


@pytest.mark.sampled(1)
def test_gradients_of_slices_of_any_sizes() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x[:, -3:].exp() @ y[-2:].exp()).sum() + x[:, -1].exp().sum() + y[1:].exp().sum()

    compiled = torch.compile(function, backend=backend(), dynamic=True)
    for rows, length in ((2, 5), (3, 7), (4, 6)):
        assert_same(function, compiled, torch.randn(rows, length, 2), torch.randn(length, 3))


def test_results_in_the_order_of_memory_of_an_operator(operators: list[str]) -> None:
    """The channels of a convolution are last in memory."""
    convolution = nn.Conv2d(8, 8, 3).requires_grad_(False)

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        images = convolution(x.contiguous(memory_format=torch.channels_last))
        rows = images.permute(0, 2, 3, 1)
        return rows, images.relu().permute(0, 2, 3, 1), (rows.reshape(-1, 8)[:, :4] @ rows[0, 0, :4, :4]).exp()

    x = torch.randn(2, 8, 9, 9)
    expected, actual = function(x), torch.compile(function, backend=backend())(x)
    for one, other in zip(actual, expected, strict=True):
        assert relative_error(one.detach(), other.detach()) < 1e-5
        assert one.stride() == other.stride()
    assert "Transpose" not in operators


def test_a_transposed_gradient_of_a_weight(operators: list[str]) -> None:
    weight = torch.randn(4, 3)
    compiled = torch.compile(lambda x, weight: (x @ weight.t()).exp().mean(), backend=backend())
    assert_same(lambda x, weight: (x @ weight.t()).exp().mean(), compiled, torch.randn(5, 3), weight)
    assert "Transpose" not in operators
