"""Graphs on a device other than the CPU, whose memory ONNX Runtime passes on without reading it.

Without a GPU, the tests treat the CPU as such a device: lowering and engine don't see it as the CPU, so that all nodes
are torch's and no memory is ONNX Runtime's own.
"""

from __future__ import annotations

import copy
import importlib
import warnings

import pytest
import torch
from lightning import Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lit_ort import ORTStrategy
from lit_ort._compat.devices import CPU, device_of, generator_of
from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.errors import CompileError, LitOrtWarning, UnsupportedError
from lit_ort.options import AUTO, STOCK
from lit_ort.runtime.engines.choice import engine_of
from tests.compare import assert_same_step, backend, compiled, relative_error
from tests.lightning_models import Net
from tests.zoo import text_models
from tests.zoo.run import compare_steps

MODULES_WITH_IS_CPU = (
    "lit_ort.backend.forward_stages",
    "lit_ort.backend.graph_report",
    "lit_ort.lower.lower",
    "lit_ort.lower.torch_nodes",
    "lit_ort.passes.pass_pipeline",
    "lit_ort.runtime.nodes",
    "lit_ort.runtime.engines.stock.torch_allocator",
    "lit_ort.runtime.engines.stock.torch_node_operator",
)
needs_stock = pytest.mark.skipif(engine_of(AUTO).name != STOCK, reason="the training build runs on the CPU only")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture
def other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES_WITH_IS_CPU:
        monkeypatch.setattr(importlib.import_module(name), "is_cpu", lambda device: False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.query, self.out = nn.Linear(16, 48), nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.query(self.norm(x)).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.cross_entropy(self.out(x).flatten(0, 1), tokens.flatten())


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


@needs_stock
@pytest.mark.usefixtures("other_device")
def test_losses_and_gradients_are_those_of_eager() -> None:
    tokens = torch.randint(11, (3, 7))
    engine = assert_same_step(Block(), loss_of, tokens)
    (graph,) = engine.compile_log.graphs
    assert graph.kind == "fused"
    # Only torch nodes: kernels of ONNX Runtime can't read the memory of another device.
    assert set(graph.operators_after) == {"ATen"}
    assert not [name for name in graph.torch_operators if name.startswith("lit_ort.")]


@needs_stock
@pytest.mark.usefixtures("other_device", "one_thread")
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_models(name: str) -> None:
    outcome = compare_steps(text_models.CASES[name])
    assert [graph.kind for graph in outcome.graphs] == ["fused"]
    assert outcome.worst[0] <= text_models.CASES[name].tolerance


@needs_stock
@pytest.mark.usefixtures("other_device")
def test_inputs_views_and_equal_results_are_returned() -> None:
    def step(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y.t(), y[1:], y > 1, mask.logical_not(), y.sum()

    x, mask = torch.randn(4, 4), torch.randn(4) > 0
    for actual, expected in zip(compiled(step)(x, mask), step(x, mask), strict=True):
        torch.testing.assert_close(actual, expected)


@needs_stock
@pytest.mark.usefixtures("other_device")
def test_dropout_repeats_with_the_seed_and_the_gradient_uses_the_same_mask() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    step = compiled(lambda x: functional.dropout(x, 0.5).sum())
    losses, gradients = [], []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loss = step(x)
        (gradient,) = torch.autograd.grad(loss, x)
        losses.append(float(loss.detach()))
        gradients.append(gradient)
        assert float(gradient.sum()) == losses[-1]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(gradients[0], gradients[1])


@needs_stock
@pytest.mark.usefixtures("other_device")
def test_recurrent_layers_are_rejected() -> None:
    lstm = nn.LSTM(4, 4)
    engine = backend()
    with (
        dynamo_settings("step", strict=False),
        pytest.raises(CompileError, match="recurrent layers on cpu are not supported yet"),
    ):
        torch.compile(lambda x: lstm(x)[0].sum(), backend=engine)(torch.randn(3, 2, 4))


def test_the_device_of_a_graph() -> None:
    scalar, meta_tensor = torch.zeros(()), torch.zeros(2, device="meta")
    assert device_of([scalar]) == device_of([]) == CPU
    assert device_of([scalar, meta_tensor]).type == "meta"
    assert generator_of(CPU) is torch.default_generator


def test_a_device_without_an_engine_is_rejected() -> None:
    with pytest.raises(UnsupportedError, match="the Trainer's device is meta"):
        ORTStrategy().parallel_devices = [torch.device("meta")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_lightning_raises() -> None:
    with pytest.raises(MisconfigurationException, match="can not run on your system"):
        Trainer(strategy="ort", accelerator="cuda", logger=False)


@needs_stock
def test_optimizer_in_graph_is_rejected_on_a_gpu() -> None:
    strategy = ORTStrategy(optimizer_in_graph=True)
    with pytest.raises(UnsupportedError, match="it supports only the CPU"):
        strategy.parallel_devices = [torch.device("cuda", 0)]


@needs_stock
def test_a_gpu_warns_that_it_is_not_faster() -> None:
    strategy = ORTStrategy()
    with pytest.warns(LitOrtWarning, match="is not faster than eager"):
        strategy.parallel_devices = [torch.device("cuda", 0)]
    assert strategy.root_device == torch.device("cuda", 0)


@pytest.mark.gpu
@needs_gpu
@needs_stock
def test_a_step_on_a_gpu() -> None:
    module = Block().cuda()
    tokens = torch.randint(11, (3, 7), device="cuda")
    assert_same_step(module, loss_of, tokens, tolerance=1e-4)


@pytest.mark.gpu
@needs_gpu
@needs_stock
def test_autocast_on_a_gpu() -> None:
    module, tokens = Block().cuda(), torch.randint(11, (3, 7), device="cuda")
    twin, engine = copy.deepcopy(module), backend(precision="bf16-mixed")
    with torch.autocast("cuda", torch.bfloat16):
        actual, expected = torch.compile(module, backend=engine)(tokens), twin(tokens)
    actual.backward()
    expected.backward()
    assert relative_error(actual.detach(), expected.detach()) < 1e-2


@pytest.mark.gpu
@needs_gpu
@needs_stock
def test_a_trainer_on_a_gpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LitOrtWarning)
        strategy = ORTStrategy(fallback="error")
        trainer = Trainer(strategy=strategy, accelerator="gpu", devices=1, max_steps=3, logger=False)
        data = DataLoader(TensorDataset(torch.randn(32, 6), torch.randint(4, (32,))), batch_size=8)
        trainer.fit(Net(), data, data)
    assert {graph.kind for graph in strategy.compile_log.graphs} == {"fused"}
