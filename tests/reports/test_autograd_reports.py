"""Public reports of gradients that compilers get wrong, as programs of our own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.compare import SINCE_2_15
from tests.reports.report import Compile, row, steps

pytestmark = [
    # Dynamo instantiates torch.autograd.Function, and forward-mode differentiation loads TorchScript.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]


@steps()
def test_a_column_accumulates_twice_under_grad(compiled: Compile[Any]) -> Any:
    """`torch.func.grad` of a function that adds to one column twice lost one of the two gradients.

    https://github.com/pytorch/pytorch/issues/136662
    """

    def energy(positions: Tensor) -> Tensor:
        total = torch.zeros_like(positions)
        for _ in range(2):
            total[:, 1] += positions[:, 3].abs() * positions[:, 0]
        return total.square().sum()

    return compiled(torch.func.grad(energy))(row(3, 4))


@steps()
def test_a_hook_and_a_retained_gradient_before_a_break(compiled: Compile[Any]) -> Any:
    """Hooks and `retain_grad` of intermediate values were dropped.

    https://github.com/pytorch/pytorch/issues/91468
    """
    x = row(4).requires_grad_()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * x
        torch._dynamo.graph_break()
        hidden.register_hook(lambda gradient: 3 * gradient)
        result = hidden.sin() * hidden
        return result, hidden

    result, hidden = compiled(step)(x)
    hidden.retain_grad()
    result.sum().backward()
    return x.grad, hidden.grad


@steps(falls_back="differentiated again", aot_can=SINCE_2_15)
def test_penalty_of_a_gradient_through_linear_layers(compiled: Compile[Any]) -> Any:
    """`autograd.grad(create_graph=True)` inside of the step lost the way to second derivatives.

    https://github.com/pytorch/pytorch/issues/181581
    """
    net = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    loss = compiled(step)(row(5, 3))
    loss.backward()
    return loss, net


@steps()
def test_gradients_in_stages(compiled: Compile[Any]) -> Any:
    """The backward of a compiled model is run layer by layer, with `retain_graph`, from the loss to the first layer.

    https://github.com/pytorch/pytorch/issues/145899
    """
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    result = compiled(net)(row(2, 4))
    (of_result,) = torch.autograd.grad(result.square().mean(), result, retain_graph=True)
    of_head = torch.autograd.grad(result, list(net[2].parameters()), of_result, retain_graph=True)
    of_body = torch.autograd.grad(result, list(net[0].parameters()), of_result)
    return of_result, of_head, of_body


@steps()
def test_a_tensor_that_the_step_creates_requires_gradients(compiled: Compile[Any]) -> Any:
    """A leaf that was created inside of the step and returned had lost `requires_grad`.

    https://github.com/pytorch/pytorch/issues/99455
    """

    def step(scale: Tensor) -> tuple[Tensor, Tensor]:
        latent = torch.full((3,), 0.5, requires_grad=True)
        return latent, (latent * scale).exp().sum()

    latent, loss = compiled(step)(row(3))
    loss.backward()
    return latent, loss, latent.grad


class DividedGradient(torch.autograd.Function):
    """The identity, whose gradient is a third of the right one."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient / 3


@steps(falls_back=None if SINCE_2_15 else "a transform of torch.func runs it")
def test_a_function_with_its_own_backward_under_grad(compiled: Compile[Any]) -> Any:
    """Under `torch.func.grad` the backward of an `autograd.Function` was replaced by the true derivative.

    https://github.com/pytorch/pytorch/issues/193279
    """

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: DividedGradient.apply(x).square().sum())(x) * 2

    return compiled(slope)(row(4))


class Overwrites(torch.autograd.Function):
    """Two copies, whose backward changes a gradient that it receives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:  # pyright: ignore
        return first.mul_(2).add_(second)


@steps()
def test_a_backward_that_writes_into_the_gradients_it_receives(compiled: Compile[Any]) -> Any:
    """The in-place operation on a gradient in the backward of an `autograd.Function` raised.

    https://github.com/pytorch/pytorch/issues/141111
    """
    x = row(3).requires_grad_()

    def step(x: Tensor) -> Tensor:
        first, second = Overwrites.apply(x * 2)
        return (first * second).sum()

    compiled(step)(x).backward()
    return x.grad


class Unmaterialized(torch.autograd.Function):
    """Sine and cosine; the gradient of the one that nobody uses is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, of_sine: Tensor | None, of_cosine: Tensor | None) -> Tensor:  # pyright: ignore
        (x,) = ctx.saved_tensors
        total = torch.zeros_like(x)
        if of_sine is not None:
            total = total + of_sine * x.cos()
        if of_cosine is not None:
            total = total - of_cosine * x.sin()
        return total


