"""Activation checkpoints and recomputed layers: gradients as in eager, checkpoints of the module, peak memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lit_ort
from lit_ort.backend import build
from lit_ort.backend.backend import ORTBackend
from lit_ort.errors import CompileError, LitOrtWarning, OptionsError
from lit_ort.options import ORTOptions
from tests.compare import TOLERANCE, assert_same_step, backend, gradients, relative_error
from tests.hf_models import CASES

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


class Blocks(nn.Module):
    """Four blocks, each called by `call`."""

    def __init__(self, call: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def nested(block: Any, x: Tensor) -> Tensor:
    """A checkpoint inside another one that has two results."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpointed(block.inside, x), x * 2

    first, second = checkpoint(both, x, use_reentrant=False)
    return first + second / 2


def step(module: Any, x: Tensor) -> Tensor:
    return module(x)


def assert_same_gradients(module: nn.Module, twin: nn.Module) -> None:
    actual, expected = gradients(module), gradients(twin)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_error(actual[name], gradient) <= TOLERANCE, name


# The names of operators in the captured forward and in the graph that runs.
WATCHED = {"aten.tanh.default": "aten.tanh.default", "aten.layer_norm.default": "aten.native_layer_norm.default"}


def copied_nodes(engine: ORTBackend) -> int:
    """The number of watched operators that are computed again."""
    (report,) = engine.compile_log.graphs
    after = report.torch_operators
    return sum(after.get(name_after, 0) - report.operators_before.get(name, 0) for name, name_after in WATCHED.items())


@pytest.mark.parametrize("call", [checkpointed, reentrant, nested])
def test_checkpoints_of_a_module_are_recomputed(call: Any) -> None:
    x = torch.randn(8, 16, requires_grad=True)
    engine = assert_same_step(Blocks(call), step, x, disable_passes=("regions",))
    assert copied_nodes(engine) >= 4


def test_without_a_checkpoint_nothing_is_computed_twice() -> None:
    assert copied_nodes(assert_same_step(Blocks(plain), step, torch.randn(8, 16), disable_passes=("regions",))) == 0


def test_recomputed_layers_have_the_same_gradients() -> None:
    """Dropout masks are drawn from the same seeds with and without recomputation."""
    module, x = Blocks(plain, dropout=0.5), torch.randn(8, 16)
    twin = copy.deepcopy(module)
    losses = []
    for model, options in ((module, {"recompute": "layers"}), (twin, {})):
        torch.manual_seed(1)
        engine = backend(**options, disable_passes=("regions",))
        losses.append(torch.compile(step, backend=engine)(model, x))
        losses[-1].backward()
        assert bool(copied_nodes(engine)) == bool(options)
        torch.compiler.reset()
    assert relative_error(losses[0].detach(), losses[1].detach()) <= TOLERANCE
    assert_same_gradients(module, twin)


# transformers renames this method in 6.0.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("gpt2", "model"),
        *(pytest.param(name, "option", marks=pytest.mark.sweep) for name in ("gpt2", "bert_pretrain")),
        pytest.param("bert_pretrain", "model", marks=pytest.mark.sweep),
    ],
)
def test_transformers(name: str, source: str) -> None:
    make, make_batch = CASES[name]
    module = make(dropout=0.1)
    batch = make_batch(module)
    if source == "model":
        module.model.gradient_checkpointing_enable()
    module.model.train()
    engine = backend(
        verify_first_step=True,
        recompute="layers" if source == "option" else None,
        disable_passes=("regions",),
    )

    def training_step(module: Any, batch: dict[str, Tensor]) -> Tensor:
        loss = module.loss(batch)
        return loss if isinstance(loss, Tensor) else loss[0]

    torch.compile(training_step, backend=engine)(module, batch).backward()
    assert copied_nodes(engine) >= 2


def test_the_planned_memory_is_smaller() -> None:
    peaks = []
    for options in ({}, {"recompute": "layers"}):
        own = ORTOptions.from_mapping({**options, "disable_passes": ("regions",)})
        plan = lit_ort.plan_memory(Blocks(plain), torch.randn(512, 16), options=own)
        peaks.append(plan.report.peak_bytes)
        torch.compiler.reset()
    assert peaks[1] < 0.7 * peaks[0]


