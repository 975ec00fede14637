"""Gradients of a result from which its graph computes others: hooks, `retain_grad`, `autograd.grad` and `backward`."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lit_ort.errors import LitOrtWarning, SessionError
from tests.compare import backend, compiled, gradients

# With the second, the value is a view of a result.
SIZES = [(3, 4), pytest.param((2, 3, 4), marks=pytest.mark.sweep)]
SET_ON: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "retain_grad": lambda value, seen: value.retain_grad(),
    "a hook": lambda value, seen: value.register_hook(seen.append),
    "a hook that changes the gradient": lambda value, seen: value.register_hook(lambda gradient: 2 * gradient),
    "a hook before retain_grad": lambda value, seen: (value.register_hook(torch.neg), value.retain_grad()),
    "a hook that is removed": lambda value, seen: value.register_hook(seen.append).remove(),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the loss": lambda hidden, score: score.sum(),
    "both results": lambda hidden, score: score.sum() + hidden.square().sum(),
    "the value itself": lambda hidden, score: hidden.square().sum(),
}


def step(net: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = net[0](x)
    return hidden, net[1:](hidden)


def summed(net: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden, score = step(net, x)
    return hidden, score.square().sum()


def network(*inside: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *inside, nn.Linear(6, 1))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("function", [summed, pytest.param(step, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("what", "loss"), list(itertools.product(SET_ON, LOSSES)))
def test_gradients_of_a_value_behind_the_graph(
    function: Callable[..., tuple[Tensor, Tensor]], what: str, loss: str, size: tuple[int, ...]
) -> None:
    net, engine, found = network(), backend(fallback="warn"), []
    needs_eager = "removed" not in what
    for run in (function, torch.compile(function, backend=engine)):
        own, seen = copy.deepcopy(net), []
        x = torch.linspace(-1, 1, torch.Size(size).numel()).view(size)
        hidden, score = run(own, x)
        SET_ON[what](hidden, seen)
        with nullcontext() if run is function or not needs_eager else pytest.warns(LitOrtWarning, match="retain_grad"):
            LOSSES[loss](hidden, score).backward()
        found.append((hidden.grad if "retain" in what else None, seen, gradients(own)))
    torch.testing.assert_close(found[1], found[0])
    assert (engine.compile_log.graphs[-1].kind == "eager") is needs_eager


def test_a_hook_outlives_its_tensor() -> None:
    net, seen = network(), []
    hidden, loss = torch.compile(summed, backend=backend(fallback="warn"))(net, torch.ones(3, 4))
    hidden.register_hook(seen.append)
    del hidden
    with pytest.warns(LitOrtWarning, match="a hook"):
        loss.backward()
    assert len(seen) == 1


def test_a_gradient_that_is_kept_is_differentiated_again() -> None:
    found = []
    for run in (summed, torch.compile(summed, backend=backend(fallback="warn"))):
        net = network()
        hidden, loss = run(net, torch.linspace(-1, 1, 12).view(3, 4))
        hidden.retain_grad()
        with nullcontext() if run is summed else pytest.warns(LitOrtWarning, match="create_graph=True"):
            found.append(torch.autograd.grad(loss, net[0].get_parameter("weight"), create_graph=True))
        assert hidden.grad is not None
        found[-1] += torch.autograd.grad(hidden.grad.square().sum(), net[0].get_parameter("weight"))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("net", "options", "reason"),
    [(network(nn.Dropout(0.5)), {"fallback": "warn"}, "has dropout"), (network(), {}, "fallback='error'")],
)
def test_the_error_where_eager_can_not_run(net: nn.Sequential, options: dict[str, str], reason: str) -> None:
    hidden, loss = compiled(summed, **options)(net, torch.ones(3, 4))
    hidden.retain_grad()
    with pytest.raises(SessionError, match=f"retain_grad.. is set on result 0.*{reason}"):
        loss.backward()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("loss", "create_graph"), list(itertools.product(LOSSES, [False, True])))
def test_gradients_with_respect_to_a_value_behind_the_graph(
    loss: str, create_graph: bool, size: tuple[int, ...]
) -> None:
    engine, found = backend(fallback="warn"), []
    for run in (summed, torch.compile(summed, backend=engine)):
        net, x = network(), torch.linspace(-1, 1, torch.Size(size).numel()).view(size)
        hidden, score = run(net, x)
        needs_eager = run is not summed and loss != "the value itself"
        with pytest.warns(LitOrtWarning, match="autograd.grad|create_graph") if needs_eager else nullcontext():
            (slope,) = torch.autograd.grad(LOSSES[loss](hidden, score), hidden, create_graph=create_graph)
        if create_graph:
            hidden.sum().backward(retain_graph=True)
            slope.square().sum().backward()
        else:
            # In stages, as a pipeline has them.
            hidden.backward(slope)
        found.append((slope.detach(), gradients(net)))
    torch.testing.assert_close(found[1], found[0])
    assert any(graph.kind == "eager" for graph in engine.compile_log.graphs) is (loss != "the value itself")


def test_a_value_that_the_loss_does_not_depend_on() -> None:
    hidden, loss = compiled(summed)(network(), torch.ones(3, 4))
    other = hidden.detach().requires_grad_().exp()
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(other.sum(), hidden)
    assert torch.autograd.grad(other.sum(), hidden, allow_unused=True) == (None,)
    assert torch.autograd.grad((2 * loss).exp(), loss)[0] == 2 * (2 * loss).exp()


def kept_of_backward(root: Tensor, values: list[Tensor], net: nn.Sequential) -> list[Tensor | None]:
    root.backward(inputs=[*values, net[0].get_parameter("weight")])
    return [value.grad for value in values]


def of_edges(root: Tensor, values: list[Tensor], net: nn.Sequential) -> Any:
    return torch.autograd.grad(root, [torch.autograd.graph.get_gradient_edge(value) for value in values])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("read", [kept_of_backward, of_edges])
def test_other_ways_to_differentiate_with_respect_to_a_value(loss: str, read: Callable[..., Any]) -> None:
    found = []
    for run in (summed, torch.compile(summed, backend=backend(fallback="warn"))):
        net = network()
        hidden, score = run(net, torch.linspace(-1, 1, 12).view(3, 4))
        is_eager = run is summed or (loss == "the value itself" and read is of_edges)
        with nullcontext() if is_eager else pytest.warns(LitOrtWarning, match="is read by"):
            found.append((read(LOSSES[loss](hidden, score), [hidden], net), gradients(net)))
    torch.testing.assert_close(found[1], found[0])


def base_and_view(net: nn.Sequential, x: Tensor) -> tuple[Tensor, ...]:
    hidden = net[0](x)
    part = hidden[:, :4]
    return hidden, part, part.exp().sum() + net[1:](hidden).square().sum()


def overlapping(net: nn.Sequential, x: Tensor) -> tuple[Tensor, ...]:
    hidden = net[0](x)
    left, right = hidden[:, :4], hidden[:, 2:]
    return left, right, left.exp().sum()


def chunks(net: nn.Sequential, x: Tensor) -> tuple[Tensor, ...]:
    left, right = net[0](x).chunk(2, -1)
    return left, right, (left * right).sum()


def of_the_last_size(net: nn.Sequential, x: Tensor) -> tuple[Tensor, ...]:
    flat = net[0](x).view(-1)
    rows = flat.view(3, 6)
    return flat, rows, rows.exp().sum()


def detached_too(net: nn.Sequential, x: Tensor) -> tuple[Tensor, ...]:
    hidden = net[0](x)
    return hidden, hidden.view_as(hidden), hidden.detach(), net[1:](hidden).square().sum()


VIEWS = (base_and_view, overlapping, chunks, of_the_last_size, detached_too)


def hooks(root: Tensor, values: list[Tensor], net: nn.Sequential) -> list[Tensor]:
    seen: dict[int, Tensor] = {}
    for k, value in enumerate(values):
        value.register_hook(lambda gradient, k=k: seen.update({k: gradient}))
    root.backward()
    return [seen[k] for k in sorted(seen)]


def hooks_that_change(root: Tensor, values: list[Tensor], net: nn.Sequential) -> list[Tensor]:
    for k, value in enumerate(values):
        value.register_hook(lambda gradient, factor=k + 2: factor * gradient)
    return hooks(root, values, net)


def kept(root: Tensor, values: list[Tensor], net: nn.Sequential) -> list[Tensor | None]:
    for value in values:
        value.retain_grad()
    root.backward()
    return [value.grad for value in values]


def of_grad(root: Tensor, values: list[Tensor], net: nn.Sequential) -> Any:
    return torch.autograd.grad(root, values, allow_unused=True)


READS = (hooks, hooks_that_change, kept, of_grad, kept_of_backward)
ROOTS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "all": lambda parts: torch.stack(parts).sum(),
    "the last": lambda parts: parts[-1],
    "the first two": lambda parts: parts[0] + parts[1],
}
SHARED = [
    *((base_and_view, read, "all", (0, 1)) for read in READS),
    *(
        pytest.param(*case, marks=pytest.mark.slow if case[2:] == ("all", (1,)) else pytest.mark.sweep)
        for case in itertools.product(VIEWS, READS, ROOTS, [(1,), (0, 1)])
        if case[0] is not base_and_view or case[2:] != ("all", (0, 1))
    ),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("function", "read", "roots", "positions"), SHARED)
def test_gradients_of_results_that_share_their_memory(
    function: Callable[..., Any], read: Callable[..., Any], roots: str, positions: tuple[int, ...]
) -> None:
    found = []
    for run in (function, torch.compile(function, backend=backend(fallback="warn"))):
        net = network()
        results = run(net, torch.linspace(-1, 1, 12).view(3, 4))
        root = ROOTS[roots]([(k + 1) * r.square().sum() for k, r in enumerate(results) if r.requires_grad])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LitOrtWarning)
            found.append((read(root, [results[k] for k in positions], net), gradients(net)))
    torch.testing.assert_close(found[1], found[0])


def test_gradients_of_gradients_of_results_that_share_their_memory() -> None:
    found = []
    for run in (base_and_view, torch.compile(base_and_view, backend=backend(fallback="warn"))):
        net = network()
        hidden, part, loss = run(net, torch.linspace(-1, 1, 12).view(3, 4))
        part.retain_grad()
        root = loss + hidden.square().sum() + part.sin().sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LitOrtWarning)
            (slope,) = torch.autograd.grad(root, net[0].get_parameter("weight"), create_graph=True)
            assert part.grad is not None
            (slope.square().sum() + part.grad.square().sum()).backward()
        found.append((part.grad.detach(), gradients(net)))
    torch.testing.assert_close(found[1], found[0])


def test_a_hook_between_a_loss_and_the_value_to_differentiate_for() -> None:
    def function(net: nn.Sequential, x: Tensor) -> tuple[Tensor, ...]:
        hidden = net[0](x)
        between = net[1](hidden)
        return hidden, between, net[2:](between).sum()

    found = []
    for run in (function, torch.compile(function, backend=backend(fallback="warn"))):
        hidden, between, loss = run(network(), torch.linspace(-1, 1, 12).view(3, 4))
        between.register_hook(lambda gradient: 3 * gradient)
        with nullcontext() if run is function else pytest.warns(LitOrtWarning, match="a hook"):
            found.append(torch.autograd.grad(loss + between.sum(), hidden))
    torch.testing.assert_close(found[1], found[0])


def test_a_value_that_is_changed_in_place_is_no_result_anymore() -> None:
    def function(net: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = net[0](x)
        return hidden, (hidden + 1).sum()

    found = []
    for run in (function, torch.compile(function, backend=backend())):
        net, seen = network(), []
        hidden, loss = run(net, torch.linspace(-1, 1, 12).view(3, 4))
        hidden.mul_(2.0)
        hidden.register_hook(seen.append)
        (hidden.square().sum() + loss).backward()
        found.append((seen, gradients(net)))
    torch.testing.assert_close(found[1], found[0])


def test_hooks_are_not_called_without_a_gradient() -> None:
    hidden, loss = compiled(summed)(network(), torch.ones(3, 4))
    loss.register_hook(lambda gradient: 2 * gradient)
    hidden.sum().backward()


def test_hooks_on_nodes() -> None:
    found = []
    for run in (summed, compiled(summed)):
        net, seen = network(), []
        loss = run(net, torch.linspace(-1, 1, 12).view(3, 4))[1]
        bias = net[2].get_parameter("bias")
        nodes: list[Any] = [loss.grad_fn]
        leaves: list[Any] = []
        while nodes:
            node = nodes.pop()
            nodes += [after for after, _ in node.next_functions if after is not None]
            leaves += [node] if getattr(node, "variable", None) is bias else []
        leaves[0].register_prehook(lambda gradients, seen=seen: seen.extend(gradients))
        loss.backward()
        found.append((seen, gradients(net)))
    torch.testing.assert_close(found[1], found[0])


def test_a_hook_before_the_node_of_the_only_result_with_a_gradient() -> None:
    def function(net: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, loss = summed(net, x)
        return hidden.detach(), loss

    found = []
    for run in (function, compiled(function)):
        net, seen = network(), []
        loss = run(net, torch.linspace(-1, 1, 12).view(3, 4))[1]
        node: Any = loss.grad_fn
        node.register_prehook(lambda gradients, seen=seen: seen.extend(gradients))
        node.register_prehook(lambda gradients: (2 * gradients[0],))
        loss.backward()
        found.append((seen, gradients(net)))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_other_hooks_on_the_node_of_a_graph_are_refused(kind: str) -> None:
    for result in compiled(step)(network(), torch.ones(3, 4)):
        with pytest.raises(SessionError, match="grad_fn of a result"):
            getattr(result.grad_fn, kind)(print)


RESULT_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": Tensor.t,
    "slice": lambda x: x[:, 1:],
    "expand": lambda x: x.expand(2, 3, 6),
    "permute": lambda x: x.view(3, 2, 3).permute(2, 0, 1),
}


def viewed(view: Callable[[Tensor], Tensor], net: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    part = view(net[:2](x))
    return part, part.square().sum()


@pytest.mark.parametrize("view", RESULT_VIEWS)
def test_hooks_before_the_node_of_a_view_from_which_a_graph_computes(view: str) -> None:
    found = []
    for run in (viewed, torch.compile(viewed, backend=backend(fallback="warn"))):
        net, seen = nn.Sequential(network()[0], nn.Tanh()), []
        part, loss = run(RESULT_VIEWS[view], net, torch.linspace(-1, 1, 12).view(3, 4))
        part.retain_grad()
        node: Any = part.grad_fn
        handle = node.register_prehook(seen.extend)
        node.register_prehook(lambda gradients: (2 * gradients[0],))
        node.register_prehook(lambda gradients, seen=seen: seen.extend(gradients))
        handle.remove()
        with nullcontext() if run is viewed else pytest.warns(LitOrtWarning, match="retain_grad"):
            (part.pow(3).sum() + loss).backward()
        found.append((seen, part.grad, gradients(net)))
    torch.testing.assert_close(found[1], found[0])
    assert len(found[0][0]) == 1


@pytest.mark.parametrize("view", RESULT_VIEWS)
def test_hooks_behind_the_node_of_such_a_view_are_refused(view: str) -> None:
    part, _ = compiled(viewed)(RESULT_VIEWS[view], network(), torch.ones(3, 4))
    node: Any = part.grad_fn
    with pytest.raises(SessionError, match="grad_fn of a result from which"):
        node.register_hook(print)


def test_values_whose_gradient_is_not_known_are_refused() -> None:
    def of_an_input(net: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
        part = x[:1]
        return part, net(part).sum()

    part, _ = compiled(of_an_input)(network(), torch.ones(3, 4, requires_grad=True))
    with pytest.raises(SessionError, match="a view of an input"):
        part.retain_grad()
    hidden, loss = compiled(summed)(network(), torch.ones(3, 4))
    with pytest.raises(SessionError, match="register_multi_grad_hook"):
        torch.autograd.graph.register_multi_grad_hook([hidden, loss], print)
    edge = torch.autograd.graph.get_gradient_edge(hidden)
    del hidden
    with pytest.raises(SessionError, match="tensor is deleted"):
        torch.autograd.grad(loss, edge)
    net = network()
    hidden, part, loss = compiled(base_and_view)(net, torch.ones(3, 4))
    part.retain_grad()
    rows = [torch.ones(2, *value.shape) for value in (hidden, part)]
    with pytest.raises(SessionError, match="is_grads_batched=True"):
        torch.autograd.grad([hidden, part], net[0].get_parameter("weight"), rows, is_grads_batched=True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabrics_checks_of_results_are_no_reason_for_eager(precision: Any) -> None:
    class TwoResults(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return step(self.net, x)

    engine, fabric = backend(), Fabric(accelerator="cpu", devices=1, precision=precision)
    module = TwoResults()
    module.compile(backend=engine)
    module = fabric.setup(module)
    _, score = module(torch.ones(3, 4))
    fabric.backward(score.sum())
    assert {graph.kind for graph in engine.compile_log.graphs} == {"split"}


def test_hooks_of_other_tensors_stay_with_autograd() -> None:
    engine, seen = backend(), []
    net, x = network(), torch.ones(3, 4, requires_grad=True)
    hidden, loss = torch.compile(summed, backend=engine)(net, x)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        hidden.detach().register_hook(seen.append)
    x.register_hook(seen.append)
    loss.register_hook(seen.append)
    (2 * hidden).register_hook(seen.append)
    loss.backward()
    assert len(seen) == 2
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused"]