@steps()
def test_a_function_that_wants_no_zeros(compiled: Compile[Any]) -> Any:
    """`set_materialize_grads(False)` in an `autograd.Function` raised.

    https://github.com/pytorch/pytorch/issues/106391
    """
    x = row(4).requires_grad_()
    compiled(lambda x: Unmaterialized.apply(x)[0].sum())(x).backward()
    return x.grad


class RoundedAndMask(torch.autograd.Function):
    """Rounded values with a straight-through gradient, and which of them were large, as floats without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        large = (x.abs() > 1).float()
        ctx.mark_non_differentiable(large)
        ctx.save_for_backward(large)
        return x.round(), large

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (large,) = ctx.saved_tensors
        return gradient * (1 - large)


@steps()
def test_a_result_that_is_marked_as_not_differentiable(compiled: Compile[Any]) -> Any:
    """A floating-point result that an `autograd.Function` marks as not differentiable made tracing fail.

    https://github.com/pytorch/pytorch/pull/134087
    """
    x = row(6).requires_grad_()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        rounded, large = RoundedAndMask.apply(x * 1.5)
        return (rounded * (2 + large) * x).sum(), large

    loss, large = compiled(step)(x)
    loss.backward()
    return loss, large, x.grad


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy over chunks of rows, which computes its gradients in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore
        def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")

        total, of_weight, of_hidden = hidden.new_zeros(()), torch.zeros_like(weight), []
        for rows, targets in zip(hidden.split(2), labels.split(2), strict=True):
            gradients, loss = torch.func.grad_and_value(loss_of, argnums=(0, 1))(rows, weight, targets)
            of_hidden.append(gradients[0])
            of_weight.add_(gradients[1])
            total.add_(loss)
        ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradient, of_weight * gradient, None


@steps()
def test_a_chunked_loss_with_gradients_from_its_forward(compiled: Compile[Any]) -> Any:
    """An `autograd.Function` that runs `grad_and_value` of chunks in its forward failed.

    https://github.com/pytorch/pytorch/issues/141639
    """
    body, head = nn.Linear(4, 4), nn.Linear(4, 5, bias=False)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        return ChunkedLoss.apply(body(x), head.weight, labels) / len(x)  # pyright: ignore

    loss = compiled(step)(row(6, 4), torch.arange(6) % 5)
    loss.backward()
    return loss, body, head


@steps()
def test_a_diagonal_that_is_replaced(compiled: Compile[Any]) -> Any:
    """The gradient of the matrix whose diagonal `diagonal_scatter` replaces was zero.

    https://github.com/pytorch/pytorch/issues/182012
    """
    x, diagonal = row(5, 5).requires_grad_(), row(5).requires_grad_()
    compiled(lambda x, d: (torch.diagonal_scatter(x, d) * x.detach().cos()).sum())(x, diagonal).backward()
    return x.grad, diagonal.grad


@steps()
def test_hooks_that_are_registered_after_the_first_step(compiled: Compile[Any]) -> Any:
    """Backward hooks on modules that were registered after the compilation were ignored.

    https://github.com/pytorch/pytorch/issues/117265 and https://github.com/pytorch/pytorch/issues/115750
    """
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    step = compiled(lambda x: net(x).square().sum())
    step(row(2, 3).requires_grad_()).backward()
    net.zero_grad()
    net[0].register_full_backward_pre_hook(lambda module, gradients: tuple(2 * g for g in gradients))
    net[2].register_full_backward_hook(lambda module, of_inputs, of_results: tuple(g + 1 for g in of_inputs))
    step(row(2, 3).requires_grad_()).backward()
    return net


@steps()
def test_forward_hooks_that_come_and_go(compiled: Compile[Any]) -> Any:
    """Forward hooks that were registered after the first call did not run; here one also replaces the result.

    https://github.com/pytorch/pytorch/issues/117758
    """
    net, seen = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), []
    step = compiled(lambda x: net(x).square().sum())

    def record(module: nn.Module, inputs: Any, result: Tensor) -> Tensor:
        seen.append(result.detach().sum())
        return result * 2

    losses = [step(row(2, 3))]
    handle = net[0].register_forward_hook(record)
    losses.append(step(row(2, 3)))
    handle.remove()
    losses.append(step(row(2, 3)))
    sum(losses).backward()  # pyright: ignore[reportAttributeAccessIssue]
    return losses, seen, net


@steps()
def test_layers_are_frozen_and_thawed(compiled: Compile[Any]) -> Any:
    """A graph was used again after `requires_grad` of a layer had changed, so that layers stayed frozen or moved.

    https://github.com/pytorch/pytorch/issues/139476
    """
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    step, gradients = compiled(lambda x: net(x).square().mean()), []
    for frozen in (True, False, True, False):
        net[0].requires_grad_(not frozen)
        net.zero_grad()
        step(row(2, 3)).backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
    return gradients


@steps()
def test_one_block_is_compiled_for_frozen_and_for_trained_inputs(compiled: Compile[Any]) -> Any:
    """Blocks of a model with adapters are compiled one by one: the first one's input requires no gradients.

    https://github.com/pytorch/pytorch/issues/141039
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.base(x) + self.adapter(x)) + x

    blocks = nn.ModuleList(Block() for _ in range(3))
    hidden = row(2, 4)
    for block in map(compiled, blocks):
        hidden = block(hidden)
    hidden.square().mean().backward()
    return hidden, blocks


