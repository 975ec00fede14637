"""Steps with no_grad, hooks, autograd functions, functorch, checkpoints, control flow and state in Python."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.steps.case import Case, Net, case
from tests.steps.reported import LABELS, rows


@case
def gradients_are_disabled_in_every_way() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        with torch.no_grad():
            target = m.first(x * 2)
        with torch.set_grad_enabled(False):
            scale = hidden.std()
        return (hidden * target).mean() / scale + (hidden * hidden.detach()).sum() + m.second(hidden.data).mean()

    return Case(Net(step), [(rows(),)])


@case
def gradients_are_enabled_again() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = m.first(x)
            with torch.enable_grad():
                inner = m.second(x).pow(2).mean()
        return inner + hidden.sum() + m.first.bias.sum()

    return Case(Net(step), [(rows(),)])


@case
def a_method_without_gradients() -> Case:
    @torch.no_grad()
    def distances(m: Any, x: Tensor) -> Tensor:
        return torch.cdist(m.first(x), m.first(x))

    def step(m: Any, x: Tensor) -> Tensor:
        nearest = distances(m, x).fill_diagonal_(torch.inf).argmin(1)
        return F.mse_loss(m.first(x), m.first(x)[nearest])

    return Case(Net(step), [(rows(),)])


class StraightThrough(torch.autograd.Function):
    """Rounds its input; the gradient passes through, masked and scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1) * ctx.scale, None


class TwoResults(torch.autograd.Function):
    """Has a result with an arbitrary gradient, and a non-differentiable one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        ctx.save_for_backward(x, y)
        return x * y, signs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y = ctx.saved_tensors
        return gradient * y * 3, -gradient * x


@case
def autograd_functions_with_custom_gradients() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden: Any = StraightThrough.apply(m.first(x), 0.5)
        product, signs = TwoResults.apply(hidden, m.first(x))
        return product.sum() + (m.second(hidden) * 2).mean() + signs.sum()

    return Case(Net(step), [(rows(),)] * 2)


class Reversal(torch.autograd.Function):
    """Reverses the gradient, for a domain classifier."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -gradient


@case
def reversed_gradient() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        hidden = m.first(x)
        reversed_hidden: Any = Reversal.apply(hidden)
        return hidden.pow(2).mean() + F.cross_entropy(m.second(reversed_hidden), y)

    return Case(Net(step), [(rows(), LABELS)])


@case
def hooks_on_tensors() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01) * 2)
        return m.second(hidden).pow(2).mean()

    return Case(Net(step), [(rows(),)] * 2)


@case
def hooks_on_parameters() -> Case:
    module = Net(lambda m, x: m.second(m.first(x)).pow(2).mean())
    module.first.weight.register_hook(lambda gradient: gradient * 3)
    return Case(module, [(rows(),)] * 2)


@case
def functional_transforms() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        parameters = {name: value * 2 for name, value in m.first.named_parameters()}
        hidden = torch.func.functional_call(m.first, parameters, (x,))
        products = torch.func.vmap(lambda row, weight: (row * weight).sum().exp())(hidden, x)
        return products.log1p().mean()

    return Case(Net(step), [(rows(),)])


@case
def jacobian_of_rows() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        jacobian = torch.func.vmap(torch.func.jacrev(lambda row: m.second(m.first(row).tanh())))(x)
        return jacobian.pow(2).sum() + m.second(m.first(x)).mean()

    return Case(Net(step), [(rows(),)])


@case
def checkpointed_part() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return m.second(m.first(x).tanh().exp())

        hidden: Any = checkpoint(part, x, use_reentrant=False)
        return hidden.pow(2).mean()

    return Case(Net(step), [(rows(),)] * 2)


@case
def teacher_in_evaluation() -> Case:
    teacher = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).requires_grad_(False)

    def step(m: Any, x: Tensor) -> Tensor:
        m.teacher.eval()
        with torch.no_grad():
            target = m.teacher(x).softmax(-1)
        return F.kl_div(m.second(m.first(x)).log_softmax(-1), target, reduction="batchmean")

    return Case(Net(step, teacher=teacher), [(rows(),)] * 2)


