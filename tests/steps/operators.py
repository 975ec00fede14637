"""Steps with operators that are rare in training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.steps.case import Case, Net, case
from tests.steps.reported import rows


@case
def linear_algebra() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        square = m.first(x).t() @ m.first(x) + torch.eye(8)
        solution = torch.linalg.solve(square, x.t())
        factor = torch.linalg.cholesky(square)
        return solution.pow(2).mean() + factor.diagonal().log().sum() + torch.linalg.eigvalsh(square).sum()

    return Case(Net(step), [(rows(),)])


@case
def contractions() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        first, second = m.first(x), m.second(x)
        outer = torch.einsum("bi,bj->bij", first, second)
        dims: Any = ([0], [0])
        return torch.einsum("bij,bij->", outer, outer) + torch.tensordot(first, second, dims=dims).sum()

    return Case(Net(step), [(rows(),)])


@case
def sorts_and_searches() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        ranked, order = hidden.sort(dim=1, stable=True)
        edges = torch.linspace(-1, 1, 5)
        bins = torch.bucketize(hidden.detach(), edges)
        return (
            (ranked * torch.arange(8)).sum()
            + x.gather(1, order).sum()
            + m.table[bins].sum()
            + hidden.kthvalue(3)[0].sum()
        )

    return Case(Net(step, table=nn.Parameter(torch.randn(6))), [(rows(),)])


@case
def images() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = m.convolution(x.view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        small = F.interpolate(F.max_pool2d(maps, 2), scale_factor=2, mode="bilinear")
        return (small * maps).pow(2).mean() + F.pixel_shuffle(maps, 2).sum(), maps

    return Case(Net(step, convolution=nn.Conv2d(3, 4, 3, padding=1)), [(rows(),)] * 2)


@case
def embedding_bags() -> Case:
    def step(m: Any, words: Tensor, offsets: Tensor) -> Tensor:
        return m.bag(words, offsets).pow(2).sum() + F.embedding(words, m.bag.weight, padding_idx=0).sum()

    words, offsets = torch.tensor([0, 2, 4, 2, 0, 9]), torch.tensor([0, 2, 5])
    return Case(Net(step, bag=nn.EmbeddingBag(10, 4, mode="mean")), [(words, offsets)])


@case
def sparse_gradient_of_an_embedding() -> Case:
    table = nn.Embedding(10, 4, sparse=True)
    module = Net(lambda m, i: m.table(i).pow(2).sum(), table=table)
    return Case(module, [(torch.tensor([1, 3, 3]),)], falls_back="a gradient is a sparse tensor")


# Dynamo doesn't support sparse tensors.
@torch.compiler.disable
def sparse_mm(sparse: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.mm(sparse, dense)


@case
def sparse_product() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        torch._dynamo.graph_break()
        mixed = sparse_mm(m.neighbors, hidden)  # pyright: ignore[reportCallIssue] - typed as a decorator
        return mixed.pow(2).mean()

    neighbors = torch.eye(6).to_sparse()
    return Case(Net(step, neighbors=neighbors), [(rows(),)])


@case
def distributions() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        mean, spread = m.first(x).chunk(2, 1)
        posterior = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3, validate_args=False)
        prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4), validate_args=False)
        divergence = torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
        return divergence - posterior.log_prob(x[:, :4]).mean() - posterior.entropy().mean()

    return Case(Net(step), [(rows(),)])


@case
def cumulative_products_and_maxima() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        return (
            hidden.cumprod(1).sum() + hidden.cummax(0)[0].mean() + hidden.logcumsumexp(1).mean() + hidden.prod(1).sum()
        )

    x = rows()
    x[1] = 0
    return Case(Net(step), [(x,)])


@case
def padded_and_packed() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        padded = nn.utils.rnn.pad_sequence([m.first(x[:2]), m.first(x[2:3]), m.first(x[3:])], batch_first=True)
        return (padded.mean(1) * torch.arange(8)).sum() + F.pad(padded, (1, 2), value=3.0).pow(2).mean()

    return Case(Net(step), [(rows(),)])


@case
def several_labels_for_each_row() -> Case:
    labels = torch.tensor([[3, 0, -1, 1], [0, -1, 2, 1], [1, 2, 3, 0], [2, -1, 0, 0], [0, 1, -1, 2], [3, 2, 1, 0]])
    return Case(
        Net(lambda m, x: F.multilabel_margin_loss(m.second(x), labels)),
        [(rows(),)],
        falls_back="torch traces aten.multilabel_margin_loss",
    )
