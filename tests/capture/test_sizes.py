"""Dynamic shapes: one graph for batches of different sizes, with the results of eager."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional

from lit_ort import ORTOptions
from lit_ort.backend import graph_signature
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.errors import CaptureError, OptionsError
from lit_ort.runtime.sizes import hold
from tests.compare import TOLERANCE, backend, gradients, relative_error

WORDS, WIDTH, HEADS = 50, 16, 2


class Block(nn.Module):
    """A language model of one layer, with shapes written as in typical user code."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.word = nn.Embedding(words, WIDTH)
        self.position = nn.Embedding(64, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, words)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        batch, length = text.shape
        x = self.word(text) + self.position(torch.arange(length))
        split = self.heads(self.norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + functional.gelu(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return functional.cross_entropy(self.out(x).view(-1, self.out.out_features), labels.view(-1))


class Words(nn.Module):
    """The next word of each one, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(text.shape[1])[:, None] / WIDTH
        return functional.cross_entropy(self.out(self.word(text) + places).view(-1, WORDS), labels.view(-1))


def assert_equal_steps(module: nn.Module, engine: ORTBackend, *batches: tuple[Tensor, ...]) -> None:
    compiled = torch.compile(module, backend=engine)
    for batch in batches:
        module.zero_grad()
        expected = module(*batch)
        expected.backward()
        reference = gradients(module)
        module.zero_grad()
        loss = compiled(*batch)
        loss.backward()
        assert relative_error(loss.detach(), expected.detach()) <= TOLERANCE
        actual = gradients(module)
        assert actual.keys() == reference.keys()
        for name, gradient in reference.items():
            assert relative_error(actual[name], gradient) <= TOLERANCE, (name, [tuple(t.shape) for t in batch])


def text(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (batch, length)), torch.randint(WORDS, (batch, length))


@pytest.mark.slow
def test_twenty_lengths_need_two_graphs() -> None:
    engine = backend()
    assert_equal_steps(Block(), engine, *(text(3, length) for length in range(5, 25)))
    assert [graph.shapes for graph in engine.compile_log.graphs] == [
        ("text int64[3, 5]", "labels int64[3, 5]"),
        ("text int64[3, any]", "labels int64[3, any]"),
    ]


@pytest.mark.slow
def test_batch_and_length_change_independently() -> None:
    engine = backend()
    sizes = [(3, 9), (3, 12), (4, 12), (5, 7), (2, 30), (4, 12), (3, 9)]
    assert_equal_steps(Words(), engine, *(text(*size) for size in sizes))
    assert len(engine.compile_log.graphs) == 3


@pytest.mark.slow
def test_slices_of_a_longer_batch() -> None:
    engine, (words, labels) = backend(), text(3, 40)
    assert_equal_steps(Words(), engine, *((words[:, :n], labels[:, :n].contiguous()) for n in (7, 12, 19, 30)))
    assert len(engine.compile_log.graphs) == 2


@pytest.mark.slow
@pytest.mark.sweep
def test_the_same_passes_fire_as_for_fixed_sizes() -> None:
    engine, module = backend(), Block(words=6000)
    assert_equal_steps(module, engine, text(4, 60), text(5, 64), text(6, 50))
    fired = [{report.name: report.fired for report in graph.passes} for graph in engine.compile_log.graphs]
    assert len(fired) == 2
    # Small regions are declined by their sizes, which one of the graphs doesn't know.
    assert all(counts.pop("regions") > 0 for counts in fired)
    assert fired[0] == fired[1]
    assert fired[1]["linear_cross_entropy"] == 1


@pytest.mark.slow
@pytest.mark.sweep
def test_bf16() -> None:
    torch.manual_seed(0)
    engine, module = backend(precision="bf16-mixed"), Block(words=6000)
    compiled = torch.compile(module, backend=engine)
    for size in [(4, 60), (5, 64), (6, 50)]:
        batch = text(*size)
        loss, expected = compiled(*batch), module(*batch)
        assert relative_error(loss.detach(), expected.detach()) <= 1e-2
    assert len(engine.compile_log.graphs) == 2


class Distances(nn.Module):
    """Matmuls whose second factor also has a dynamic size."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(96, 64))
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        position = self.position[: x.size(1)]
        scores = self.linear(x) @ position.transpose(0, 1)
        return (scores.softmax(-1) @ (position * 2)).square().mean()


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.sweep)])
def test_matmuls_of_two_dynamic_sizes(precision: str) -> None:
    torch.manual_seed(0)
    engine, module = backend(precision=precision), Distances()
    batches = [(torch.randn(8, length, 64),) for length in (60, 72, 80, 65)]
    if precision == "32-true":
        assert_equal_steps(module, engine, *batches)
    compiled = torch.compile(module, backend=engine)
    for batch in batches:
        loss, expected = compiled(*batch), module(*batch)
        assert relative_error(loss.detach(), expected.detach()) <= 2e-2
    assert len(engine.compile_log.graphs) == 2


