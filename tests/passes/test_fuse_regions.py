"""Regions in steps: which operators they take, that steps are eager's, and what has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_ort.backend.backend import ORTBackend
from lit_ort.errors import KernelError, SessionError
from lit_ort.passes.fuse_regions import NAME
from lit_ort.runtime import region_calls
from lit_ort.runtime.engines.choice import engine_of
from tests.compare import backend, mostly
from tests.passes.reports import report_of

REGION = "lit_ort.region.default"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.query, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.query(self.norm(x)).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / 2 + torch.full((5, 5), -1e4).triu(1)).softmax(-1)
        x = x + (weights @ v).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


def loss(module: nn.Module, words: Tensor) -> Tensor:
    hidden = module(words)
    return F.cross_entropy(hidden.flatten(0, 1), words.flatten() % 8)


def assert_like_eager(
    step: Callable[[nn.Module, Tensor], Any], module: nn.Module, x: Tensor, engine: ORTBackend
) -> None:
    twin, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    results = [
        run(m, given)
        for run, m, given in (
            (torch.compile(step, backend=engine), module, x),
            (step, twin, x),
            (step, exact, x.double() if x.is_floating_point() else x),
        )
    ]
    for result in results:
        result.sum().backward()
    values = [
        [result, *(p.grad for p in m.parameters())] for result, m in zip(results, (module, twin, exact), strict=True)
    ]
    for own, eager, right in zip(*values, strict=True):
        assert (own.dtype, own.shape) == (eager.dtype, eager.shape)
        scale = right.abs().max()
        assert (own - right).abs().max() <= 3 * (eager - right).abs().max() + 1e-6 * scale


@pytest.mark.parametrize("options", [{}, {"recompute": 0.3}])
def test_a_step_has_regions_between_its_matmuls(options: dict[str, Any]) -> None:
    engine = backend(**options)
    assert_like_eager(loss, Block(), torch.randint(11, (3, 5)), engine)
    (graph,) = engine.compile_log.graphs
    others = {name for name in graph.torch_operators if "mm" not in name and graph.torch_operators[name]}
    assert report_of(engine, NAME).fired == sum(graph.regions.values()) > 0
    assert not {
        name for name in others if name.removeprefix("aten.").startswith(("gelu", "add.", "_softmax", "native"))
    }


def test_a_split_step_and_a_forward_have_regions() -> None:
    engine, module, words = backend(), Block(), torch.randint(11, (3, 5))
    assert_like_eager(lambda m, x: m(x).exp(), module, words, engine)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=engine)(words), module(words))
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused", "split", "forward"][
        -len(engine.compile_log.graphs) :
    ]
    assert all(graph.regions for graph in engine.compile_log.graphs)


def test_it_can_be_disabled() -> None:
    engine = backend(disable_passes=(NAME,))
    assert_like_eager(loss, Block(), torch.randint(11, (3, 5)), engine)
    assert REGION not in engine.compile_log.graphs[0].torch_operators


def test_values_of_a_checkpoint_are_computed_again() -> None:
    layer, engine = nn.Linear(8, 8), backend()

    def step(m: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda x: m(x.exp()).tanh(), x, use_reentrant=False).square().sum()  # type: ignore[union-attr]

    assert_like_eager(step, layer, torch.randn(6, 8), engine)
    assert report_of(engine, NAME).fired >= 4


STEPS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a transposed value through a cast": lambda m, x: (m(x).double().t() @ x.double()).float().tanh().sum(),
    "the same value twice": lambda m, x: (m(x).exp() * torch.ones(8).expand(len(x), 8)).sum(),
    "an expanded sum": lambda m, x: (m(x).sum(0, keepdim=True).expand(len(x), 8) * x).tanh().sum(),
    "a constant's sum": lambda m, x: m(x).sum() * torch.ones(len(x), 8).sum(0).sum(),
    "booleans": lambda m, x: torch.where((m(x) > 0) & (x < 1), m(x), x.new_zeros(())).sum() + (x > 0).any(0).sum(),
    "integers": lambda m, x: m(x).sum() * ((x * 10).long() // 3 % 2).sum(-1).amax(),
    "a middle axis": lambda m, x: m(x).view(2, -1, 8).softmax(1).sum((0, 1)).square().sum(),
    "complex values": lambda m, x: torch.fft.rfft(m(x)).abs().log1p().sum() + (torch.fft.rfft(x).conj().imag + 1).sum(),
    "a rotation": lambda m, x: torch.cat([-m(x)[:, 4:], m(x)[:, :4]], -1).mul(x).sigmoid().sum(),
    "no elements": lambda m, x: m(x)[:0].exp().sum() + m(x).sum(),
    "strides of images": lambda m, x: (
        m(x).view(-1, 2, 2, 2).mean((2, 3), True).as_strided((2, 2, 1, 1), (2, 1, 2, 2)).exp().sum()
    ),
    "strides of what is transposed": lambda m, x: F.gelu(m(x)).t().mul(2).as_strided((6, 3), (1, 7)).exp().sum(),
    "strides of a scattered value": lambda m, x: (
        torch.as_strided_scatter(m(x).exp(), x[0, :4].view(2, 2), (2, 2), (8, 1), 3).tanh().sum()
    ),
    "strides": lambda m, x: m(x).exp().as_strided((3, 4), (8, 2)).sum(),
    "a sort": lambda m, x: (m(x).sort(-1).values * torch.arange(8)).sum(),
    "an index": lambda m, x: m(x)[torch.tensor([0, 2, 2])].square().sum() + m(x).gather(1, (x > 0).long()).sum(),
    "padding": lambda m, x: F.pad(m(x).exp(), (1, 2, 0, 1), value=1.0).log().sum(),
    "two outputs of a split": lambda m, x: torch.stack([a * b for a, b in zip(*m(x).chunk(2, -1), strict=True)]).sum(),
    "half of the rows": lambda m, x: m(x)[: len(x) // 2].exp().sum() + m(x)[len(x) // 2 :].tanh().mean(),
    "rows but the first and the last": lambda m, x: (m(x)[1:-1] * x[2:]).exp().mean() + m(x)[-1].sum(),
    "numbers of rows": lambda m, x: (m(x) * torch.arange(len(x))[:, None] / len(x)).square().sum(),
    "a row more": lambda m, x: torch.cat([m(x), m(x)[:1].exp()]).softmax(0).square().sum(),
    "a flat softmax": lambda m, x: m(x).flatten().softmax(0).view(-1, 4).square().sum(0).log().sum(),
    "dropout": lambda m, x: F.dropout(m(x), 0.5, training=False).relu().mean(),
    "a loss of classes": lambda m, x: F.cross_entropy(m(x), x.argmax(1)),
    "a loss of classes, some ignored": lambda m, x: F.cross_entropy(
        m(x).square(), x.argmax(1).masked_fill(x[:, 0] > 0, 3), ignore_index=3, reduction="sum"
    ),
    "a loss of classes with weights": lambda m, x: F.cross_entropy(
        m(x), x.argmax(1).masked_fill(x[:, 0] > 1, -100), torch.arange(1.0, 9.0).to(x), label_smoothing=0.1
    ),
    "a loss of nothing": lambda m, x: F.cross_entropy(m(x), torch.full((len(x),), -100), reduction="sum") + m(x).sum(),
    "an index of either sign": lambda m, x: (
        (m(x)[x.argmax(1) - 4] * m(x)[:, torch.tensor([1, -1])].mean()).tanh().square().sum()
    ),
    "selected rows": lambda m, x: (
        m(x).exp().index_select(0, x.argmax(1) // 2) * torch.cat([x, x]).index_select(1, x.argmax(1)[:1])[: len(x)]
    ).sum(),
    "two stacked": lambda m, x: torch.stack([m(x).exp(), x * 2], 1).softmax(2).square().sum(),
    "filled": lambda m, x: m(x).masked_fill(x > 0.5, -1.0).exp().sum() + m(x).masked_fill(x > 0, m(x)[0, 0]).sum(),
    "a square error": lambda m, x: F.mse_loss(m(x).exp(), x) + F.mse_loss(m(x), x, reduction="sum") * 0.1,
    "a binary cross entropy": lambda m, x: F.binary_cross_entropy_with_logits(m(x) * 9, (x > 0).to(x)),
    "a softmax of nothing": lambda m, x: (
        F.scaled_dot_product_attention(
            m(x)[None], x[None], m(x)[None], (x @ x.t() > 0) & (torch.arange(len(x)) > 0)[:, None]
        )
        .square()
        .sum()
    ),
    "rolled": lambda m, x: (m(x).roll(3) * m(x).exp().roll((1, -2), (1, 0)) * x.roll(len(x) // 3, 0)).sum(),
    "a norm": lambda m, x: (m(x) / m(x).norm(dim=-1, keepdim=True)).std() + m(x).var(),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", list(STEPS))
def test_a_step_is_eagers(name: str) -> None:
    assert_like_eager(STEPS[name], nn.Linear(8, 8), torch.randn(6, 8), backend())


# Half of a size is a symbol of its own, and so on; a loop over rows is another graph for each number of them. torch
# rolls rows of any number.
MORE_REGIONS = {"half of the rows": 1, "a norm": 1, "rolled": -2}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", mostly(pytest.mark.sweep, (name for name in STEPS if not name.startswith(("strides", "two outputs"))), 5)
)
def test_a_step_of_changing_sizes_has_the_same_regions(name: str) -> None:
    torch.compiler.reset()
    engine, module = backend(), nn.Linear(8, 8)
    for size in (6, 10, 4):
        module.zero_grad()
        assert_like_eager(STEPS[name], module, torch.randn(size, 8), engine)
    graphs = engine.compile_log.graphs
    assert len(graphs) == 2
    fixed, changing = (next(report for report in graph.passes if report.name == NAME).fired for graph in graphs)
    assert changing - fixed == MORE_REGIONS.get(name, 0)


def test_constants_are_computed_where_they_are_read() -> None:
    """The share of an element in a mean, and the fourth root of a number, are no regions of their own."""
    engine, module = backend(), nn.Linear(8, 8)

    def step(module: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(module(x).tanh() * torch.full((), 3.0).sqrt().sqrt(), x)

    assert_like_eager(step, module, torch.randn(6, 8), engine)
    (graph,) = engine.compile_log.graphs
    assert len(graph.regions) == 2, graph.regions


@pytest.mark.parametrize("label", [8, -1])
def test_a_label_without_a_class_is_refused(label: int) -> None:
    compiled = torch.compile(lambda x, y: F.cross_entropy(x.exp(), y), backend=backend())
    with pytest.raises(SessionError, match=f"index {label} is out of range"):
        compiled(torch.randn(6, 8), torch.tensor([0, 1, 2, label, 4, 5]))


@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (1, 3, 16, 16)])
def test_images_with_channels_last(shape: tuple[int, ...]) -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Hardswish())
    assert_like_eager(lambda m, x: m(x).square().mean(), module, torch.randn(shape), backend())


def test_values_whose_dtype_the_trace_has_wrong_are_converted() -> None:
    """A group norm's gradient is declared to be float32 in autocast, and is bfloat16."""
    layer, norm, x = nn.Linear(4, 8), nn.GroupNorm(2, 8), torch.randn(16, 4)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = norm(layer(x))
        return hidden, hidden.float().square().mean()

    gradients = []
    for function in (torch.compile(step, backend=backend()), step):
        with torch.autocast("cpu", torch.bfloat16):
            first, second = function(x)
        gradients.append(torch.autograd.grad(first.float().sum() + second, layer.weight)[0])
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=5e-2)


