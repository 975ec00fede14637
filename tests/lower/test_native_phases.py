"""Phases whose sessions call no Python: what they compute, and when a phase is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_ort import SessionError
from lit_ort.backend.backend import ORTBackend
from lit_ort.lower import native_operators
from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from lit_ort.passes import fuse_regions
from lit_ort.runtime.engines.native_sessions import NativeEngine, NativeSession
from tests.compare import assert_same_step, backend, mostly, relative_error
from tests.passes.reports import report_of


@pytest.fixture(autouse=True)
def any_number_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_operators, "FEWEST_OPERATORS", 0)
    monkeypatch.setattr(native_operators, "OPERATORS_OF_SWITCH", 0)


pytestmark = pytest.mark.usefixtures("uses_openmp")


def assert_native(engine: ORTBackend) -> None:
    for graph in engine.compile_log.graphs:
        assert graph.is_native, str(graph)
        assert not graph.torch_operators
        assert "no call of Python" in str(graph)


def assert_same(function: Callable[..., Any], *inputs: Tensor, tolerance: float = 1e-5) -> ORTBackend:
    """Results and gradients of a function agree with eager; results have eager's strides."""
    engine, found, strides = backend(), [], []
    for call in (function, torch.compile(function, backend=engine)):
        given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        result = call(*given)
        results = result if isinstance(result, tuple) else (result,)
        wanted = [x for x in given if x.requires_grad]
        tracked = [r.square().sum() for r in results if r.requires_grad]
        gradients = torch.autograd.grad(torch.stack(tracked).sum(), wanted) if tracked else ()
        strides.append([r.stride() for r in results])
        found.append([*results, *gradients])
    assert strides[0] == strides[1]
    for actual, expected in zip(*reversed(found), strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        if expected.is_floating_point():
            assert relative_error(actual.detach(), expected.detach()) <= tolerance
        else:
            assert torch.equal(actual, expected)
    return engine


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


MATMULS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "mm": (lambda a, b: a @ b, ((5, 3), (3, 4))),
    "mm of transposed factors": (lambda a, b: a.t() @ b.t(), ((3, 5), (4, 3))),
    "addmm of a vector": (torch.addmm, ((4,), (5, 3), (3, 4))),
    "addmm of a matrix": (torch.addmm, ((5, 4), (5, 3), (3, 4))),
    "addmm of a number": (torch.addmm, ((1, 1), (5, 3), (3, 4))),
    "addmm of a column": (torch.addmm, ((5, 1), (5, 3), (3, 4))),
    "bmm": (torch.bmm, ((2, 5, 3), (2, 3, 4))),
    "bmm of transposed factors": (lambda a, b: a.mT @ b.mT, ((2, 3, 5), (2, 4, 3))),
    "bmm of factors with exchanged batches": (
        lambda a, b: a.permute(1, 0, 2) @ b.permute(1, 2, 0),
        ((5, 2, 3), (4, 2, 3)),
    ),
    "baddbmm": (torch.baddbmm, ((2, 1, 4), (2, 5, 3), (2, 3, 4))),
    "a slice as factor": (lambda a, b: a[:, 1:4] @ b[::2], ((5, 6), (6, 4))),
    "a slice from the end": (lambda a, b: a[:, -3:] @ b[-5:-2], ((5, 6), (6, 4))),
    "a row as factor": (lambda a, b: a[:, -1] @ b[0], ((5, 2, 3), (2, 3, 4))),
    "an expanded factor": (lambda a, b: a.expand(2, 5, 3) @ b, ((5, 3), (2, 3, 4))),
    "a reshaped factor": (lambda a, b: a.reshape(10, 3) @ b.flatten(1).t(), ((2, 5, 3), (4, 3, 1))),
    "a factor of heads": (
        lambda a, b: a.view(2, 5, 2, 3).transpose(1, 2) @ b.view(2, 5, 2, 3).permute(0, 2, 3, 1),
        ((2, 5, 6), (2, 5, 6)),
    ),
    "a linear layer of three dimensions": (F.linear, ((2, 5, 3), (4, 3), (4,))),
    "one row": (lambda a, b: a @ b, ((1, 3), (3, 1))),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", mostly(pytest.mark.sweep, [torch.float32, torch.float64], 2), ids=str)
@pytest.mark.parametrize("name", MATMULS)
def test_matmuls(name: str, dtype: torch.dtype) -> None:
    function, shapes = MATMULS[name]
    inputs = [draw(*shape, dtype=dtype) for shape in shapes]
    assert_same(lambda *tensors: (function(*tensors).exp(), function(*tensors) * 2), *inputs)
    forward = torch.compile(lambda *tensors: function(*tensors).exp(), backend=(engine := backend()))
    forward(*(x.detach() for x in inputs))
    assert_native(engine)


def test_matmuls_of_float16_are_torchs() -> None:
    x = torch.randn(4, 4).half()
    engine = backend()
    torch.compile(lambda x: (x @ x).exp() @ x, backend=engine)(x)
    (graph,) = engine.compile_log.graphs
    assert not graph.is_native
    assert "aten.mm.default" in graph.torch_operators


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MATMULS)
def test_matmuls_of_bfloat16(name: str) -> None:
    """On the threads of OpenMP they are native, and results that float32 reads are not rounded; others are torch's."""
    function, shapes = MATMULS[name]
    inputs = [draw(*shape).bfloat16().detach().requires_grad_() for shape in shapes]
    assert_same(lambda *tensors: function(*tensors).exp(), *inputs, tolerance=0.03)
    if has_bfloat16_matmuls():
        with torch.no_grad():
            exact = torch.compile(lambda *tensors: function(*tensors).float(), backend=(engine := backend()))
            assert relative_error(exact(*inputs), function(*(x.float() for x in inputs))) <= 1e-6
        assert_native(engine)


RESULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an input": lambda x, y: (x, x @ y),
    "an input twice": lambda x, y: (x @ y, x.view(-1), x),
    "one result twice": lambda x, y: ((x @ y).exp(),) * 2,
    "views of a result": lambda x, y: ((x @ y).exp().view(2, 8), (x @ y).t()),
    "a part of a result": lambda x, y: (x @ y)[1:3, 1],
    "a transposed result": lambda x, y: (x @ y).exp().t(),
    "a result with a new dimension": lambda x, y: (x @ y)[:, None],
    "booleans": lambda x, y: (x @ y > 0, ((x @ y) > x).any()),
    "integers": lambda x, y: ((x @ y).argmax(1), (x @ y).long()),
    "a number": lambda x, y: (x @ y).sum(),
    "a constant": lambda x, y: (x @ y + torch.arange(4.0), torch.ones(2, 3)),
    "large results": lambda x, y: (x @ y).repeat(300, 300).sigmoid(),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    assert_same(RESULTS[name], draw(4, 4), draw(4, 4), tolerance=1e-4)


def mlp(**settings: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16, **settings), nn.GELU(), nn.LayerNorm(16, **settings), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def loss(module: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(module(x), labels)


def test_a_fused_step(uses_openmp: bool) -> None:
    module, labels = mlp().eval(), torch.tensor([0, 2, 1, 1])
    engine = assert_same_step(module, loss, torch.randn(4, 6), labels)
    assert_native(engine)
    (graph,) = engine.compile_log.graphs
    assert graph.kind == "fused"
    assert set(graph.operators_after) == {"Region", "Matmul" if uses_openmp else "Gemm"}
    assert sum(graph.regions.values()) == graph.operators_after["Region"]


def test_a_split_step() -> None:
    module, engine = mlp().eval(), backend()
    hidden = torch.compile(lambda x: module(x), backend=engine)(x := torch.randn(4, 6))
    hidden.square().sum().backward()
    found = [p.grad for p in module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    for actual, gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, gradient)
    assert_native(engine)


def test_dropout_draws_as_in_torch_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, labels = mlp().train(), torch.randn(4, 6), torch.tensor([0, 2, 1, 1])
    found = []
    for fewest in (0, 1000):
        monkeypatch.setattr(native_operators, "FEWEST_OPERATORS", fewest)
        torch.compiler.reset()
        compiled = torch.compile(loss, backend=backend())
        torch.manual_seed(3)
        found.append(torch.stack([compiled(module, x, labels) for _ in range(5)]))
    torch.testing.assert_close(*found)
    assert len(found[0].unique()) == 5


def test_any_sizes_in_one_graph() -> None:
    module, engine = mlp().eval(), backend()
    compiled = torch.compile(loss, backend=engine, dynamic=True)
    for size in (5, 9, 2, 5, 700, 33):
        x, labels = torch.randn(size, 6), torch.randint(3, (size,))
        found = []
        for call in (loss, compiled):
            module.zero_grad()
            call(module, x, labels).backward()
            found.append([p.grad for p in module.parameters()])
        torch.testing.assert_close(found[1], found[0])
    assert engine.count == 1
    assert_native(engine)


# Functions of x, y: float[4, 4], with an operator that only torch has.
MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "two results": lambda x, y: (x @ y).sort()[0] @ y + (x @ y).sort()[1],
    "a view of a result": lambda x, y: x.cumsum(1).t()[1:3] @ y.exp(),
    "a diagonal": lambda x, y: x.cumsum(1).diagonal().cumsum(0).exp() @ y,
    "a returned view": lambda x, y: ((x @ y).cumsum(0)[1:], (x @ y).exp()),
    "booleans": lambda x, y: torch.isin((x * 2).long(), torch.arange(2)).exp() * (x @ y),
    "returned booleans": lambda x, y: (torch.isin((x @ y).long(), torch.arange(2)), (x @ y).exp()),
    "integers": lambda x, y: (x @ y)[(x @ y).argsort(1)[:, 0]].exp(),
    "a write": lambda x, y: (x @ y).exp().index_put((torch.tensor([0, 2]),), y[:2]) @ y,
    "a column": lambda x, y: torch.select_scatter((x @ y).exp(), y[0] @ y, 1, 2) @ x,
    "an assertion": lambda x, y: F.one_hot((x @ y).gt(0).long(), 2).float().flatten(1) @ (y @ x).exp().repeat(2, 1),
    "nothing else": lambda x, y: (x.cumsum(0).cumsum(1) @ y).cumsum(0),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MIXED)