@pytest.mark.slow
def test_causal_attention_without_the_fused_operator() -> None:
    engine = backend(disable_passes=("attention",))
    assert_equal_steps(Block(), engine, *(text(3, length) for length in (5, 8, 13)))
    assert len(engine.compile_log.graphs) == 2


def test_dynamic_never_compiles_each_size() -> None:
    engine = backend(dynamic="never")
    assert_equal_steps(Words(), engine, *(text(3, length) for length in (5, 8, 13)))
    assert len(engine.compile_log.graphs) == 3


class Halves(nn.Module):
    """Branches on the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.size(1) > 10:
            x = x[:, : x.size(1) // 2] * 2
        return (x * torch.arange(x.size(1))[:, None]).square().mean()


def test_a_step_that_branches_on_a_size() -> None:
    engine = backend()
    assert_equal_steps(Halves(), engine, *((torch.randn(3, length, 4),) for length in (5, 7, 15, 9, 31, 12)))
    assert len(engine.compile_log.graphs) <= 4


class Resized(nn.Module):
    """Operators that run in torch nodes and have sizes as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.interpolate(self.convolution(x), size=2 * x.size(2), mode="linear")
        return functional.elu(functional.adaptive_avg_pool1d(y, 4)).square().mean() + y.cumsum(-1).std()


def test_torch_nodes_with_dynamic_sizes() -> None:
    engine = backend()
    assert_equal_steps(Resized(), engine, *((torch.randn(3, 2, length),) for length in (9, 12, 17, 30)))
    graphs = engine.compile_log.graphs
    assert len(graphs) == 2, [(graph.shapes, graph.fixed_sizes) for graph in graphs]
    assert graphs[-1].torch_operators


class Samples(nn.Module):
    """Distributions whose operators have no shapes for dynamic sizes in torch 2.13."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        shape, rate = functional.softplus(self.linear(x)).add(1).chunk(2, 1)
        weights = distributions.Dirichlet(shape, validate_args=False).rsample()
        draws = distributions.Gamma(shape, rate, validate_args=False).rsample()
        counts = distributions.Binomial(5, weights.detach(), validate_args=False).sample()
        return (weights * draws * counts).mean()


# Dynamo makes an object of each differentiable function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_samples_with_dynamic_sizes() -> None:
    engine = backend()
    assert_equal_steps(Samples(), engine, *((torch.randn(rows, 4),) for rows in (7, 5, 9)))
    graphs = engine.compile_log.graphs
    assert len(graphs) == 2, [(graph.shapes, graph.fixed_sizes) for graph in graphs]


def test_samples_of_transposed_parameters() -> None:
    """Their operators return contiguous values."""
    a, b = torch.rand(3, 4).t() + 1, torch.rand(3, 4).t()
    for operator, arguments in {
        torch.ops.aten._sample_dirichlet: (a,),
        torch.ops.aten._dirichlet_grad: (a, a, a),
        torch.ops.aten.binomial: (a, b),
        torch.ops.aten._standard_gamma_grad: (a, a),
    }.items():
        on_meta = operator(*(argument.to("meta") for argument in arguments))
        assert on_meta.stride() == operator(*arguments).stride(), operator


class Idle(nn.Module):
    """A permutation in the original order, which a graph optimizer of ONNX Runtime mistakes for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear((x * 2).permute(0, 1))
        return (y * torch.linspace(0.5, 2.0, 4)).square().mean()


def test_permutations_in_the_original_order() -> None:
    engine = backend()
    assert_equal_steps(Idle(), engine, *((torch.randn(rows, 4),) for rows in (4, 5, 4, 7)))
    assert len(engine.compile_log.graphs) == 2


