"""Gradients of values that a step computes, inside of the step: gradient penalties, forces from energies, hooks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.errors import CaptureError
from tests.compare import SINCE_2_15, backend, compiled, gradients


def slope_of(score: Tensor, value: Tensor) -> Tensor:
    return torch.autograd.grad(score, value, torch.ones_like(score), create_graph=True)[0]


def of_a_product(net: nn.Sequential, x: Tensor) -> Tensor:
    between = (0.3 * x + 0.7 * x.flip(0)).requires_grad_(True)
    (slope,) = torch.autograd.grad(outputs=net(between).sum(), inputs=[between], create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def in_a_function(net: nn.Sequential, x: Tensor) -> Tensor:
    between = x * 2
    score = net(between)
    return score.sum() + slope_of(score, between).square().sum()


def of_a_hidden_value(net: nn.Sequential, x: Tensor) -> Tensor:
    hidden = net[0](x)
    score = net[1:](hidden).sum()
    (slope,) = torch.autograd.grad(score, hidden, create_graph=True)
    return score + (slope * hidden).square().sum()


def of_first_order(net: nn.Sequential, x: Tensor) -> Tensor:
    between = x * 2
    score = net(between).sum()
    (slope,) = torch.autograd.grad(score, (between,), retain_graph=True)
    return score * slope.norm()


def of_an_unused_value(net: nn.Sequential, x: Tensor) -> Tensor:
    between, unused = x * 2, x * 3
    score = net(between).sum()
    slope, none = torch.autograd.grad(score, (between, unused), retain_graph=True, allow_unused=True)
    assert none is None
    return score + slope.square().sum()


def of_an_input(net: nn.Sequential, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    score = net(leaf).sum()
    (slope,) = torch.autograd.grad(score, leaf, create_graph=True)
    return score + slope.square().sum()


def of_weights(net: nn.Sequential, x: Tensor) -> Tensor:
    score = net(x).square().sum()
    slopes = torch.autograd.grad(score, list(net.parameters()), create_graph=True)
    return score + sum(slope.square().sum() for slope in slopes)


def of_a_hook(net: nn.Sequential, x: Tensor) -> Tensor:
    hidden, seen = net[0](x), []
    score = net[1:](hidden).sum()
    hidden.register_hook(seen.append)
    (slope,) = torch.autograd.grad(score, net[0].get_parameter("bias"), retain_graph=True)
    return score + seen[0].square().sum() + slope.sum()


def of_a_kept_gradient(net: nn.Sequential, x: Tensor) -> Tensor:
    hidden = net[0](x)
    score = net[1:](hidden).sum()
    hidden.retain_grad()
    score.backward(retain_graph=True)
    assert hidden.grad is not None
    return score + hidden.grad.square().sum()


def of_the_inputs_of_backward(net: nn.Sequential, x: Tensor) -> Tensor:
    hidden = net[0](x)
    score = net[1:](hidden).sum()
    score.backward(retain_graph=True, inputs=[hidden, net[0].get_parameter("weight")])
    assert hidden.grad is not None
    return score + hidden.grad.square().sum()


def of_the_inputs_of_torchs_backward(net: nn.Sequential, x: Tensor) -> Tensor:
    hidden = net[0](x)
    score = net[1:](hidden).sum()
    torch.autograd.backward(score, retain_graph=True, inputs=hidden)
    assert hidden.grad is not None
    return score + hidden.grad.square().sum()


def of_an_edge(net: nn.Sequential, x: Tensor) -> Tensor:
    hidden = net[0](x)
    score = net[1:](hidden).sum()
    (slope,) = torch.autograd.grad(score, torch.autograd.graph.get_gradient_edge(hidden), create_graph=True)
    return score + slope.square().sum()


def of_a_hook_on_a_node(net: nn.Sequential, x: Tensor) -> Tensor:
    hidden = net[:2](net[0](x) @ torch.ones(6, 4))
    assert hidden.grad_fn is not None
    hidden.grad_fn.register_hook(lambda inputs, outputs: tuple(2 * gradient for gradient in inputs))
    return net[1:](hidden).sum()


def of_a_hook_before_a_node(net: nn.Sequential, x: Tensor) -> Tensor:
    score = net[1:](net[0](x)).sum()
    assert score.grad_fn is not None
    node, _ = score.grad_fn.next_functions[0]
    assert node is not None
    node.register_prehook(lambda gradients: (2 * gradients[0],))
    return score


STEPS: tuple[Callable[[nn.Sequential, Tensor], Tensor], ...] = (
    *(of_a_product, in_a_function, of_a_hidden_value, of_first_order, of_an_unused_value, of_an_input, of_weights),
    *(of_a_hook, of_a_kept_gradient, of_the_inputs_of_backward, of_the_inputs_of_torchs_backward, of_an_edge),
    *(of_a_hook_on_a_node, of_a_hook_before_a_node),
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("step", STEPS)
def test_gradients_of_values_of_a_step(step: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    # Eager can't repeat a run that draws, so the graph has to run in eager from the start.
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1))
    engine, found = backend(fallback="warn"), []
    for function in (step, torch.compile(step, backend=engine)):
        own, x = copy.deepcopy(net), torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        torch.manual_seed(1)
        with warnings.catch_warnings(record=True) as caught, dynamo_settings("step", strict=False):
            warnings.simplefilter("always")
            loss = function(own, x)
        loss.backward()
        found.append((loss.detach(), x.grad, gradients(own)))
    torch.testing.assert_close(found[1], found[0])
    assert len(caught) == 1, "one line says why"
    assert sum(graph.fallback is not None for graph in engine.compile_log.graphs) == 1


def test_the_error_names_the_value_and_its_line() -> None:
    net, x = nn.Sequential(nn.Linear(4, 1)), torch.ones(2, 4, requires_grad=True)
    value = r"respect to between, which the graph computes.*test_derivatives\.py:\d+"
    # Since torch 2.15 Dynamo leaves a function in eager that calls one with the derivative.
    call = r"test_derivatives\.py:\d+\): torch\.autograd\.grad is not part of a graph"
    with pytest.raises(CaptureError, match=call if SINCE_2_15 else value):
        compiled(in_a_function)(net, x)
