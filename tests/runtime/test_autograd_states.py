"""What autograd sees of a graph: grad modes, version counters, batched gradients, parameters that are swapped."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compare import backend, compiled, gradients

OUTSIDE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
INSIDE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "same": nullcontext,
    "enable_grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(True),
}
PARTS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "computed": lambda layer, x: layer(x).square(),
    "view of a computed value": lambda layer, x: layer(x).t(),
    "detached": lambda layer, x: layer(x).detach(),
    "view of a parameter": lambda layer, x: layer.weight[1:],
    "part": lambda layer, x: layer(x).chunk(2)[1],
    "of data alone": lambda layer, x: x.exp(),
}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("inside", INSIDE)
def test_grad_modes(outside: str, inside: str) -> None:
    def step(layer: nn.Linear, x: Tensor) -> list[Tensor]:
        with INSIDE[inside]():
            values = [part(layer, x) for part in PARTS.values()]
        return [*values, layer(x) + 1]

    expected, actual = [
        run_in(outside, copy.deepcopy(linear()), call) for call in (step, torch.compile(step, backend=backend()))
    ]
    for (name, own), (_, reference) in zip(actual, expected, strict=True):
        if isinstance(own, Tensor) and isinstance(reference, Tensor):
            torch.testing.assert_close(own, reference, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert own == reference, name


def run_in(outside: str, layer: nn.Linear, step: Callable[[nn.Linear, Tensor], list[Tensor]]) -> list[tuple[str, Any]]:
    """Results, whether they require a gradient, and the gradients of what does."""
    x = torch.linspace(-1, 1, 6).view(2, 3)
    with OUTSIDE[outside]():
        results = step(layer, x)
    names = [*PARTS, "outside"]
    seen: list[tuple[str, Any]] = [(name, value.detach().clone()) for name, value in zip(names, results, strict=True)]
    seen += [(f"requires_grad of {name}", value.requires_grad) for name, value in zip(names, results, strict=True)]
    tracked = [value for value in results if value.requires_grad and value.grad_fn is not None]
    if tracked:
        torch.stack([value.sum() for value in tracked]).sum().backward()
    return [*seen, *sorted(gradients(layer).items())]


@pytest.mark.parametrize(("before", "after"), list(itertools.product([True, False], repeat=2)))
def test_a_grad_mode_that_outlives_the_graph(before: bool, after: bool) -> None:
    def step(x: Tensor) -> tuple[Tensor, bool]:
        torch.set_grad_enabled(after)
        y = x.exp()
        torch._dynamo.graph_break()
        return y, torch.is_grad_enabled()

    x = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(before):
        y, mode = compiled(step)(x)
    assert (mode, y.requires_grad) == (after, after)


def test_forces_in_a_validation_step() -> None:
    def forces(energy: nn.Module, positions: Tensor) -> Tensor:
        with torch.enable_grad():
            positions = positions.clone().requires_grad_()
            return -torch.autograd.grad(energy(positions).sum(), positions)[0]

    energy, positions = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(forces, backend=backend(fallback="warn"))(energy, positions), forces(energy, positions)
        )


CHANGES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "weight": lambda net, x: net[0].weight,  # pyright: ignore[reportIndexIssue] - a Sequential
    "last weight": lambda net, x: net[2].weight,  # pyright: ignore[reportIndexIssue]
    "bias": lambda net, x: net[0].bias,  # pyright: ignore[reportIndexIssue]
    "last bias": lambda net, x: net[2].bias,  # pyright: ignore[reportIndexIssue]
    "data": lambda net, x: x,
}


@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.parametrize("loss_is_inside", [True, False])
def test_a_value_that_is_changed_before_the_backward(changed: str, loss_is_inside: bool) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(2, 3)

    def step(x: Tensor) -> Tensor:
        return net(x).square().sum() if loss_is_inside else net(x)

    errors, found = [], []
    for call in (step, compiled(step)):
        net.zero_grad()
        loss = call(x)
        with torch.no_grad():
            CHANGES[changed](net, x).mul_(2)
        try:
            loss.sum().backward()
            errors.append(None)
        except RuntimeError as error:
            errors.append("modified by an inplace operation" in str(error))
        found.append(gradients(net))
        with torch.no_grad():
            CHANGES[changed](net, x).div_(2)
    assert errors[0] == errors[1]
    if errors[0] is None:
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("loss_is_inside", [True, False])
def test_batched_gradients(loss_is_inside: bool) -> None:
    layer, x = linear(), torch.ones(3)

    def step(x: Tensor) -> Tensor:
        return layer(x).tanh().sum() if loss_is_inside else layer(x).tanh()

    rows = torch.linspace(0.5, 1, 3) if loss_is_inside else torch.eye(4)
    own, expected = (
        torch.autograd.grad(call(x), list(layer.parameters()), rows, is_grads_batched=True)
        for call in (compiled(step), step)
    )
    torch.testing.assert_close(own, expected)


def test_parameters_can_be_swapped_after_a_run() -> None:
    layer, x = linear(), torch.ones(2, 3)
    step = compiled(lambda x: layer(x).sum())
    step(x).backward()
    layer.zero_grad()
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.full((4, 3), 0.5)))
    torch.testing.assert_close(step(x), layer(x).sum())


def test_a_graph_whose_parts_are_differentiated_at_different_times_runs_in_eager_from_then_on() -> None:
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def step(z: Tensor) -> tuple[Tensor, Tensor]:
        fake = generator(z)
        return critic(fake.detach()).square().mean(), fake

    engine = backend(fallback="warn")
    call = torch.compile(step, backend=engine)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    for k in range(3):
        found = []
        for run in (step, call):
            state = copy.deepcopy(critic.state_dict())
            generator.zero_grad()
            loss, fake = run(torch.ones(3, 4))
            critic.zero_grad()
            loss.backward()
            found.append(gradients(critic))
            # Of no concern to the other part, which doesn't depend on the critic.
            optimizer.step()
            with pytest.warns(UserWarning, match="different times") if run is call and k == 0 else nullcontext():
                critic(fake).mean().backward()
            found.append(gradients(generator))
            critic.load_state_dict(state)
        torch.testing.assert_close(found[2:], found[:2])
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused", "eager", "split"]


def test_a_gradient_for_another_result_of_a_graph_of_any_size() -> None:
    layer, engine = linear(), backend()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = layer(x)
        return hidden / x.shape[0], hidden.square().mean()

    call = torch.compile(step, backend=engine)
    for rows, position in ((2, 1), (3, 1), (4, 0), (5, 0), (5, 1)):
        x = torch.linspace(-1, 1, 3 * rows).view(rows, 3)
        found = []
        for run in (step, call):
            layer.zero_grad()
            run(x)[position].sum().backward()
            found.append(gradients(layer))
        torch.testing.assert_close(found[1], found[0])


class Centered(nn.Module):
    """Subtracts a mean that it updates before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return torch.nn.functional.gelu(hidden - self.mean)


