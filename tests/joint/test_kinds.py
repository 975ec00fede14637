"""The kind of a graph: which output is the loss, and the gradients of the other outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_ort.joint.kinds import detach_others, loss_position
from tests.compare import backend
from tests.joint.traced import captured

LABELS = torch.tensor([1, 0, 3])


def weight() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()


def only_loss(w: Tensor) -> tuple[Tensor, ...]:
    return (F.cross_entropy(w, LABELS),)


def logits_and_loss(w: Tensor) -> tuple[Tensor, ...]:
    logits = w.tanh()
    return logits, F.cross_entropy(logits, LABELS)


def sum_of_two_losses(w: Tensor) -> tuple[Tensor, ...]:
    first, second = w.exp().mean(), w.square().mean()
    return first, second, first + second


def two_independent_losses(w: Tensor) -> tuple[Tensor, ...]:
    return w.exp().mean(), w.square().mean()


def no_scalars(w: Tensor) -> tuple[Tensor, ...]:
    return w.exp(), w.square()


def one_element_in_one_dimension(w: Tensor) -> tuple[Tensor, ...]:
    return (w.exp().mean().reshape(1),)


def loss_and_its_view(w: Tensor) -> tuple[Tensor, ...]:
    loss = w.exp().mean()
    return loss, loss.view(1)


def loss_and_shared_rows(w: Tensor) -> tuple[Tensor, ...]:
    hidden = w.tanh()
    return hidden.square().mean(), hidden, hidden.t()


@pytest.mark.parametrize(
    ("function", "position"),
    [
        (only_loss, 0),
        (logits_and_loss, 1),
        (sum_of_two_losses, 2),
        (two_independent_losses, 0),
        (no_scalars, None),
        (one_element_in_one_dimension, None),
        (loss_and_its_view, None),
        (loss_and_shared_rows, None),
    ],
)
def test_the_loss_is_the_last_scalar(function: Callable[[Tensor], tuple[Tensor, ...]], position: int | None) -> None:
    w = weight()
    module = captured(function, w).module
    assert loss_position(module, range(len(function(w)))) == position


def test_the_loss_is_differentiable() -> None:
    module = captured(sum_of_two_losses, weight()).module
    assert loss_position(module, [0, 1]) == 0
    assert loss_position(module, [1]) == 1
    assert loss_position(module, []) is None


def test_detached_outputs_keep_their_values() -> None:
    w = weight()
    actual = detach_others(captured(sum_of_two_losses, w).module, [0, 1, 2], 2)(w)
    expected = sum_of_two_losses(w)
    assert [value.requires_grad for value in actual] == [False, False, True]
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=0, check_stride=True)
    torch.testing.assert_close(torch.autograd.grad(actual[2], w), torch.autograd.grad(expected[2], w))


def test_only_differentiable_outputs_are_detached() -> None:
    module = captured(sum_of_two_losses, weight()).module
    detached = detach_others(module, [1, 2], 2)
    assert [node.target for node in detached.graph.nodes if node.op == "call_method"] == ["detach"]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda w: {"loss": F.cross_entropy(w, LABELS), "logits": w.tanh()}, "fused"),
        (lambda w: {"log": {"first": w.exp().mean()}, "loss": w.exp().mean() + w.sum()}, "fused"),
        (lambda w: {"hidden": w.exp(), "logits": w.tanh()}, "split"),
        (lambda w: {"loss": w.exp().mean().detach()}, "forward"),
    ],
)
def test_the_kind_of_a_step_that_returns_a_dictionary(function: Callable[[Tensor], dict[str, Any]], kind: str) -> None:
    engine = backend()
    torch.compile(function, backend=engine)(weight())
    assert [graph.kind for graph in engine.compile_log.graphs] == [kind]


@pytest.mark.parametrize(
    "function", [sum_of_two_losses, two_independent_losses, loss_and_its_view, loss_and_shared_rows]
)
@pytest.mark.parametrize("position", [0, 1])
def test_each_output_has_the_same_gradient_as_in_eager(
    function: Callable[[Tensor], tuple[Tensor, ...]], position: int
) -> None:
    w = weight()
    output, expected = torch.compile(function, backend=backend())(w)[position], function(w)[position]
    factor = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
    actual = torch.autograd.grad(output, w, factor)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, w, factor))