def test_other_operators_are_in_torch_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = assert_same(MIXED[name], draw(4, 4), draw(4, 4))
    (graph,) = engine.compile_log.graphs
    assert not graph.is_native
    assert graph.torch_operators
    assert not any(target.startswith(("aten.mm", "lit_ort.region")) for target in graph.torch_operators)


def test_a_view_that_onnx_has_no_form_for_is_read_in_its_memory() -> None:
    """ONNX Runtime's values are contiguous, and a diagonal of any size is no region's view."""
    engine = backend()
    function = lambda x, y: x.cumsum(1).diagonal().exp() @ y  # noqa: E731
    compiled = torch.compile(function, backend=engine, dynamic=True)
    for size in (4, 7):
        x, y = torch.randn(size, size), torch.randn(size, 3)
        torch.testing.assert_close(compiled(x, y), function(x, y))
    assert any(target.startswith("lit_ort.region") for target in engine.compile_log.graphs[0].torch_operators)


def test_large_operators_of_torch_are_beside_matmuls_on_the_same_threads(
    monkeypatch: pytest.MonkeyPatch, uses_openmp: bool
) -> None:
    monkeypatch.setattr(fuse_regions, "MOST_ELEMENTS", 15)
    engine = assert_same(MIXED["two results"], draw(4, 4), draw(4, 4))
    assert ("aten.mm.default" in engine.compile_log.graphs[0].torch_operators) != uses_openmp


def test_empty_inputs_that_nothing_reads_are_no_obstacle() -> None:
    def function(x: Tensor, empty: Tensor, whole: Tensor) -> Tensor:
        hidden = torch.cat([empty, x], 1)
        for _ in range(5):
            hidden = (hidden @ whole).tanh()
        return hidden.sum()

    engine = assert_same(function, draw(6, 8), torch.randn(6, 0), draw(8, 8))
    assert not engine.compile_log.graphs[0].torch_operators