def test_a_recomputed_forward_reads_the_buffers_of_its_time() -> None:
    module, twin, x = Centered(), Centered(), torch.randn(4, 8)
    step = torch.compile(module, backend=backend(recompute=0.0))
    for _ in range(2):
        step(x).sum().backward()
        twin(x).sum().backward()
    torch.testing.assert_close(gradients(module), gradients(twin))
    torch.testing.assert_close(module.mean, twin.mean)


def test_gradients_in_float16_are_computed_from_the_scaled_loss() -> None:
    """A gradient of 2e-8 is zero in float16, and is not if the loss is scaled as by a GradScaler."""

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return (x @ weight).float().mean() * 1e-6

    x = torch.ones(4, 8)
    found = []
    for function in (loss, torch.compile(loss, backend=backend())):
        weight = torch.ones(8, 8, requires_grad=True)
        (function(weight, x) * 65536).backward()
        found.append(weight.grad)
    assert bool((found[0] > 0).all())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("is_split", [False, True])
def test_an_input_without_a_gradient_of_which_the_graph_is_freed(is_split: bool) -> None:
    """As of a loss that is logged after its backward, in a step with several optimizers."""
    layer, x = linear(), torch.randn(2, 3)

    def step(layer: nn.Linear, x: Tensor, logged: Tensor) -> tuple[Tensor, ...]:
        result = layer(x) * 2 if is_split else layer(x).square().mean()
        return result, logged.detach() + 1

    call = torch.compile(step, backend=backend())
    for own in (step, call):
        first = (torch.ones(3, requires_grad=True) * x).exp().sum()
        first.backward()
        result, logged = own(layer, x, first)
        result.sum().backward()
        assert not logged.requires_grad
        torch.testing.assert_close(logged, first.detach() + 1)