@steps()
def test_views_without_gradients_of_a_differentiable_value(compiled: Compile[Any]) -> Any:
    """A view that was taken under `no_grad` of a value with gradients, and returned, crashed the backward's trace.

    https://github.com/pytorch/pytorch/pull/175673
    """
    layer = nn.Linear(4, 4)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = layer(x)
        with torch.no_grad():
            shown = hidden.view(-1)
        return hidden.square().mean(), shown

    loss, shown = compiled(step)(row(3, 4))
    loss.backward()
    return loss, shown.detach(), layer


@steps(falls_back="an input has a tangent|carry a forward-mode AD tangent", aot_can=True)
def test_dual_numbers_go_through_a_compiled_function(compiled: Compile[Any]) -> Any:
    """The tangents of forward-mode differentiation were dropped in compiled functions.

    https://github.com/pytorch/pytorch/issues/187284
    """
    function = compiled(lambda x: (x.square() * x.sin()).sum())
    with torch.autograd.forward_ad.dual_level():
        result = function(torch.autograd.forward_ad.make_dual(row(3), torch.ones(3)))
        return torch.autograd.forward_ad.unpack_dual(result).tangent


class OwnTangent(torch.autograd.Function):
    """Sine, with another derivative than its own in each mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 3 * gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 5 * tangent


@steps(falls_back="a transform of torch.func runs it")
def test_a_function_with_its_own_tangent(compiled: Compile[Any]) -> Any:
    """Under `torch.func.jvp` the `jvp` of an `autograd.Function` was replaced by the true derivative.

    https://github.com/pytorch/pytorch/issues/192985
    """

    def derivative(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: OwnTangent.apply(x), (x,), (x.cos(),))[1] * 2

    return compiled(derivative)(row(4))


@pytest.mark.slow
@steps()
def test_adaptation_inside_of_a_step(compiled: Compile[Any]) -> Any:
    """Meta-learning: the loss of weights that `torch.func.grad` has adapted failed when it was compiled.

    https://github.com/pytorch/pytorch/issues/98825
    """
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss_of(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.func.functional_call(net, weights, (x,)) - x.sum(1, keepdim=True)).square().mean()

    def step(x: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(net.named_parameters())
        for _ in range(2):
            slopes = torch.func.grad(loss_of)(weights, x)
            weights = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
        return loss_of(weights, x + 1)

    loss = compiled(step)(row(5, 2))
    loss.backward()
    return loss, net


@steps()
def test_saved_tensors_go_through_hooks(compiled: Compile[Any]) -> Any:
    """Hooks on saved tensors, here those that keep them as float64 and as files would, ran while the graph was traced.

    https://github.com/pytorch/pytorch/issues/113263
    """
    layer, unpacked = nn.Linear(4, 4), []

    def unpack(saved: Tensor) -> Tensor:
        unpacked.append(None)
        return saved.float()

    step = compiled(lambda x: layer(layer(x).tanh()).square().mean())
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.double(), unpack):
        loss = step(row(3, 4))
    assert not unpacked
    loss.backward()
    return loss, layer


@steps()
def test_a_compiled_part_in_an_activation_checkpoint(compiled: Compile[Any]) -> Any:
    """A compiled function inside of `torch.utils.checkpoint` failed in its recomputation.

    https://github.com/pytorch/pytorch/issues/121966
    """
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    part = compiled(lambda x: layers[1](layers[0](x).relu() * 5))
    x = row(3, 4).requires_grad_()
    result = checkpoint(part, x, use_reentrant=False)
    result.square().sum().backward()
    return result, x.grad, layers