# Functions of x, y: float[80, 80], which reduce what is not adjacent in memory.
STRIDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a norm": lambda x, y: F.layer_norm(y.t(), (80,)) @ x,
    "a norm and its argument": lambda x, y: F.layer_norm(z := y.t() + x.sum(0), (80,)) @ x + z,
    "a softmax and its argument": lambda x, y: (z := torch.where(x[:, :1] > 0, y.t(), -9.0)).softmax(-1) @ x * z,
    "a softmax of heads": lambda x, y: (y.view(10, 80, 8).permute(2, 0, 1) * 2).softmax(-1).flatten(0, 1) @ x,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STRIDED)
def test_what_is_apart_in_memory_is_reduced_in_regions(name: str, uses_openmp: bool) -> None:
    function = STRIDED[name]
    engine = assert_same(lambda x: function(x, x @ x).exp(), (draw(80, 80) / 9).detach().requires_grad_())
    (graph,) = engine.compile_log.graphs
    assert not graph.torch_operators


def test_what_is_added_to_matmuls_of_any_size() -> None:
    engine = backend()
    function = lambda a, b, x, y: (torch.addmm(a, x, y).exp(), torch.addmm(b, x, y).exp())  # noqa: E731
    compiled = torch.compile(function, backend=engine, dynamic=True)
    for rows in (3, 7, 4, 0):
        given = torch.randn(rows, 5), torch.randn(1, 5), torch.randn(rows, 4), torch.randn(4, 5)
        torch.testing.assert_close(compiled(*given), function(*given))


@pytest.mark.sampled(1)
def test_torch_nodes_write_into_the_memory_of_sessions() -> None:
    large = 400  # above SMALL_BYTES, so that results are computed in place

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = (x @ y).tanh().cumsum(0)
        words = torch.cat([z, z.cumsum(1)]) @ y
        return words.tanh(), F.embedding(torch.arange(3), z.tanh()) @ y

    assert_same(step, draw(large, 8), draw(8, 8))
    # Sums of sums, whose values are large.
    assert_same(step, *((0.1 * draw(large, large)).detach().requires_grad_() for _ in range(2)), tolerance=1e-4)


def test_torch_nodes_draw_as_in_other_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = torch.randn(4, 4), []
    for most in (fuse_regions.MOST_ELEMENTS, 0):
        monkeypatch.setattr(fuse_regions, "MOST_ELEMENTS", most)
        torch.compiler.reset()
        compiled = torch.compile(lambda x: (x @ x).exp() * torch.randn_like(x).sort()[0] @ x, backend=backend())
        torch.manual_seed(5)
        found.append(torch.stack([compiled(x) for _ in range(3)]))
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0][0], found[0][1])


def test_an_error_of_a_torch_node_names_its_operator() -> None:
    engine = backend()
    function = lambda x, k: (x @ x).exp().index_put((k,), x[:2]) @ x  # noqa: E731
    compiled = torch.compile(function, backend=engine)
    x, k = torch.randn(4, 4), torch.tensor([0, 2])
    torch.testing.assert_close(compiled(x, k), function(x, k))
    with pytest.raises(SessionError, match="index_put.* failed: index 9 is out of bounds"):
        compiled(x, k + 9)
    torch.testing.assert_close(compiled(x, k), function(x, k))


@pytest.mark.parametrize("fewest", [0, 10**6], ids=["native", "torch nodes"])
def test_a_failed_assertion_is_eagers(fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_operators, "FEWEST_OPERATORS", fewest)
    function = lambda x, k: (x @ x).exp() @ F.one_hot(k, 4).float()  # noqa: E731
    compiled = torch.compile(function, backend=backend())
    x, k = torch.randn(4, 4), torch.tensor([0, 3, 1, 2])
    torch.testing.assert_close(compiled(x, k), function(x, k))
    for wrong in (k - 1, k + 1):
        errors = list[Exception]()
        for call in (function, compiled):
            with pytest.raises(RuntimeError) as caught:
                call(x, wrong)
            errors.append(caught.value)
        assert type(errors[1]) is type(errors[0])
        # torch's decomposition puts the operator's name before the message.
        assert str(errors[1]).removeprefix("one_hot: ") == str(errors[0])
    torch.testing.assert_close(compiled(x, k), function(x, k))


def test_torch_nodes_of_any_sizes() -> None:
    engine = backend()
    function = lambda x: (x @ x.t()).exp().view(-1).cumsum(0)[1 : x.shape[0]] @ x[1:]  # noqa: E731
    compiled = torch.compile(function, backend=engine, dynamic=True)
    for size in (3, 5, 9, 5):
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(x), function(x))
    assert engine.count == 1