@case
def frozen_and_unused_parts() -> Case:
    module = Net(lambda m, x: m.first(x).pow(2).mean() + m.second(x).detach().mean(), unused=nn.Linear(3, 3))
    module.first.bias.requires_grad_(False)
    return Case(module, [(rows(),)])


@case
def one_layer_used_twice() -> Case:
    module = Net(lambda m, x: (m.first(m.third(m.first(x))) * m.tied).pow(2).mean(), third=nn.Linear(8, 8))
    module.third = module.first
    module.tied = module.first.bias
    return Case(module, [(rows(),)] * 2)


@case
def tied_embedding_and_head() -> Case:
    module: Any = Net(lambda m, i: F.cross_entropy(m.head(m.table(i)), i.roll(1)), table=nn.Embedding(20, 8))
    module.head = nn.Linear(8, 20, bias=False)
    module.head.weight = module.table.weight
    return Case(module, [(torch.tensor([1, 2, 2, 7]),), (torch.tensor([3, 3, 3, 0]),)])


@case
def state_in_python() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        loss = m.first(x).pow(2).mean()
        m.history.append(loss.detach())
        m.best = min(m.best, len(m.history))
        return loss + sum(m.history) * m.best

    module: Any = Net(step)
    module.history, module.best = [], 10
    return Case(module, [(rows(),)] * 3)


@case
def reads_a_value_in_the_step() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        largest = hidden.abs().max().item()
        return (hidden / max(largest, 1e-3)).pow(2).mean() + m.second(hidden).mean() * (2 if largest > 1e9 else 3)

    return Case(Net(step), [(rows(),)] * 2)


@case
def branches_on_a_tensor() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        return torch.cond(hidden.sum() > 0, lambda h: h.sin() * 2, lambda h: h.cos(), (hidden,)).sum()

    return Case(Net(step), [(rows(),), (-rows(),)], falls_back="the graph has cond")


@case
def recurrent_over_time() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        output, (hidden, cell) = m.layer(x.view(2, 3, 8), (m.start.expand(1, 2, 5).contiguous(), torch.zeros(1, 2, 5)))
        return output.pow(2).mean() + hidden.sum() + cell.mean()

    layer = nn.LSTM(8, 5, batch_first=True)
    return Case(Net(step, layer=layer, start=nn.Parameter(torch.randn(5))), [(rows(),)] * 2)


@case
def masked_attention() -> Case:
    def step(m: Any, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        heads = m.first(x).view(2, 3, 8)
        mixed, weights = m.attention(heads, heads, heads, key_padding_mask=padding, average_attn_weights=False)
        return mixed.pow(2).mean(), weights

    padding = torch.tensor([[False, False, True], [False, True, True]])
    return Case(Net(step, attention=nn.MultiheadAttention(8, 2, batch_first=True)), [(rows(), padding)] * 2)


@case
def an_empty_batch_in_a_concatenation() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.second(m.first(x).relu())
        return hidden.sum() + torch.cat([hidden, x[:, :4] * 2]).pow(2).sum()

    return Case(Net(step), [(torch.zeros(0, 8),), (rows(),)])


@case
def the_mean_loss_of_an_empty_batch() -> Case:
    return Case(Net(lambda m, x, y: F.cross_entropy(m.second(x), y)), [(torch.zeros(0, 8), LABELS[:0])])


@case
def dynamic_sizes() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        pairs = hidden[:, None] - hidden[None]
        return pairs.pow(2).sum() / x.size(0) + hidden.view(-1, 2, 4).flip(0)[: x.size(0) // 2].sum()

    return Case(Net(step), [(torch.randn(size, 8),) for size in (6, 4, 9, 2, 7)])


@case
def a_graph_neighborhood() -> Case:
    def step(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = m.first(x)[source]
        degree = torch.zeros(6).index_add(0, target, torch.ones(source.numel())).clamp(min=1)
        return (torch.zeros(6, 8).index_add(0, target, messages) / degree[:, None]).relu().pow(2).sum()

    edges = torch.tensor([[0, 1, 2, 5, 5], [1, 1, 3, 0, 4]])
    return Case(Net(step), [(rows(), edges)])
