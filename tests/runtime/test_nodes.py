"""Torch operators as nodes of a session: errors reach the caller, memory is freed, threads don't interfere."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_ort import ORTBackend, ORTOptions
from lit_ort.errors import SessionError
from lit_ort.runtime.argument_codec import SLOT
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.nodes import RunState, bind
from lit_ort.runtime.program import AS_IS, LargeResult, Statement, TorchNode
from tests.compare import backend, compiled


def test_an_error_reaches_the_caller_and_the_next_run_works() -> None:
    table = torch.randn(5, 3)
    step = compiled(lambda index: F.embedding(index, table).square())
    for _ in range(3):
        with pytest.raises(SessionError, match=r"failed: index 7 is out of range: it selects from 5, ") as caught:
            step(torch.tensor([1, 7]))
        assert isinstance(caught.value.__cause__, IndexError)
    torch.testing.assert_close(step(torch.tensor([1, 2])), table[1:3].square())


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
        self.head = nn.Linear(4, 3)

    def forward(self, index: Tensor) -> Tensor:
        hidden = self.words(index)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def test_an_error_names_the_operator_and_the_module() -> None:
    model = Classifier()
    with pytest.raises(SessionError, match=r"^lit_ort.region in words failed: index -100 is out of range"):
        compiled(lambda index: model(index).square())(torch.tensor([1, -100]))


def test_an_error_caused_by_the_data_has_eagers_type_and_names_the_location() -> None:
    model, engine = Classifier(), ORTBackend(ORTOptions())
    step = torch.compile(lambda index: model(index).square(), backend=engine)
    with pytest.raises(IndexError, match=r"^lit_ort.region in words failed: index -100 is out of range"):
        step(torch.tensor([1, -100]))
    assert step(torch.tensor([1, 2])).shape == (2, 3)
    assert [graph.fallback for graph in engine.compile_log.graphs] == [None]


LOSSES = {
    "cross entropy": lambda scores, labels: F.cross_entropy(scores, labels),
    "sum": lambda scores, labels: F.cross_entropy(scores, labels, reduction="sum"),
    "each row": lambda scores, labels: F.cross_entropy(scores, labels, reduction="none").mean(),
    "smoothed": lambda scores, labels: F.cross_entropy(scores, labels, label_smoothing=0.1),
    "weighted": lambda scores, labels: F.cross_entropy(scores, labels, weight=torch.ones(3)),
    "images": lambda scores, labels: F.cross_entropy(scores.T[None, :, :, None], labels[None, :, None]),
    "sequences": lambda scores, labels: F.cross_entropy(scores.T[None], labels[None]),
    "negative log-likelihood": lambda scores, labels: F.nll_loss(scores.log_softmax(-1), labels),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("label", [7, -3])
@pytest.mark.parametrize("name", LOSSES)
def test_an_invalid_label_is_named(name: str, label: int) -> None:
    model = Classifier()
    step = compiled(lambda index, labels: LOSSES[name](model(index), labels))
    index = torch.tensor([1, 2])
    step(index, torch.tensor([0, 2])).backward()
    with pytest.raises(SessionError, match=rf"(?<!\d){label}(?!\d)"):
        step(index, torch.tensor([0, label]))


@pytest.mark.slow
def test_many_runs_leak_nothing() -> None:
    layer = nn.Sequential(nn.Linear(4, 64), nn.ELU(), nn.Linear(64, 1))
    step = compiled(lambda x: layer(x).mean())
    counts, sizes = [], []
    for k in range(3000):
        loss = step(torch.randn(2, 4))
        if k % 2:
            loss.backward()
        if k % 1000 == 999:
            gc.collect()
            counts.append(sum(type(value) is torch.Tensor for value in gc.get_objects()))
            sizes.append(psutil.Process().memory_info().rss)
    assert counts[2] <= counts[1] + 5
    assert sizes[2] - sizes[1] < 10e6


def test_results_of_several_threads_are_independent() -> None:
    steps = [compiled(lambda x: F.elu(x * 2)), compiled(lambda x: F.elu(x * 3))]
    for step in steps:
        step(torch.ones(64, 64))
    wrong: list[str] = []

    def work(k: int) -> None:
        for j in range(200):
            x = torch.full((64, 64), float(j))
            if not torch.equal(steps[k](x), x * (k + 2)):
                wrong.append(f"thread {k}, run {j}")

    threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_large_result_keeps_its_memory_while_it_is_referenced() -> None:
    step = compiled(lambda x: (F.elu(x), x.t().softmax(0)))
    results = [step(torch.full((200, 300), float(k))) for k in range(5)]
    for k, (first, second) in enumerate(results):
        assert bool((first == k).all())
        torch.testing.assert_close(second.sum(0), torch.ones(200))


LARGE = {
    "gelu": lambda x: F.gelu(x),
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu, permuted": lambda x: F.gelu(x.transpose(0, 2)),
    "softmax": lambda x: x.softmax(-1),
    "softmax, first dimension": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "log_softmax, permuted": lambda x: x.transpose(1, 2).log_softmax(0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", LARGE)
def test_large_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Results are in memory of the pool, with the values and strides of eager's results."""
    x, tangent = torch.randn(3, 700, 512, dtype=dtype), torch.randn(3, 700, 512, dtype=dtype)

    def run(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        result = function(leaf)
        return result.detach(), torch.autograd.grad(result, leaf, tangent.reshape(result.shape))[0]

    def exact_gradient() -> Tensor:
        leaf = x.double().requires_grad_()
        result = LARGE[name](leaf)
        return torch.autograd.grad(result, leaf, tangent.double().reshape(result.shape))[0]

    (result, gradient), (expected, expected_gradient) = run(compiled(LARGE[name])), run(LARGE[name])
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    exact = exact_gradient()
    assert (gradient - exact).norm() <= (expected_gradient - exact).norm() * 1.1 + torch.finfo(dtype).eps * exact.norm()


def test_results_that_depend_on_no_input_are_computed_again() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones(3, 3).tril()
        return (x * mask).square().sum(), mask

    x, engine = torch.randn(3, 3, requires_grad=True), backend()
    function = torch.compile(step, backend=engine)
    for _ in range(2):
        loss, mask = function(x)
        torch.testing.assert_close(loss, step(x)[0])
        assert torch.equal(mask, torch.ones(3, 3).tril())
        mask.zero_()


@pytest.mark.parametrize("parts", [1, 2])
def test_an_operator_that_returns_a_list(parts: int) -> None:
    x = torch.randn(4, 6, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return torch.stack([part.exp() for part in x.cumsum(0).split(6 // parts, 1)]).sum()

    torch.testing.assert_close(compiled(step)(x), step(x))


def test_a_recurrent_layer_of_torch() -> None:
    layer = nn.LSTM(3, 4, batch_first=True)
    with torch._dynamo.config.patch(allow_rnn=True):
        x, engine = torch.randn(2, 5, 3), backend()
        actual = torch.compile(lambda x: layer(x)[0].square().sum(), backend=engine)(x)
    torch.testing.assert_close(actual, layer(x)[0].square().sum())


SLOT_0, SLOT_1 = {SLOT: 0}, {SLOT: 1}
# Targets, arguments, and the shape of the result of two matrices of 4 x 3 and 3 x 5.
INTO_OUTPUTS = {
    "a matmul": ("aten.mm.default", (SLOT_0, SLOT_1), (4, 5)),
    "slices": ("lit_ort.add_slices.default", (None, [SLOT_0], [6, 3], [0], [1], [5], [1]), (6, 3)),
}


@pytest.mark.parametrize("name", INTO_OUTPUTS)
@pytest.mark.parametrize("is_shape_known", [True, False])
def test_kernels_of_the_project_compute_in_the_memory_of_outputs(name: str, is_shape_known: bool) -> None:
    target, args, shape = INTO_OUTPUTS[name]
    known = (LargeResult(0, shape, torch.float32),) if is_shape_known else ()
    node = TorchNode((AS_IS, AS_IS), (Statement(target, args, {}, large=known),), (2,), (AS_IS,))
    x, y = torch.randn(4, 3), torch.randn(3, 5)
    output = torch.full(shape, torch.nan)
    asked = []

    def memory(*request: Any) -> Tensor:
        asked.append(request)
        return output

    (result,) = bind(node, {})(RunState(BufferPool(), outputs=memory), x, y)
    (expected,) = bind(node, {})(RunState(BufferPool()), x, y)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert asked == ([(0, shape, torch.float32)] if is_shape_known else [])
    assert (result.data_ptr() == output.data_ptr()) == is_shape_known