def test_torch_nodes_are_worth_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def layers(x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = (x @ x).tanh()
        return x

    for count, is_worth in ((2, False), (8, True)):
        engine = backend()
        torch.compile(lambda x, count=count: layers(x.cumsum(1), count), backend=engine)(torch.randn(4, 4))
        assert ("aten.mm.default" in engine.compile_log.graphs[0].torch_operators) != is_worth


def test_few_operators_run_without_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    engine = backend()
    torch.compile(lambda x: (x @ x).exp(), backend=engine)(torch.randn(4, 4))
    assert engine.compile_log.graphs[0].is_small


def test_a_result_of_size_0_keeps_torch_nodes() -> None:
    assert not assert_same(lambda x: (x @ x).exp()[:0], draw(4, 4)).compile_log.graphs[0].is_native


def test_inputs_of_other_layouts() -> None:
    engine = backend()
    compiled = torch.compile(lambda x, y: (x @ y).exp(), backend=engine, dynamic=False)
    base, y = torch.randn(8, 8), torch.randn(4, 4)
    for x in (base[:4, :4], base[::2, ::2], base[0, :4].expand(4, 4), base[:4, :4].t()):
        torch.testing.assert_close(compiled(x, y), (x @ y).exp())
    conjugate = torch.randn(4, 4, dtype=torch.complex64).conj().imag
    assert conjugate.is_neg()
    torch.testing.assert_close(compiled(conjugate, y), (conjugate @ y).exp())


@pytest.mark.parametrize(("width", "threads"), [(16, 1), (512, torch.get_num_threads())])
def test_threads_of_small_phases(monkeypatch: pytest.MonkeyPatch, uses_openmp: bool, width: int, threads: int) -> None:
    given = list[int]()
    create = NativeEngine.session

    def session(self: NativeEngine, model: Any, threads: int) -> NativeSession:
        given.append(threads)
        return create(self, model, threads)

    monkeypatch.setattr(NativeEngine, "session", session)
    layer = nn.Linear(width, width)
    assert_native(assert_same_step(layer, lambda layer, x: layer(x).relu().sum(), torch.randn(128, width)))
    # Before it, the order of nodes may have been checked.
    assert given[-1] == (torch.get_num_threads() if uses_openmp else threads)


def test_results_that_nothing_reads_may_be_empty(uses_openmp: bool) -> None:
    """A loss over classes without a bias has an empty gradient of the bias; the phase around it is native."""
    module = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 3000, bias=False))
    x, labels = torch.randn(700, 16), torch.randint(3000, (700,))
    engine = assert_same_step(module, lambda module, x: F.cross_entropy(module(x), labels), x)
    (graph,) = engine.compile_log.graphs
    assert graph.is_native == uses_openmp
    # Sessions on threads of their own have no operators of many elements that torch computes.
    assert ("lit_ort.linear_cross_entropy.default" in graph.torch_operators) != uses_openmp