def test_bf16() -> None:
    module, x = Blocks(plain), torch.randn(512, 16)
    twin = copy.deepcopy(module)
    step_16 = torch.compile(step, backend=backend(precision="bf16-mixed"))
    step_16(twin, x).backward()
    torch.compiler.reset()
    engine = backend(precision="bf16-mixed", recompute="layers", verify_first_step=True, disable_passes=("regions",))
    torch.compile(step, backend=engine)(module, x).backward()
    assert copied_nodes(engine) > 0
    assert_same_gradients(module, twin)


def test_a_split_graph_recomputes_in_its_backward() -> None:
    def two_losses(module: Blocks, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for block in module.blocks:
            y = block(y)
        return y.square().mean(), y.mean()

    module, x = Blocks(plain), torch.randn(8, 16)
    twin = copy.deepcopy(module)
    first, second = two_losses(twin, x)
    (first + second).backward()
    engine = backend(recompute="layers")
    first, second = torch.compile(two_losses, backend=engine)(module, x)
    (first + second).backward()
    assert "split" in [report.kind for report in engine.compile_log.graphs]
    assert next(p.fired for p in engine.compile_log.graphs[-1].passes if p.name == "recompute") > 0
    assert_same_gradients(module, twin)


def contexts() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def selective(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def selective_nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: selective(block, x), x, use_reentrant=False)


@pytest.mark.parametrize("call", [selective, selective_nested])
def test_selective_checkpoints_have_the_same_results(call: Any) -> None:
    assert_same_step(Blocks(call), step, torch.randn(8, 16))


def test_a_module_without_layers_is_declined() -> None:
    engine = backend(recompute="layers")
    torch.compile(step, backend=engine)(nn.Linear(16, 4), torch.randn(8, 16)).sum().backward()
    (report,) = engine.compile_log.graphs
    (reason,) = next(p.declined for p in report.passes if p.name == "recompute")
    assert "no operator belongs to a module in a list" in reason


def test_an_unknown_value_raises() -> None:
    with pytest.raises(OptionsError, match="must be None, 'layers'"):
        ORTOptions.from_mapping({"recompute": "all"})


def test_the_cache_distinguishes_recompute(tmp_path: Path) -> None:
    outcomes = []
    for options in ({}, {"recompute": "layers"}, {"recompute": "layers"}):
        engine = backend(cache_dir=str(tmp_path), disable_passes=("regions",), **options)
        torch.compile(step, backend=engine)(Blocks(plain), torch.randn(8, 16)).backward()
        outcomes.append((engine.compile_log.graphs[0].cache, copied_nodes(engine) > 0))
        torch.compiler.reset()
    assert outcomes == [("written", False), ("written", True), ("read", True)]


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of rows": lambda x: F.dropout1d(x[None], 0.5)[0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "noise": lambda x: x + torch.randn_like(x),
    "a mask": lambda x: x * (torch.rand(6) > 0.5),
    "rows": lambda x: x * x[torch.randint(4, (4,))],
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("nested", [True, pytest.param(False, marks=pytest.mark.sweep)], ids=["nested", "one"])
@pytest.mark.parametrize("kind", ["fused", "split", "eager", "recompute"])
@pytest.mark.parametrize("name", DRAWING)
def test_the_recomputation_draws_the_numbers_of_the_forward(
    name: str, kind: str, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is the slope of what the forward computes with these numbers."""
    layer = nn.Linear(6, 6, dtype=torch.float64)

    def inner(x: Tensor) -> Tensor:
        return DRAWING[name](layer(x)).tanh()

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, x * 2, use_reentrant=False) if nested else inner(x * 2)

    def step(x: Tensor) -> Tensor:
        result = checkpoint(outer, x, use_reentrant=False)
        return result if kind == "split" else result.square().sum()

    if kind == "eager":

        def refuse(*_: object) -> None:
            raise CompileError("as a test", remedy="none")

        monkeypatch.setattr(build, "capture_forward", refuse)
    options = {"fallback": "warn" if kind == "eager" else "error", "recompute": 0.5 if kind == "recompute" else None}
    compiled = torch.compile(step, backend=backend(**options))

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        result = compiled(x)
        return result.square().sum() if kind == "split" else result

    x, direction = torch.linspace(-1, 1, 24).view(4, 6).double(), torch.randn(4, 6, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LitOrtWarning)
        (gradient,) = torch.autograd.grad(loss(leaf := x.clone().requires_grad_()), leaf)
        ends = [loss((x + sign * 1e-6 * direction).requires_grad_()).detach() for sign in (1, -1)]
    torch.testing.assert_close((gradient * direction).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-4, atol=1e-4)
