"""`x.requires_grad = True` for values that a graph computes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.compare import backend, gradients
from tests.compat.canary import canary


def required(layer: nn.Linear, x: Tensor) -> Tensor:
    hidden = x[:, None] * 2
    hidden.requires_grad = True
    assert hidden.requires_grad
    return layer(hidden).tanh().square().mean()


def penalized(layer: nn.Linear, x: Tensor) -> Tensor:
    """The gradient of the value is read, so the graph ends there."""
    hidden = x * 2
    hidden.requires_grad = True
    result = layer(hidden).tanh()
    (gradient,) = torch.autograd.grad(result.sum(), hidden, create_graph=True)
    return result.square().mean() + gradient.square().sum()


def kept(layer: nn.Linear, x: Tensor) -> Tensor:
    hidden = x * 2
    hidden.requires_grad = True
    loss = layer(hidden).square().sum()
    loss.backward()
    assert hidden.grad is not None
    return hidden.grad.abs().sum() + layer.weight.grad.sum()  # type: ignore[union-attr]


def viewed(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x * 2
    hidden.requires_grad = True
    return layer(hidden).mean(), hidden[0]


def test_the_graph_goes_on() -> None:
    with canary("SetAttrBuiltinVariable._call_setattr", "gradient_leaves", "speech models end the graph"):
        torch.compiler.reset()
        layer, engine = nn.Linear(4, 3), backend()
        compiled = torch.compile(required, backend=engine)
        x = torch.randn(5, 4)
        expected = required(layer, x)
        expected.backward()
        reference = gradients(layer)
        layer.zero_grad()
        actual = compiled(layer, x)
        actual.backward()
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradients(layer), reference)
        assert len(engine.compile_log.graphs) == 1


@pytest.mark.filterwarnings("ignore:.*create_graph:UserWarning", "ignore::lit_ort.errors.LitOrtWarning")
@pytest.mark.parametrize("step", [penalized, kept, viewed], ids=lambda step: step.__name__)
def test_values_that_leave_the_graph_require_gradients(step: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> None:
    torch.compiler.reset()
    layer = nn.Linear(4, 3)
    own = copy.deepcopy(layer)
    compiled = torch.compile(step, backend=backend(fallback="warn"))
    for _ in range(2):
        x = torch.randn(5, 4)
        actual, expected = compiled(own, x), step(layer, x)
        torch.testing.assert_close(actual, expected)
        if isinstance(actual, tuple) and isinstance(expected, tuple):
            assert [one.requires_grad for one in actual] == [one.requires_grad for one in expected]
