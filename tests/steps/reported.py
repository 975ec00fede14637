"""Steps for which lit_ort's first engine returned wrong results, crashed or ran in eager."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.steps.case import Case, Net, case

LABELS = torch.arange(6) % 4


def rows() -> Tensor:
    return torch.randn(6, 8)


@case
def clamp_parameters_under_no_grad() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in m.first.parameters():
                parameter.clamp_(-0.1, 0.1)
        return m.first(x).pow(2).mean()

    return Case(Net(step), [(rows(),)] * 2)


@case
def ema_teacher_in_the_step() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, parameter in zip(m.teacher.parameters(), m.first.parameters(), strict=True):
                mean.mul_(0.5).add_(parameter, alpha=0.5)
        return F.mse_loss(m.first(x), m.teacher(x))

    return Case(Net(step, teacher=nn.Linear(8, 8).requires_grad_(False)), [(rows(),), (rows(),)])


@case
def memory_bank() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        with torch.no_grad():
            m.bank[:6] = hidden
        return (hidden.unsqueeze(1) - m.bank).pow(2).mean()

    return Case(Net(step, bank=torch.ones(8, 8)), [(rows(),), (rows(),)])


@case
def contrastive_with_fill_diagonal() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        normal = F.normalize(m.first(x), dim=-1)
        scores = normal @ normal.T / 0.1
        scores.fill_diagonal_(float("-inf"))
        return F.cross_entropy(scores, torch.arange(6).roll(3))

    return Case(Net(step), [(rows(),)])


@case
def scatter_reduce_mean() -> Case:
    groups = torch.tensor([0, 1, 1, 2, 2, 2])

    def step(m: Any, x: Tensor) -> Tensor:
        index = groups[:, None].expand(-1, 8)
        return torch.zeros(3, 8).scatter_reduce(0, index, m.first(x), "mean", include_self=False).pow(2).mean()

    return Case(Net(step), [(rows(),)])


@case
def logsigmoid_of_large_negative_values() -> Case:
    return Case(Net(lambda m, x: -F.logsigmoid(m.first(x).sum(1) * 0 - 20 + m.second(x).mean(1)).mean()), [(rows(),)])


@case
def in_place_between_graph_breaks() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        if torch.isnan(hidden).any():
            return hidden.sum()
        hidden.mul_(2)
        if torch.isnan(hidden).any():
            return hidden.sum()
        return (hidden * hidden).sum()

    return Case(Net(step), [(rows(),)])


@case
def view_of_a_buffer_across_a_graph_break() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        slot = m.cache[:, 1]
        torch._dynamo.graph_break()
        slot.copy_(x[:2])
        return (m.cache.sum() + m.first(x).sum()) * 1.0

    return Case(Net(step, cache=torch.zeros(2, 3, 8)), [(rows(),)], falls_back="shares its memory with cache")


@case
def python_floats_close_to_one() -> Case:
    def step(m: Any, x: Tensor, decay: float) -> Tensor:
        return (m.first(x) * (1 - decay) * 1e5).sum()

    return Case(Net(step), [(rows(), 1 - 10.0**-k) for k in (1, 3, 5, 7)])


@case
def attention_with_fully_masked_rows() -> Case:
    mask = torch.zeros(2, 1, 4, 4)
    mask[1] = float("-inf")

    def step(m: Any, x: Tensor) -> Tensor:
        heads = m.first(x).view(2, 1, 4, 8)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=m.mask).pow(2).mean()

    return Case(Net(step, mask=mask), [(torch.randn(8, 8),)])


@case
def no_operation_on_an_input() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        loss, *_ = m.first(x).sum(), x.float(), x.contiguous()
        return loss + 0 * x.float().sum()

    return Case(Net(step), [(rows(),)])


@case
def only_returns_its_input() -> Case:
    return Case(Net(lambda m, x: (m.first(x).mean(), x.contiguous())), [(rows(),)])


@case
def attention_with_gradients_for_query_and_value_only() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        query, value = m.first(x).view(2, 1, 3, 8), m.extra(x).view(2, 1, 3, 8)
        return F.scaled_dot_product_attention(query, x.view(2, 1, 3, 8), value, is_causal=True).pow(2).mean()

    return Case(Net(step, extra=nn.Linear(8, 8)), [(rows(),)])


@case
def nothing_selected() -> Case:
    def step(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        return m.second(m.first(x)[keep].relu()).pow(2).sum() / keep.sum().clamp(min=1)

    return Case(Net(step), [(rows(), torch.arange(6) < 3), (rows(), torch.zeros(6).bool())])


@case
def embedding_with_max_norm() -> Case:
    table = nn.Embedding(10, 4, max_norm=0.5)
    return Case(Net(lambda m, i: m.table(i).pow(2).mean(), table=table), [(torch.tensor([1, 2]),)])


@case
def sgn_sinc_and_powers_of_zero() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        waves = torch.sinc(m.width * torch.arange(-3.0, 4.0)).sum()
        return (torch.sgn(hidden) * hidden).sum() + waves + (m.base**0 + m.base**2).sum()

    width, base = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))
    return Case(Net(step, width=width, base=base), [(rows(),)])


@case
def negative_index_raises() -> Case:
    table = nn.Embedding(200, 4)
    batches = [(torch.tensor([1, 100]),), (torch.tensor([1, -100]),)]
    return Case(Net(lambda m, i: m.table(i).pow(2).mean(), table=table), batches, raises="out of range")


@case
def vmap_of_grad() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        per_row = torch.func.vmap(torch.func.grad(lambda row: m.first(row).pow(2).sum()))
        return per_row(x).pow(2).mean() + 0 * m.first(x).sum()

    return Case(Net(step), [(rows(),)])


@case
def generator_and_type_as() -> Case:
    def step(m: Any, images: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        generated = m.first(z)
        valid = torch.ones(images.size(0), 1).type_as(images)
        return F.binary_cross_entropy_with_logits(m.second(m.first(z))[:, :1], valid), generated, valid

    return Case(Net(step), [(rows(), rows())])


@case
def torchmetrics_update() -> Case:
    import torchmetrics

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)
            self.mean = torchmetrics.MeanMetric()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.second(self.first(x))
            loss = F.cross_entropy(logits, y)
            self.accuracy(logits, y)
            self.mean.update(loss.detach())
            return loss

    return Case(Step(), [(rows(), LABELS)] * 6)


def loss_and_logits_of(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.second(m.first(x).relu())
    return F.cross_entropy(logits, y), logits


@case
def loss_and_logits() -> Case:
    return Case(Net(loss_and_logits_of), [(rows(), LABELS)] * 2)


@case
def gradient_for_the_second_result_too() -> Case:
    def backward(output: tuple[Tensor, Tensor]) -> None:
        (output[0] + output[1].pow(2).sum()).backward()

    return Case(Net(loss_and_logits_of), [(rows(), LABELS)], backward)


@case
def a_weight_annealed_with_min() -> Case:
    batches = [(rows(), k) for k in range(1, 9)]
    return Case(Net(lambda m, x, k: m.first(x).pow(2).mean() * min(1.0, k / 1000)), batches)
