"""Regions of graphs: few, and right by the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lit_ort.regions.form_regions import Schedule, form_regions
from lit_ort.regions.graph_values import LibraryCall
from tests.compare import backend
from tests.regions.run_schedule import graph_of, regions, run_schedule, with_gradients


def check(function: Callable[..., Any], *args: torch.Tensor) -> Schedule:
    """The schedule of a function, whose outputs have to be right."""
    module = graph_of(function, *args)
    wanted = function(*args)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    if not isinstance(next(iter(reversed(module.graph.nodes))).args[0], tuple | list):
        module = graph_of(lambda *given: (function(*given),), *args)
    schedule = form_regions(module.graph)
    results = run_schedule(schedule, args)
    for result, expected, exact in zip(results, wanted, in_float64(function, *args), strict=True):
        assert result is not None
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        scale = exact.abs().max() if exact.numel() else 0.0
        tolerance = 3 * (expected.detach().double() - exact).abs().max() + 1e-6 * scale
        assert (result.double() - exact).abs().max() <= tolerance, str(schedule)
    return schedule


def in_float64(function: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    wide = [arg.detach().double().requires_grad_(arg.requires_grad) if arg.is_floating_point() else arg for arg in args]
    results = function(*wide)
    return [result.detach().double() for result in (results if isinstance(results, tuple) else (results,))]


def calls(schedule: Schedule) -> list[str]:
    return [str(step.node.target) for step in schedule.steps if isinstance(step, LibraryCall)]


X = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(0))
ONE_REGION: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a chain": lambda x, w: F.gelu(x) * 2 + x,
    "softmax": lambda x, w: x.softmax(-1),
    "log softmax": lambda x, w: x.log_softmax(-1),
    "layer norm": lambda x, w: F.layer_norm(x, (32,), w[0], w[1], 1e-5),
    "layer norm of two axes": lambda x, w: F.layer_norm(x, (6, 32), w, w + 1, 1e-5),
    "masked softmax": lambda x, w: x.masked_fill(x > 1, float("-inf")).softmax(-1),
    "a sum of rows": lambda x, w: x.exp().sum(-1),
    "a sum over rows": lambda x, w: x.exp().sum((0, 1)),
    "a mean of all": lambda x, w: (x * x).mean(),
    "a norm and a sum over rows": lambda x, w: (x / x.square().sum(-1, keepdim=True).sqrt(), x.sum((0, 1))),
    "transposed": lambda x, w: x.transpose(1, 2).exp() + 1,
    "views": lambda x, w: (x.view(24, 32) * w[0]).view(4, 6, 32).tanh(),
    "a slice": lambda x, w: x[:, 1:4].sin() * 2,
    "a rotation": lambda x, w: x[..., :16] * x[..., 16:],
    "a causal mask": lambda x, w: torch.where(torch.arange(32) <= torch.arange(6)[:, None], x, 0.0).exp(),
    "a concatenation": lambda x, w: torch.cat([x * 2, w.expand(4, 6, 32)[:, :2], x[:, 1:]], 1) * 2,
    "a rotation and its concatenation": lambda x, w: torch.cat([-x[..., 16:], x[..., :16]], -1) * w + x,
    "padded": lambda x, w: F.pad(x * 2, (2, 3), value=0.5) + 1,
    "cropped": lambda x, w: F.pad(x, (-2, 3, -1, 0)) + 1,
    "split": lambda x, w: (lambda a, b: a * b)(*x.split([16, 16], -1)),
    "casts": lambda x, w: (x.bfloat16().float() > 0).long() + 1,
}


@pytest.mark.parametrize("name", list(ONE_REGION))
@pytest.mark.sampled(10)
def test_what_has_one_space_is_one_region(name: str) -> None:
    schedule = check(ONE_REGION[name], X, X[0].clone())
    assert not calls(schedule)
    assert len(regions(schedule)) == 1, str(schedule)


SEVERAL_REGIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a sum over a middle axis": lambda x: x.exp().sum(1),
    "padded in two axes": lambda x: F.pad(x.sin(), (2, 3, 1, 0), value=0.5) + 1,
    "a concatenation of what is dear": lambda x: torch.cat([x.exp(), x.tanh()[:, 1:]], 1),
    "several reductions one after another": lambda x: (x - x.mean(0)).exp().sum(1).softmax(0).sum(),
}


@pytest.mark.parametrize("name", list(SEVERAL_REGIONS))
def test_what_has_several_spaces_is_right(name: str) -> None:
    assert not calls(check(SEVERAL_REGIONS[name], X))


OF_A_SCALAR: dict[str, Callable[[torch.Tensor], Any]] = {
    "a sum": lambda x: x.sum(-1) * 2,
    "a maximum": lambda x: x.amax(0, keepdim=True) * 2,
    "a softmax": lambda x: x.softmax(0) + x.log_softmax(-1),
    "a variance": lambda x: (x * 2).var(0, correction=0) + 1,
}


@pytest.mark.parametrize("name", list(OF_A_SCALAR))
def test_a_scalar_has_the_axes_that_torch_allows(name: str) -> None:
    assert not calls(check(OF_A_SCALAR[name], torch.tensor(0.7)))


def test_layer_norm_with_its_gradients_and_a_residual_is_few_regions() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (F.layer_norm(x, (32,), w, b) + x).square().mean()

    schedule = check(with_gradients(loss, 3), *(t.clone().requires_grad_() for t in (X, X[0, 0], X[0, 1])))
    assert not calls(schedule)
    assert len(regions(schedule)) <= 2, str(schedule)


@pytest.mark.parametrize("shape", [(4, 6, 1), (1, 6, 3), (1, 1, 5), (7, 1, 1), (1, 1, 1), (100, 70, 2)])
def test_axes_of_size_one_are_neither_rows_nor_lost(shape: tuple[int, ...]) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, shape[-1:], w, b)
        return (y.flatten(1) - 0.5).square().mean() + y.exp().sum(0).mean() + (x * y).sum((0, 2)).square().sum()

    w = torch.ones(shape[-1:])
    schedule = check(with_gradients(loss, 3), *(t.requires_grad_() for t in (torch.randn(shape), w, w * 0.1)))
    assert not calls(schedule)


def test_only_matmuls_stay_of_an_attention_block_with_its_gradients() -> None:
    def block(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, s = (F.layer_norm(x, (32,)) @ w).view(4, 6, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) * 0.25 + torch.full((6, 6), -1e4).triu(1)
        y = x + (scores.softmax(-1) @ s).transpose(1, 2).reshape(4, 6, 32)
        return (y + F.gelu(y @ u) @ v).log_softmax(-1)[..., 3].mean()

    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) / 6 for shape in ((32, 96), (32, 64), (64, 32))]
    schedule = check(with_gradients(block, 4), *(t.clone().requires_grad_() for t in (X, *weights)))
    others = {name for name in calls(schedule) if not name.startswith(("aten.mm", "aten.bmm"))}
    assert not others, str(schedule)


def test_embedding_and_cross_entropy_are_regions() -> None:
    def loss(table: torch.Tensor, w: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(table[words] @ w, words.roll(1))

    words = torch.randint(0, 11, (13,), generator=torch.Generator().manual_seed(0))
    check(loss, torch.randn(11, 8), torch.randn(8, 11), words)


def test_steps_that_follow_each_other_by_the_hundreds() -> None:
    def recurrence(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        state = x
        for _ in range(700):
            state = (state @ w + x).tanh()
        return state

    schedule = check(recurrence, torch.randn(2, 4), torch.randn(4, 4))
    assert len(calls(schedule)) == 700


SAMPLED: dict[str, Callable[[torch.Tensor], Any]] = {
    "read in another order": lambda x: (x.exp() + torch.rand(4), torch.rand(4) * 2),
    "an earlier one with a later one": lambda x: drawn_in_order(x, torch.rand(4), torch.rand(4)),
    "three": lambda x: last_first(x, torch.randn(4), torch.rand(4), torch.randint(9, (4,))),
}


def drawn_in_order(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.exp() + second, first * 2


def last_first(x: torch.Tensor, *samples: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.exp() * samples[2], (samples[1] < 0.5) * samples[0], samples[0].exp() + samples[2]


@pytest.mark.parametrize("name", SAMPLED)
def test_random_numbers_are_drawn_in_eagers_order(name: str) -> None:
    function, found = SAMPLED[name], []
    for call in (function, torch.compile(function, backend=backend(fallback="error"))):
        torch.manual_seed(1)
        found.append(call(torch.zeros(4)))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:var\\(\\). degrees of freedom:UserWarning")
def test_a_variance_of_fewer_elements_than_its_correction() -> None:
    def variance(x: torch.Tensor) -> torch.Tensor:
        return x.var(0, correction=4)

    compiled = torch.compile(variance, backend=backend(fallback="error"), dynamic=True)
    for rows in (8, 5, 3):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), variance(x))
