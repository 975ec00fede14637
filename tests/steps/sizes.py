"""Steps with empty or small batches, with sizes that depend on values, and with views across graph breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.steps.case import Case, Net, case
from tests.steps.reported import LABELS, rows

MASK = torch.tensor([True, False, True, True, False, True])


@case
def an_empty_batch() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        scores = m.second(m.norm(m.first(x)).relu())
        return F.cross_entropy(scores, y, reduction="sum") + scores.sum()

    batches = [(torch.randn(n, 8), LABELS[:n]) for n in (6, 0, 3)]
    return Case(Net(step, norm=nn.LayerNorm(8)), batches)


@case
def an_empty_first_batch() -> Case:
    return Case(Net(lambda m, x: m.second(m.first(x)).square().sum()), [(torch.randn(0, 8),), (rows(),)])


@case
def a_last_short_batch() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = m.second(F.dropout(m.first(x), 0.0).tanh())
        return F.cross_entropy(scores, y), scores.argmax(1) == y

    return Case(Net(step), [(torch.randn(n, 8), torch.randint(4, (n,))) for n in (6, 6, 1, 6)])


@case
def rows_selected_by_a_mask() -> Case:
    def step(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(m.second(m.first(x).relu()[mask]), y[mask])

    masks = (MASK, ~MASK, MASK | True)
    return Case(Net(step), [(rows(), LABELS, mask) for mask in masks])


@case
def a_mask_that_selects_nothing() -> Case:
    def step(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        selected = m.first(x)[mask]
        return selected.sum() + m.second(x).square().mean() + selected.numel()

    return Case(Net(step), [(rows(), MASK), (rows(), MASK & False)])


@case
def indices_of_nonzero_elements() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        row, column = (hidden > 0.2).nonzero(as_tuple=True)
        kinds, counts = row.unique(return_counts=True)
        return hidden[row, column].log1p().sum() / len(kinds) + counts.sum()

    return Case(Net(step), [(rows(),), (rows(),)])


@case
def truncated_to_the_longest_row() -> Case:
    def step(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths[:, None]
        return (m.first(x)[:, :longest] * mask[..., None]).sum() / mask.sum()

    return Case(Net(step), [(torch.randn(3, 5, 8), torch.tensor(n)) for n in ([2, 4, 1], [5, 3, 3], [1, 1, 1])])


@case
def repeated_by_counts() -> Case:
    def step(m: Any, x: Tensor, counts: Tensor) -> Tensor:
        return m.second(m.first(x).repeat_interleave(counts, 0)).square().mean()

    return Case(Net(step), [(rows(), torch.tensor(n)) for n in ([1, 0, 2, 3, 1, 1], [0, 0, 1, 0, 2, 0])])


@case
def split_by_sizes_of_an_argument() -> Case:
    def step(m: Any, x: Tensor, sizes: list[int]) -> Tensor:
        return sum((part.mean() for part in m.first(x).split(sizes)), torch.zeros(()))

    return Case(Net(step), [(rows(), sizes) for sizes in ([1, 2, 3], [2, 2, 2], [5, 1])])


@case
def masked_positions_have_a_learned_embedding() -> Case:
    def step(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        hidden = m.first(x)
        hidden[mask] = m.token.to(hidden.dtype)
        return m.second(hidden).square().mean()

    return Case(Net(step, token=nn.Parameter(torch.rand(8))), [(rows(), MASK), (rows(), MASK & False)])


@case
def features_replace_marked_positions() -> Case:
    def step(m: Any, x: Tensor, marks: Tensor) -> Tensor:
        hidden = m.first(x)
        features = m.first(x[:4] * 2)
        hidden = hidden.masked_scatter(marks[:, None].expand_as(hidden), features)
        copy = hidden.clone()
        copy[marks] = features.tanh()
        return m.second(hidden).square().mean() + copy.sum()

    return Case(Net(step), [(rows(), MASK)])


@case
def a_view_across_a_break() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.arange(48.0).view(6, 8) / 48
        last = values.unbind(0)[-1]
        torch._dynamo.graph_break()
        last.add_(1)
        return (m.first(x) * values).sum(), last

    return Case(Net(step), [(rows(),)], falls_back="shares its memory")


@case
def a_view_without_gradients_across_a_break() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            part = m.first.weight[:4]
        torch._dynamo.graph_break()
        return (part * x[:4]).sum() + m.first(x).sum()

    return Case(Net(step), [(rows(),)])


@case
def views_of_a_constant() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        grid = torch.full((6, 8), 0.3).unsqueeze(0)
        return (m.first(x) * grid).sum(), grid, grid[..., ::2].unsqueeze(0), grid.transpose(1, 2)

    return Case(Net(step), [(rows(),)])


@case
def a_result_in_addition_to_the_loss_of_a_changed_input() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = m.first(x)
        torch._dynamo.graph_break()
        hidden.mul_(2)
        return hidden.square().mean(), m.second(hidden)

    def backward(output: tuple[Tensor, Tensor]) -> None:
        (output[0] + output[1].sum()).backward()

    return Case(Net(step), [(rows(),)], backward)


@case
def random_numbers_of_numpy() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        share = np.random.default_rng(0).beta(0.4, 0.4)
        order = np.random.RandomState(1).permutation(len(x))
        mixed = share * x + (1 - share) * x[torch.as_tensor(order)]
        return m.first(mixed).square().mean()

    return Case(Net(step), [(rows(),), (rows(),)])


@case
def embeddings_scaled_by_frequency() -> Case:
    def step(m: Any, words: Tensor) -> Tensor:
        return m.first(m.table(words)).square().sum()

    table = nn.Embedding(10, 8, scale_grad_by_freq=True, padding_idx=1)
    words = torch.tensor([[1, 2, 2], [3, 2, 9]])
    return Case(Net(step, table=table), [(words,)])


@case
def selective_activation_checkpointing() -> Case:
    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_matmul = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    def step(m: Any, x: Tensor) -> Any:
        hidden: Any = checkpoint(lambda x: m.first(x).tanh(), x, use_reentrant=False, context_fn=contexts)
        return m.second(hidden).square().mean()

    return Case(Net(step), [(rows(),)])