def test_without_kernels_operators_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise KernelError("The CPU lacks what kernels need.")

    # The engine of this process looks for kernels once.
    _ = engine_of("auto").native
    monkeypatch.setattr(region_calls, "kernels", refuse)
    engine = backend()
    assert_like_eager(loss, Block(), torch.randint(11, (3, 5)), engine)
    assert report_of(engine, NAME).declined == ("The CPU lacks what kernels need.",)
    assert REGION not in engine.compile_log.graphs[0].torch_operators


def test_cached_graphs_have_regions(tmp_path: Path) -> None:
    words, module, graphs = torch.randint(11, (3, 5)), Block(), []
    losses = []
    for _ in range(2):
        torch.compiler.reset()
        engine = backend(cache_dir=str(tmp_path))
        losses.append(torch.compile(loss, backend=engine)(module, words).item())
        graphs += engine.compile_log.graphs
    assert [graph.cache for graph in graphs] == ["written", "read"]
    assert losses[0] == losses[1]


ACTIVATIONS = {
    "ELU": nn.ELU(0.7),
    "ELU in place": nn.ELU(0.7, inplace=True),
    "CELU": nn.CELU(1.3),
    "SELU": nn.SELU(),
    "LeakyReLU": nn.LeakyReLU(0.2),
    "LeakyReLU in place": nn.LeakyReLU(0.2, inplace=True),
    "Mish": nn.Mish(),
    "Hardtanh": nn.Hardtanh(-0.5, 0.7),
    "ReLU6": nn.ReLU6(),
    "Hardsigmoid": nn.Hardsigmoid(),
    "Softplus": nn.Softplus(2.0),
    "GELU": nn.GELU(),
    "SiLU": nn.SiLU(),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations_are_regions(name: str) -> None:
    layer, activation, engine = nn.Linear(4, 16), ACTIVATIONS[name], backend()
    edges = torch.tensor([-40.0, -6.0, -3.0, -0.5, -0.0, 0.0, 0.7, 3.0, 6.0, 40.0]).repeat(6, 2)[:, :16]

    def step(x: Tensor) -> Tensor:
        return (activation(layer(x) + edges) * edges).square().mean()

    x, found = torch.randn(6, 4), []
    for call in (step, torch.compile(step, backend=engine)):
        found.append(torch.autograd.grad(call(x), list(layer.parameters())))
    torch.testing.assert_close(found[1], found[0])
    assert all(
        target.startswith(("lit_ort.region", "aten.")) for target in engine.compile_log.graphs[0].torch_operators
    )
    assert not any("backward" in target for target in engine.compile_log.graphs[0].torch_operators)