class Recurrent(nn.Module):
    def __init__(self, kind: str, batch_first: bool) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(3, 4, num_layers=2, bidirectional=True, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.layer(x)
        last = state[1] if isinstance(state, tuple) else state
        return (output.cumsum(1) * torch.linspace(0, 1, 8)).square().mean() + last.sum()


# Tests of packed sequences have batches that change.
REPRESENTATIVE = ("LSTM", False, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batch_first", "changing"),
    [
        case if case == REPRESENTATIVE else pytest.param(*case, marks=pytest.mark.sweep)
        for case in itertools.product(("GRU", "LSTM", "RNN"), (False, True), (0, 1))
    ],
)
def test_recurrent_layers_share_one_graph_for_all_lengths_and_batches(
    kind: str, batch_first: bool, changing: int
) -> None:
    engine = backend()
    shapes = ((size, 5, 3) if changing == 0 else (5, size, 3) for size in (4, 6, 9, 7))
    batches = ((torch.randn(shape, requires_grad=True),) for shape in shapes)
    with dynamo_settings("training_step", True):
        assert_equal_steps(Recurrent(kind, batch_first), engine, *batches)
    assert len(engine.compile_log.graphs) == 2


@pytest.mark.slow
def test_a_graph_for_fixed_sizes_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: Any) -> Any:
        raise CaptureError("the sizes decide", remedy="Each size is compiled separately.")

    monkeypatch.setattr(graph_signature, "conditions_of", refuse)
    engine = backend()
    assert_equal_steps(Words(), engine, *(text(3, length) for length in (5, 8, 13, 8)))
    graphs = engine.compile_log.graphs
    assert [graph.shapes[0] for graph in graphs] == [f"text int64[3, {length}]" for length in (5, 8, 13)]
    assert "these only: the sizes decide" in str(graphs[1])


@pytest.mark.slow
def test_equal_graphs_share_one_program_for_any_size() -> None:
    engine, modules = backend(), [Words(), Words()]
    steps = [torch.compile(module, backend=engine) for module in modules]
    for length in (5, 6, 7, 8):
        for step in steps:
            step(*text(2, length)).backward()
    assert len(engine.compile_log.graphs) == 2


@pytest.mark.slow
def test_a_graph_for_any_size_is_cached(tmp_path: Path) -> None:
    lengths = (5, 8, 13)
    for expected in ("written", "read"):
        torch._dynamo.reset()
        engine = backend(cache_dir=str(tmp_path))
        torch.manual_seed(0)
        assert_equal_steps(Words(), engine, *(text(3, length) for length in lengths))
        assert [graph.cache for graph in engine.compile_log.graphs] == [expected] * 2


def test_dynamic_sizes_are_verified() -> None:
    engine = backend(verify_first_step=True)
    assert_equal_steps(Words(), engine, *(text(3, length) for length in (5, 8, 13)))
    assert len(engine.compile_log.graphs) == 2


def test_conditions() -> None:
    length, width = ("size", 0, 1), ["size", 1, 0]
    even = ("equal", ("remainder", length, 2), 0)
    assert hold([even, ("below", width, ("multiply", length, 2))], [(3, 4), (7,)])
    assert not hold([even], [(3, 5)])
    assert not hold([("all", even, ("at least", ("quotient", length, 3), 2))], [(3, 4)])
    assert hold([("not", ("any", ("above", length, 9), ("unequal", ("largest", length, 6), 6)))], [(0, 4)])


def test_the_option_is_checked() -> None:
    with pytest.raises(OptionsError, match="dynamic='sometimes'"):
        ORTOptions.from_mapping({"dynamic": "sometimes"})


def _indexed(layer: nn.Linear, x: Tensor, index: Tensor) -> Tensor:
    return layer(x)[index].relu()


def _divided_by_a_size(layer: nn.Linear, x: Tensor, index: Tensor) -> Tensor:
    hidden = layer(x)
    return hidden.masked_fill(torch.arange(hidden.shape[0])[:, None] >= index.max(), 0.0) / hidden.shape[0]


