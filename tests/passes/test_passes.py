"""The passes over the joint graph: each fires, must not fire in other cases, and keeps the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from lit_ort.fusions import fusion_pipeline as fusions
from lit_ort.passes import pass_pipeline as passes
from lit_ort.passes.canonicalize import canonicalize
from tests.compare import assert_same_call, assert_same_step, backend
from tests.passes.reports import report_of

Step = Callable[[Any, Tensor], Tensor]
WORDS, WIDTH = 50, 8


class Module(nn.Module):
    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(words, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.table.weight


def run(step: Step, x: Tensor, module: nn.Module | None = None, **options: Any) -> Any:
    engine = backend(**options)
    torch.compile(step, backend=engine)(Module() if module is None else module, x).backward()
    return engine


# canonicalize


def minus_zeros(*sizes: int) -> Tensor:
    """What a sum can be without, for a term of -0.0 too."""
    return torch.full(sizes, -0.0)


def redundant(m: Any, x: Tensor) -> Tensor:
    hidden = m.linear(x).contiguous().to(torch.float32).clone()
    return (hidden.view(-1) * torch.ones(()) + minus_zeros(6 * WIDTH)).pow(2).sum()


def test_canonicalize_removes_operators_without_effect() -> None:
    engine = assert_same_step(Module(), redundant, torch.randn(6, WIDTH))
    assert report_of(engine, "canonicalize").fired >= 5
    (graph,) = engine.compile_log.graphs
    for target in ("_to_copy.default", "view.default", "add.Tensor", "full.default"):
        assert f"aten.{target}" not in graph.torch_operators
    assert "Add" not in graph.operators_after


CONCATENATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "one part": (lambda x: torch.cat([x[:0], x]), 0),
    "two parts": (lambda x: torch.cat([x[:0], x, x * 2, torch.ones(0, WIDTH)]), 2),
    "a vector of no elements": (lambda x: torch.cat([torch.ones(0), x]), 0),
    "of another dtype": (lambda x: torch.cat([x.half(), torch.ones(0, WIDTH)]), 2),
    "nothing": (lambda x: torch.cat([x[:0], x[:0]]).sum() + x, 2),
    "a result of no elements": (lambda x: torch.cat([x[:, :0], x[:, :0]]).sum() + x, 2),
}


@pytest.mark.parametrize("name", CONCATENATIONS)
def test_canonicalize_leaves_empty_tensors_out_of_concatenations(name: str) -> None:
    function, parts = CONCATENATIONS[name]
    x = torch.randn(6, WIDTH)
    traced = make_fx(function)(x)
    canonicalize(traced)
    counts = [len(node.args[0]) for node in traced.graph.nodes if node.target is torch.ops.aten.cat.default]  # type: ignore[arg-type]
    assert counts == ([parts] if parts else [])
    torch.testing.assert_close(traced(x), function(x))
    assert traced(x).dtype == function(x).dtype


def test_canonicalize_keeps_copies_whose_views_are_read_by_strides() -> None:
    def strided(m: Any, x: Tensor) -> Tensor:
        columns = x.t().contiguous()
        return m.linear(columns.unsqueeze(0).as_strided((2, WIDTH), (3, 1), 2)).square().sum()

    assert_same_step(Module(), strided, torch.randn(6, WIDTH))


def test_canonicalize_keeps_copies_of_masks_for_attention_on_gpus() -> None:
    def attention(q: Tensor, bias: Tensor) -> Tensor:
        mask = bias.permute(2, 0, 1).contiguous().unsqueeze(0).expand(4, 3, 16, 16)
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, mask, False)[0]

    inputs = torch.randn(4, 3, 16, 8, device="meta"), torch.randn(16, 16, 3, device="meta")
    traced = make_fx(attention)(*inputs)
    canonicalize(traced)
    assert [node.target for node in traced.graph.nodes].count(torch.ops.aten.clone.default) == 1


@pytest.mark.parametrize("value", [0.0, -0.0, 2, True, math.inf, math.nan])
def test_canonicalize_fills_with_numbers(value: float) -> None:
    def filled(x: Tensor) -> tuple[Tensor, Tensor]:
        part, counts = x[:, :3].clone(), torch.zeros(6, dtype=torch.int64)
        part[:, -2:] = value
        counts[1:] = 2.7
        return part, counts

    engine, x = backend(), torch.randn(6, WIDTH)
    expected, actual = filled(x), torch.compile(filled, backend=engine)(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual[0].signbit(), expected[0].signbit())
    assert "aten.fill.Tensor" not in engine.compile_log.graphs[0].torch_operators


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda m, x: (m.linear(x).double() * 1).sum().float(), id="another dtype"),
        pytest.param(lambda m, x: (m.linear(x)[:1] + minus_zeros(6, 1)).exp().sum(), id="a broadcast sum"),
        pytest.param(lambda m, x: torch.add(m.linear(x), minus_zeros(WIDTH), alpha=3).exp().sum(), id="alpha"),
        pytest.param(
            lambda m, x: torch.add(minus_zeros(WIDTH), m.linear(x), alpha=3).exp().sum(),
            id="alpha, swapped",
        ),
        pytest.param(lambda m, x: (m.linear(x) ** 3 + m.linear(x) ** -1).sum(), id="other powers"),
        pytest.param(lambda m, x: (1 / m.linear(x) + torch.ones(1) / m.linear(x)).sum(), id="reciprocal"),
        pytest.param(lambda m, x: (minus_zeros(WIDTH) - m.linear(x)).exp().sum(), id="negation"),
        pytest.param(lambda m, x: (x.long() ** 2).float().mean() + m.linear(x).sum(), id="integers"),
    ],
)
def test_canonicalize_must_not_change_numbers(step: Step) -> None:
    assert_same_step(Module(), step, torch.randn(6, WIDTH))


@pytest.mark.parametrize("copied", [False, True])
def test_canonicalize_keeps_the_order_of_equal_elements(copied: bool) -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        x = x.clone() if copied else x
        return (m.linear(x[: 4 * WIDTH].view(4, WIDTH)) * x.sort().indices[:WIDTH]).sum()

    assert_same_step(Module(), step, torch.ones(1).expand(100 * WIDTH))


# merge_equal


def equal_masks(m: Any, x: Tensor) -> Tensor:
    first = torch.ones(6, 6).cumsum(0) * m.linear(x).sum()
    return (first + torch.ones(6, 6).cumsum(0) * x.exp().sum()).sum() + (x.exp() * m.linear(x)).sum()


def test_merge_equal_fires_and_keeps_the_numbers() -> None:
    engine = assert_same_step(Module(), equal_masks, torch.randn(6, WIDTH))
    assert report_of(engine, "merge_equal").fired >= 3
    assert engine.compile_log.graphs[0].torch_operators["aten.cumsum.default"] == 1


def test_merge_equal_must_not_merge_random_operators() -> None:
    engine = backend()
    step = torch.compile(lambda x: (torch.rand_like(x), torch.rand_like(x)), backend=engine)
    first, second = step(torch.zeros(6))
    assert not torch.equal(first, second)


def test_merge_equal_must_not_merge_different_dtypes_or_arguments() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.linear(x)
        counts = (torch.ones(3) * 2).sum() + (torch.ones(3, dtype=torch.int64) * 2).sum() / 4
        return (hidden.softmax(0) * hidden.softmax(1)).sum() + counts * hidden.sum() + hidden.sum(0).exp().sum()

    assert_same_step(Module(), step, torch.randn(WIDTH, WIDTH))


def test_merge_equal_must_not_merge_recomputed_nodes() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(lambda x: m.linear(x).tanh().exp(), x, use_reentrant=False)
        return hidden.square().sum()

    engine = run(step, torch.randn(6, WIDTH), disable_passes=("regions",))
    targets = engine.compile_log.graphs[0].torch_operators
    assert targets["aten.tanh.default"] == 2


def test_merge_equal_can_be_disabled() -> None:
    engine = run(equal_masks, torch.randn(6, WIDTH), disable_passes=("merge_equal",))
    assert engine.compile_log.graphs[0].torch_operators["aten.cumsum.default"] == 2


# unused_gradients


def large_loss(m: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(m.large(m.linear(x)), torch.arange(60))


def large_module(frozen: bool) -> nn.Module:
    module = Module()
    module.large = nn.Linear(WIDTH, 6000)
    module.large.requires_grad_(not frozen)
    return module


@pytest.mark.parametrize(("frozen", "fired"), [(True, 2), (False, 0)])
def test_gradients_of_frozen_layers_are_unused(frozen: bool, fired: int) -> None:
    engine = assert_same_step(large_module(frozen), large_loss, torch.randn(60, WIDTH))
    assert report_of(engine, "unused_gradients").fired == fired


def test_all_gradients_are_unused_in_evaluation() -> None:
    engine, module, x = backend(), large_module(False), torch.randn(60, WIDTH)
    with torch.no_grad():
        loss = torch.compile(large_loss, backend=engine)(module, x)
        torch.testing.assert_close(loss, large_loss(module, x))
    assert report_of(engine, "unused_gradients").fired == 3


# embedding_gradient

BATCH = torch.tensor([1, 3, 3, 0, 49, 7])


def embedded(m: Any, x: Tensor) -> Tensor:
    return (m.table(BATCH) * x).exp().sum()


def tied(m: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.linear(m.table(BATCH) * x)), BATCH.roll(1))


def padded(m: Any, x: Tensor) -> Tensor:
    return (F.embedding(BATCH, m.table.weight, padding_idx=3) * x).exp().sum()


@pytest.mark.parametrize(
    ("step", "target"),
    [
        (embedded, "lit_ort.embedding_gradient.default"),
        (padded, "lit_ort.embedding_gradient.default"),
        (tied, "lit_ort.embedding_gradient_onto.default"),
    ],
)
def test_embedding_gradient_fires_and_keeps_the_numbers(step: Step, target: str) -> None:
    # So many words that output layer and loss are fused, and their gradient is no view.
    engine = assert_same_step(Module(words=50_000), step, torch.randn(6, WIDTH), disable_passes=("regions",))
    assert report_of(engine, "embedding_gradient").fired == 1
    targets = engine.compile_log.graphs[0].torch_operators
    assert targets[target] == 1
    assert "aten.embedding_dense_backward.default" not in targets


def by_frequency(m: Any, x: Tensor) -> Tensor:
    return (F.embedding(BATCH, m.table.weight, scale_grad_by_freq=True) * x).exp().sum()


def test_embedding_gradient_must_not_fire_with_scaling_by_frequency() -> None:
    engine = assert_same_step(Module(), by_frequency, torch.randn(6, WIDTH))
    assert report_of(engine, "embedding_gradient").fired == 0


def three_gradients(m: Any, x: Tensor) -> Tensor:
    return tied(m, x) + m.table.weight.square().sum() + embedded(m, x)


def test_embedding_gradient_must_not_overwrite_memory_in_use() -> None:
    """The other gradient is also a result, so nothing can be added to it in place."""

    def step(m: Any, x: Tensor) -> Tensor:
        doubled = m.table.weight * 2
        return (doubled * m.linear.weight.sum()).sum() + (F.embedding(BATCH, doubled) * x).exp().sum()

    for function in (three_gradients, step):
        assert_same_step(Module(), function, torch.randn(6, WIDTH))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("step", [embedded, padded, tied, three_gradients])
@pytest.mark.parametrize("disabled", [(), ("embedding_gradient",)])
def test_embedding_gradients_in_regions(step: Step, disabled: tuple[str, ...]) -> None:
    engine = assert_same_step(Module(), step, torch.randn(6, WIDTH), disable_passes=disabled)
    assert not any("embedding" in name for name in engine.compile_log.graphs[0].torch_operators)


def test_embedding_gradient_can_be_disabled() -> None:
    engine = run(tied, torch.randn(6, WIDTH), disable_passes=("embedding_gradient", "regions"))
    assert engine.compile_log.graphs[0].torch_operators["aten.embedding_dense_backward.default"] == 1


# All passes


@pytest.mark.slow
def test_each_pass_can_be_disabled_with_the_same_numbers() -> None:
    required = fusions.required_names()
    names = [graph_pass.name for graph_pass in passes.PASSES if not graph_pass.required]
    names += [name for name in fusions.names() if name not in required]
    expected = None
    for disabled in [(), tuple(names), *((name,) for name in names)]:
        torch.compiler.reset()
        torch.manual_seed(0)
        module, engine = Module(), backend(disable_passes=disabled)
        loss = torch.compile(tied, backend=engine)(module, torch.randn(6, WIDTH))
        loss.backward()
        assert not {report.name for report in engine.compile_log.graphs[0].passes} & set(disabled)
        assert module.table.weight.grad is not None
        if expected is None:
            expected = module.table.weight.grad
        torch.testing.assert_close(module.table.weight.grad, expected)


# memory_format


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.last = nn.Conv2d(16, 4, 1)
        self.head = nn.Linear(4 * 64, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.max_pool2d(self.norm(self.first(x)).relu(), 2)
        hidden = hidden + self.depthwise(hidden)
        return self.head(self.last(hidden).flatten(1))


def classify(m: Any, x: Tensor) -> Tensor:
    return m(x).square().mean()


def test_memory_format_propagates_channels_last() -> None:
    engine = assert_same_step(Images(), classify, torch.randn(4, 3, 16, 16))
    # The forward and the backward of three convolutions.
    assert report_of(engine, "memory_format").fired == 6
    (graph,) = engine.compile_log.graphs
    assert "lit_ort.in_memory_format.default" not in graph.torch_operators


def test_memory_format_with_another_batch_size() -> None:
    module, engine = Images().eval(), backend()
    step = torch.compile(classify, backend=engine)
    for batch in (4, 3, 5):
        assert_same_call(module, classify, step, torch.randn(batch, 3, 16, 16))
    assert all(graph.fallback is None for graph in engine.compile_log.graphs)


@pytest.mark.parametrize(
    ("step", "images"),
    [
        pytest.param(classify, (1, 3, 16, 16), id="few pixels, except for the depthwise convolution"),
        pytest.param(
            lambda m, x: m.first(x).as_strided((4, 16), (16, 1)).sum(),
            (4, 3, 16, 16),
            id="as_strided",
        ),
        pytest.param(lambda m, x: m.first(x).relu().square().sum(), (1, 3, 16, 16), id="few pixels"),
    ],
)
def test_memory_format_must_not_change_numbers(step: Step, images: tuple[int, ...]) -> None:
    engine = assert_same_step(Images(), step, torch.randn(images))
    assert report_of(engine, "memory_format").fired == (2 if step is classify else 0)


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda hidden: F.group_norm(hidden, 4), id="group norm"),
        pytest.param(lambda hidden: F.group_norm(hidden, 4).relu().contiguous() * hidden, id="both formats"),
        pytest.param(lambda hidden: F.group_norm(hidden.flatten(2), 4).view_as(hidden), id="flat group norm"),
        pytest.param(lambda hidden: F.layer_norm(hidden, hidden.shape[1:]), id="layer norm"),
        pytest.param(lambda hidden: hidden.cumsum(2).flip(3), id="operators along a dimension"),
        pytest.param(lambda hidden: hidden.flatten(2).transpose(1, 2).softmax(1).mT.view(4, 16, 16, 16), id="tokens"),
        pytest.param(lambda hidden: F.pixel_shuffle(hidden, 2).repeat(1, 4, 1, 1)[..., ::2, ::2], id="moved pixels"),
    ],
)
def test_memory_format_converts_for_operators_that_need_it(between: Callable[[Tensor], Tensor]) -> None:
    def mixed(m: Any, x: Tensor) -> Tensor:
        return m.last(m.depthwise(between(m.first(x))) + 1).square().mean()

    engine = assert_same_step(Images(), mixed, torch.randn(4, 3, 16, 16))
    assert report_of(engine, "memory_format").fired == 6


def test_memory_format_must_not_fire_for_split_graphs() -> None:
    module = Images()
    engine = backend()
    output = torch.compile(lambda m, x: m(x), backend=engine)(module, torch.randn(4, 3, 16, 16))
    output.backward(torch.randn_like(output))
    assert report_of(engine, "memory_format").fired == 0
    # Without a backward, no tensors are saved.
    with torch.no_grad():
        torch.compile(lambda m, x: m(x) + 1, backend=engine)(module, torch.randn(4, 3, 16, 16))
    assert sum(r.fired for r in engine.compile_log.graphs[-1].passes if r.name == "memory_format") == 3


class Pair(torch.autograd.Function):
    """Stacks two values; the gradients are two parts of one tensor."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return torch.stack((first, second))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(gradient.unbind(0))


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")
def test_embedding_gradient_is_not_added_to_a_part_of_another_one() -> None:
    table, indices = nn.Embedding(50, 8), torch.tensor([1, 2])
    other, added = torch.randn(50, 8, requires_grad=True), torch.randn(2, 50, 8, requires_grad=True)

    def step(indices: Tensor) -> Tensor:
        total: Any = Pair.apply(table.weight, other) + added
        return (total * total).sum() + table(indices).exp().sum()

    inputs = (table.weight, other, added)
    compiled = torch.compile(step, backend=backend(disable_passes=("regions",)))
    actual, expected = (torch.autograd.grad(call(indices), inputs) for call in (compiled, step))
    for gradient, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