def test_large_results_of_one_shape_are_not_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ignored rows and as many rows as classes, the kernel allocates the gradients in another order."""
    monkeypatch.setattr(native_operators, "OPERATORS_OF_SWITCH", 0)
    rows, width = 2100, 128
    module = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, rows, bias=False))
    x, labels = torch.randn(rows, width), torch.randint(rows, (rows,))
    labels[::7] = -100
    engine = assert_same_step(module, lambda module, x: F.cross_entropy(module(x), labels), x)
    assert report_of(engine, "linear_cross_entropy").fired == 1


# What follows a convolution whose images have channels last, in memory as in eager.
IMAGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "relu": lambda y, x: y.relu(),
    "a residual": lambda y, x: y.sigmoid() * y + x,
    "a residual of another layout": lambda y, x: y + x.contiguous().exp(),
    "one channel scaled": lambda y, x: y * torch.linspace(1, 2, y.shape[1])[:, None, None],
    "one batch": lambda y, x: y.sum(0, keepdim=True).tanh() * y,
    "rows of channels": lambda y, x: F.layer_norm(y.permute(0, 2, 3, 1), (y.shape[1],)).permute(0, 3, 1, 2) + x,
    "softmax over channels": lambda y, x: y.softmax(1),
    "sums over images": lambda y, x: (y.square().sum((0, 2, 3)), y.mean((2, 3))),
    "patches": lambda y, x: F.gelu(y.flatten(2).transpose(1, 2)),
    "parts of channels": lambda y, x: torch.cat([y.chunk(2, 1)[1].cos(), y.chunk(2, 1)[0]], 1),
    "a corner": lambda y, x: y[:, :, 1:, :-1].exp(),
    "a mask": lambda y, x: (y > 0, torch.where(y > x, y, 0.5)),
    "a copy in the order of dimensions": lambda y, x: y.clone(memory_format=torch.contiguous_format) * 2,
    "a copy with channels last": lambda y, x: x.contiguous().clone(memory_format=torch.channels_last).sin() * y,
    "another convolution": lambda y, x: F.conv2d(y.relu() + 1, torch.ones(4, y.shape[1], 1, 1)).tanh(),
    "a cheap argument of a convolution": lambda y, x: F.conv2d(-y, torch.ones(4, y.shape[1], 3, 3)),
    "a pool": lambda y, x: F.max_pool2d(y.relu(), 2).exp(),
    "all of it and its parts": lambda y, x: (y, y * 2, y.permute(0, 2, 3, 1), (y + 1).permute(0, 2, 3, 1).sum(-1)),
    "a norm": lambda y, x: F.group_norm(y, 2).relu() * y,
    "an image written in place": lambda y, x: (y * 2).add_(x).mul_(0.5),
    "numbers of elements": lambda y, x: y.long().add(1).float() + y,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch nodes"])
@pytest.mark.parametrize("name", mostly(pytest.mark.sweep, IMAGES, 5))
def test_images_with_channels_last(name: str, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_native:
        monkeypatch.setattr(native_operators, "FEWEST_OPERATORS", 10**6)
    torch.manual_seed(3)
    weight = draw(6, 6, 3, 3).detach().to(memory_format=torch.channels_last).requires_grad_()
    image = torch.randn(2, 6, 7, 5).to(memory_format=torch.channels_last).requires_grad_()

    def step(image: Tensor, weight: Tensor) -> Any:
        return IMAGES[name](F.conv2d(image, weight, padding=1), image)

    assert_same(step, image, weight, tolerance=2e-5)


def test_volumes_with_channels_last() -> None:
    weight = draw(4, 3, 3, 3, 3).detach().to(memory_format=torch.channels_last_3d).requires_grad_()
    image = torch.randn(2, 3, 5, 4, 6).to(memory_format=torch.channels_last_3d)
    assert_same(lambda x, w: F.conv3d(x, w).sigmoid() * 2 + 1, image, weight)


COMPLEX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a filter": lambda x, w: torch.fft.irfft(torch.fft.rfft(x @ w) * torch.fft.rfft(w)[:4], n=6).exp(),
    "parts": lambda x, w: torch.fft.fft(x @ w).real * torch.fft.fft(x).imag,
    "a slice": lambda x, w: torch.fft.fft(x @ w)[:, 1:3].abs() * 2,
    "a concatenation": lambda x, w: torch.cat([torch.fft.fft(x @ w), torch.fft.fft(x)]).abs().exp(),
    "a matmul": lambda x, w: (torch.fft.fft(x @ w) @ torch.fft.fft(x).mT).abs(),
    "with real numbers": lambda x, w: (torch.fft.fft(x @ w) * x).abs() @ w,
    "a spectrum": lambda x, w: (
        torch.stft((x @ w).flatten(), 8, 4, window=torch.hann_window(8), return_complex=True).abs().log1p()
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_values_between_torch_nodes(name: str) -> None:
    engine = assert_same(lambda x, w: COMPLEX[name](x, w).square().mean(), draw(4, 6), draw(6, 6))
    (graph,) = engine.compile_log.graphs
    # Matmuls are torch's in sessions that aren't native.
    assert "ATen" in graph.operators_after
    assert graph.operators_after.keys() & {"Matmul", "Gemm", "MatMul", "FusedMatMul"}