def _summed_by_index(layer: nn.Linear, x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(index.shape[0] + 1, 6).index_add(0, index, layer(x)[: index.shape[0]])


def _padded(layer: nn.Linear, x: Tensor, index: Tensor) -> Tensor:
    return functional.pad(layer(x), (0, 0, 0, index.shape[0]))[index]


@pytest.mark.parametrize("operation", [_indexed, _divided_by_a_size, _summed_by_index, _padded])
@pytest.mark.sampled(2)
def test_a_split_step_whose_backward_needs_a_changing_size_needs_two_graphs(operation: Any) -> None:
    layer, engine = nn.Linear(6, 6), backend()

    def step(x: Tensor, index: Tensor) -> Tensor:
        hidden = operation(layer, x, index)
        torch._dynamo.graph_break()
        return hidden.square().mean()

    compiled = torch.compile(step, backend=engine)
    for size in (8, 10, 12, 14):
        x, index = torch.randn(size, 6), torch.randint(size // 2, (size // 2 + 1,))
        found = []
        for call in (step, compiled):
            layer.zero_grad()
            call(x, index).backward()
            found.append(gradients(layer))
        torch.testing.assert_close(found[1], found[0])
    assert len(engine.compile_log.graphs) == 4, "two for each side of the break"


OF_SIZES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ignored labels": lambda x, y: functional.cross_entropy(x, y.clamp(0, x.size(1)), ignore_index=x.size(1)),
    "each ignored label": lambda x, y: functional.nll_loss(
        x.log_softmax(1), y, ignore_index=x.size(1) - 1, reduction="none"
    ),
    "a bound": lambda x, y: x.clamp(max=x.size(1)) * y.clamp(0, x.size(1) - 3).unsqueeze(1),
    "a choice": lambda x, y: torch.where(x > x.size(0), x.size(1), x),
    "huber": lambda x, y: functional.huber_loss(x, x.detach() * 2, delta=x.size(1) / 30),
    "smooth": lambda x, y: functional.smooth_l1_loss(x * 30, x.detach(), beta=x.size(1)),
}


@pytest.mark.parametrize("name", OF_SIZES)
def test_settings_that_are_sizes(name: str) -> None:
    """As the heads of transformers' models for questions and answers ignore labels behind the text."""
    engine = backend()
    compiled, step = torch.compile(OF_SIZES[name], backend=engine), OF_SIZES[name]
    for length in (20, 24, 28, 32):
        x, y = torch.randn(4, length, requires_grad=True), torch.randint(length + 1, (4,)).clamp(max=length - 1)
        actual, expected = compiled(x, y), step(x, y)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual.sum(), x), torch.autograd.grad(expected.sum(), x))
    assert len(engine.compile_log.graphs) == 2 or name in ("huber", "smooth")


MASKED: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "a masked assignment": lambda layer, x: _assigned(x * 2, x[:, 0] > 0, layer(x[x[:, 0] > 0])),
    "pairs of neighbours": lambda layer, x: _summed(layer(x), *(torch.cdist(x, x) < 3).nonzero().t().contiguous()),
    "rows of a mask": lambda layer, x: layer(x.t().contiguous()[:, x[:, 1] > 0].t()),
}


def _assigned(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    x[mask] = rows.tanh()
    return x


def _summed(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return x + torch.zeros_like(x).index_add(0, first, (x[first] - x[second]).tanh())


@pytest.mark.parametrize("name", MASKED)
def test_counts_of_masks_need_few_graphs(name: str) -> None:
    """Behind the graph break at a mask, where tensors have as many rows as it selects, and transposed ones strides."""
    torch.compiler.reset()
    layer, engine, step = nn.Linear(8, 8), backend(fallback="warn"), MASKED[name]
    compiled = torch.compile(step, backend=engine)
    for _ in range(8):
        x = torch.randn(24, 8)
        layer.zero_grad()
        expected = step(layer, x)
        expected.square().mean().backward()
        reference = gradients(layer)
        layer.zero_grad()
        actual = compiled(layer, x)
        actual.square().mean().backward()
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradients(layer), reference)
    assert len(engine.compile_log.graphs) <= 5


@pytest.mark.parametrize("name", ["a matrix", "rows of three", "reversed"])
def test_dense_inputs_in_another_order_of_memory(name: str) -> None:
    makes = {
        "a matrix": lambda n: torch.randn(n, 8).t(),
        "rows of three": lambda n: torch.randn(3, n, 8).permute(2, 0, 1),
        "reversed": lambda n: torch.randn(n, 8, 6).permute(2, 1, 0),
    }
    engine = backend()

    def step(x: Tensor) -> Tensor:
        return (x * 2).sum(0).square().sum() + x.softmax(0).square().sum() + x.reshape(-1).cumsum(0).mean()

    compiled = torch.compile(step, backend=engine)
    for length in (9, 12, 16, 9, 30):
        x = makes[name](length).requires_grad_()
        actual, expected = compiled(x), step(x)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual, x), torch.autograd.grad(expected, x))
    assert len(engine.compile_log.graphs) == 2


def test_other_sizes_of_a_graph_whose_gradient_is_differentiated_are_not_compiled() -> None:
    engine, layer = backend(fallback="warn"), nn.Linear(4, 1)
    compiled = torch.compile(lambda x: layer(x).tanh().sum(), backend=engine)
    for length in (3, 4, 5, 6, 7):
        x = torch.randn(length, 4, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (gradient,) = torch.autograd.grad(compiled(x), x, create_graph=True)
            gradient.square().sum().backward()
    assert len(engine.compile_log.graphs) <= 4
