"""`Trainer(strategy="ort")` compared with eager: the same losses, logs and checkpoints; errors for invalid settings."""

from __future__ import annotations

import copy
import importlib
import mmap
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import MagicMock

import psutil
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lit_ort
from lit_ort._compat.lightning import is_compiled
from lit_ort.backend import tracing_settings
from lit_ort.errors import CaptureError, LitOrtWarning, OptionsError, UnsupportedError
from tests.capabilities import NEEDS_AUTOCAST_LSTMS
from tests.compare import REASON
from tests.lightning_models import Branching, Net, assert_same_weights, constant_loader, loader, trainer

pytestmark = pytest.mark.filterwarnings(
    # Lightning's advice about dataloaders and checkpoints.
    "ignore:The '.*dataloader' does not have many workers:UserWarning",
    "ignore:The number of training batches .* is smaller than the logging interval:UserWarning",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended:UserWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint:UserWarning",
)


def fit(
    strategy: Any, make: Callable[[], Net] = Net, folder: Path | None = None, rows: int = 40, **settings: Any
) -> tuple[Any, Net]:
    seed_everything(1, verbose=False)
    module = make()
    runner = trainer(strategy, folder, **settings)
    runner.fit(module, loader(rows), loader(batch=10))
    return runner, module


def dropping() -> Net:
    return Net(dropout=0.5)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clip by norm": {"gradient_clip_val": 0.05},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "no inference mode": {"inference_mode": False},
}


@pytest.mark.parametrize("settings", [pytest.param(s, id=name) for name, s in SETTINGS.items()])
@pytest.mark.sampled(2)
def test_same_curve_and_logs_as_eager(settings: dict[str, Any]) -> None:
    eager, expected = fit("auto", **settings)
    runner, module = fit(lit_ort.ORTStrategy(fallback="error", verify_first_step=True), **settings)
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(expected.losses), rtol=1e-5, atol=1e-6)
    assert_same_weights(module, expected)
    assert runner.callback_metrics.keys() == eager.callback_metrics.keys()
    for name, value in eager.callback_metrics.items():
        torch.testing.assert_close(runner.callback_metrics[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_branches_counters_and_a_shorter_last_batch() -> None:
    settings: dict[str, Any] = {"rows": 44, "max_epochs": 10}
    eager, expected = fit("auto", Branching, **settings)
    runner, module = fit(lit_ort.ORTStrategy(fallback="error"), Branching, **settings)
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(expected.losses), rtol=1e-5, atol=1e-6)
    assert runner.callback_metrics.keys() == eager.callback_metrics.keys()
    graphs = lit_ort.explain(runner).graphs
    training = [graph for graph in graphs if graph.name.startswith("training_step")]
    # One graph for each set of logged values and each batch size, and further graphs for counters of 0 and 1, which
    # Dynamo specializes; but not one for each of the 60 steps.
    assert {graph.kind for graph in training} == {"fused"}
    assert len(training) <= 12
    assert {graph.kind for graph in graphs if graph.name.startswith("validation")} == {"forward"}


@pytest.mark.slow
def test_counters_do_not_cause_a_recompile_at_every_value() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    fit(lit_ort.ORTStrategy(fallback="error"), Counting, max_epochs=16)
    # 80 steps: more than the recompile limit.
    assert counters["stats"]["unique_graphs"] <= 8


def test_every_entry_point_runs_compiled_steps() -> None:
    runner, module = fit("ort", max_epochs=1)
    twin = copy.deepcopy(module).eval()
    (metrics,) = runner.test(module, loader(batch=10), verbose=False)
    (validated,) = runner.validate(module, loader(batch=10), verbose=False)
    predictions = runner.predict(module, loader(batch=10))
    assert predictions is not None
    names = {graph.name.rsplit("_", 1)[0] for graph in lit_ort.explain(runner).graphs}
    assert names == {"training_step", "validation_step", "test_step", "predict_step"}
    batch = next(iter(loader(batch=10)))
    with torch.no_grad():
        torch.testing.assert_close(predictions[0], twin(batch[0]).softmax(-1))
    assert metrics["test_loss"] == pytest.approx(validated["val_loss"])


def test_early_stopping_and_best_checkpoint(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val_loss", filename="best")
    callbacks = [best, EarlyStopping("val_loss", patience=1, min_delta=10.0)]
    runner, module = fit("ort", Net, tmp_path, max_epochs=9, callbacks=callbacks)
    assert runner.current_epoch == 2
    loaded = Net.load_from_checkpoint(best.best_model_path, weights_only=False)
    assert loaded.state_dict().keys() == module.state_dict().keys()
    (metrics,) = runner.test(module, loader(batch=10), ckpt_path="best", verbose=False, weights_only=False)
    assert best.best_model_score is not None
    assert metrics["test_loss"] == pytest.approx(float(best.best_model_score), rel=1e-5)


@pytest.mark.parametrize(("first", "second"), [("ort", "auto"), ("auto", "ort"), ("ort", "ort")])
def test_checkpoints_are_compatible_with_eager(first: str, second: str, tmp_path: Path) -> None:
    _, whole = fit("auto", max_epochs=3)
    runner, _ = fit(first, Net, tmp_path, max_epochs=1)
    runner.save_checkpoint(tmp_path / "half.ckpt")
    seed_everything(1, verbose=False)
    resumed = Net()
    trainer(second, max_epochs=3).fit(
        resumed, loader(), loader(batch=10), ckpt_path=tmp_path / "half.ckpt", weights_only=False
    )
    assert_same_weights(resumed, whole)
    torch.testing.assert_close(torch.tensor(resumed.losses), torch.tensor(whole.losses[5:]), rtol=1e-5, atol=1e-6)


def test_a_hook_that_loads_a_checkpoint_receives_the_entries_of_lightning(tmp_path: Path) -> None:
    class Loading(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.entries = set(checkpoint)

    def entries(strategy: str) -> set[str]:
        path, module = tmp_path / f"{strategy}.ckpt", Loading()
        fit(strategy, Net, max_epochs=1)[0].save_checkpoint(path)
        trainer(strategy, max_epochs=2).fit(module, loader(), loader(batch=10), ckpt_path=path, weights_only=False)
        return module.entries

    assert entries("ort") == entries("auto")


@pytest.mark.parametrize("step", [4, 5])
def test_resume_with_dropout_repeats_the_losses(step: int, tmp_path: Path) -> None:
    every = ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1, filename="at-{step}")
    seed_everything(1, verbose=False)
    whole, data = Net(dropout=0.5), constant_loader()
    trainer("ort", tmp_path, max_epochs=3, callbacks=[every]).fit(whole, data, data)
    assert len(set(whole.losses)) == len(whole.losses)
    seed_everything(99, verbose=False)
    resumed = Net(dropout=0.5)
    path = tmp_path / f"at-step={step}.ckpt"
    trainer("ort", max_epochs=3).fit(resumed, data, data, ckpt_path=path, weights_only=False)
    torch.testing.assert_close(torch.tensor(resumed.losses), torch.tensor(whole.losses[step:]), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_the_seed_determines_dropout() -> None:
    first, again = (fit("ort", dropping, max_epochs=1)[1].losses for _ in range(2))
    assert again == first
    assert first != fit("ort", max_epochs=1)[1].losses


def test_a_run_leaves_the_module_unchanged() -> None:
    runner, module = fit("ort", max_epochs=1)
    assert "log" not in vars(module)
    assert not is_compiled(module)
    module.trainer = None
    pickle.loads(pickle.dumps(module))
    copy.deepcopy(module)
    assert module(torch.zeros(2, 6)).grad_fn.name() == "AddmmBackward0"
    assert list(module.state_dict()) == list(Net().state_dict())
    del runner


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_both_packages_register_the_names(package: str) -> None:
    strategies = importlib.import_module(f"{package}.strategies")
    for name in ("ort", "ort_ddp", "ort_zero1", "ort_pipeline", "ort_tensor"):
        strategy = strategies.StrategyRegistry.get(name)
        assert strategy.strategy_name == name
        assert isinstance(strategy, strategies.SingleDeviceStrategy if name == "ort" else strategies.DDPStrategy)
        assert isinstance(strategy, strategies.ParallelStrategy) is (name != "ort")


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("strategy", ["ort", "ort_ddp"])
def test_plugins_are_those_of_the_trainers_package(package: str, strategy: str) -> None:
    pl = importlib.import_module(package)
    runner = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, precision="bf16-mixed", logger=False)
    # Lightning clips in modules of the plugin's own package only.
    assert isinstance(runner.precision_plugin, importlib.import_module(f"{package}.plugins").Precision)
    assert type(runner.precision_plugin).__name__ == "Precision"
    assert isinstance(runner.strategy.checkpoint_io, importlib.import_module(f"{package}.plugins.io").TorchCheckpointIO)


def test_a_run_with_pytorch_lightning() -> None:
    import pytorch_lightning as pl

    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 4)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = torch.nn.functional.cross_entropy(self.linear(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    runner = pl.Trainer(
        strategy="ort",
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    runner.fit(Plain(), loader())
    assert [graph.kind for graph in lit_ort.explain(runner).graphs] == ["fused"]
    assert "loss" in runner.callback_metrics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 2}, "devices=2"),
        ({"num_nodes": 2}, "num_nodes=2"),
        ({"plugins": [MixedPrecision("16-mixed", "cpu")]}, "Use 'bf16-mixed', which needs no scaling"),
    ],
)
def test_unsupported_settings_are_rejected_by_the_trainer(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        trainer("ort", **settings)


def test_precision_plugin() -> None:
    runner = trainer("ort", plugins=[lit_ort.ORTPrecision("32-true")], max_steps=1)
    runner.fit(Net(), loader(), loader(batch=10))
    with pytest.raises(UnsupportedError, match="Use one of them, or pass '16-mixed' to the Trainer"):
        lit_ort.ORTPrecision("16-mixed")


class Wide(Net):
    """A model whose matmuls are large enough for bfloat16 kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 512), torch.nn.GELU(), torch.nn.Linear(512, 512))
        self.head = torch.nn.Linear(512, 4)


@pytest.mark.parametrize("spelling", ["precision", "plugin", "option"])
@pytest.mark.sampled(1)
def test_mixed_precision(spelling: str, tmp_path: Path) -> None:
    strategy = lit_ort.ORTStrategy(
        fallback="error", verify_first_step=True, precision="bf16-mixed" if spelling == "option" else "32-true"
    )
    settings: dict[str, dict[str, Any]] = {
        "precision": {"precision": "bf16-mixed"},
        "plugin": {"plugins": [lit_ort.ORTPrecision("bf16-mixed")]},
        "option": {},
    }
    _, expected = fit("auto", Wide, precision="bf16-mixed")
    runner, module = fit(strategy, Wide, tmp_path, **settings[spelling])
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(expected.losses), rtol=2e-2, atol=1e-3)
    _, exact = fit("auto", Wide)
    assert module.losses != exact.losses
    graphs = lit_ort.explain(runner).graphs
    assert {(graph.name.split("_")[0], graph.precision) for graph in graphs} == {
        ("training", "bf16-mixed"),
        ("validation", "bf16-mixed"),
    }
    runner.save_checkpoint(tmp_path / "mixed.ckpt")
    saved = torch.load(tmp_path / "mixed.ckpt", weights_only=False)
    assert {weight.dtype for weight in saved["state_dict"].values()} == {torch.float32}
    states = saved["optimizer_states"][0]["state"].values()
    assert {state["momentum_buffer"].dtype for state in states} == {torch.float32}


class Recurrent(Net):
    """A model whose step also creates tensors of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(3, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x.view(-1, 2, 3))[0][:, -1])) + torch.linspace(0, 1, 4)


# Lightning's names for a precision of a CPU: the graphs' precision, and the largest relative difference of weights.
CPU_PRECISIONS = {
    "64-true": ("64-true", 1e-12),
    "64": ("64-true", 1e-12),
    64: ("64-true", 1e-12),
    "32-true": ("32-true", 1e-5),
    "32": ("32-true", 1e-5),
    32: ("32-true", 1e-5),
    "16-true": ("16-true", 1e-2),
    "bf16-true": ("bf16-true", 5e-2),
    "bf16-mixed": ("bf16-mixed", 2e-2),
    "bf16": ("bf16-mixed", 2e-2),
}
NAMES = {name for name, _ in CPU_PRECISIONS.values()}
FAST_PRECISIONS = ("64-true", "bf16-mixed")
# Lightning replaces the first two on a CPU, and the others are for GPUs.
OTHER_PRECISIONS = {"16-mixed", "16", 16, "transformer-engine", "transformer-engine-float16"}


def test_each_precision_of_lightning_is_known() -> None:
    names = {name for kind in get_args(_PRECISION_INPUT) for name in get_args(kind)}
    assert names == {*CPU_PRECISIONS, *OTHER_PRECISIONS}


@pytest.mark.filterwarnings("ignore:.* is supported for historical reasons:UserWarning")
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(
            name,
            marks=[
                *([] if name in FAST_PRECISIONS else [pytest.mark.slow if name in NAMES else pytest.mark.sweep]),
                *([NEEDS_AUTOCAST_LSTMS] if str(name).startswith("bf16") else []),
            ],
        )
        for name in CPU_PRECISIONS
    ],
)
@pytest.mark.sampled(1)
def test_precisions(precision: Any) -> None:
    name, tolerance = CPU_PRECISIONS[precision]
    eager, expected = fit("auto", Recurrent, precision=precision)
    runner, module = fit(lit_ort.ORTStrategy(fallback="error"), Recurrent, precision=precision)
    assert {graph.precision for graph in lit_ort.explain(runner).graphs} == {name}
    assert {weight.dtype for weight in module.parameters()} == {weight.dtype for weight in expected.parameters()}
    assert_same_weights(module, expected, tolerance)
    for key, value in runner.callback_metrics.items():
        assert value.dtype == eager.callback_metrics[key].dtype, key


def test_the_trainers_precision_overrides_that_of_the_options() -> None:
    runner, module = fit(lit_ort.ORTStrategy(precision="bf16-mixed"), precision="64-true", max_steps=1)
    assert {graph.precision for graph in lit_ort.explain(runner).graphs} == {"64-true"}
    assert {weight.dtype for weight in module.parameters()} == {torch.float64}


def test_a_derived_plugin_keeps_its_contexts() -> None:
    class WithoutValidation(MixedPrecision):
        def val_step_context(self) -> Any:
            return torch.autocast("cpu", enabled=False)

    runner, _ = fit("ort", Wide, plugins=[WithoutValidation("bf16-mixed", "cpu")], max_steps=1)
    precisions = {(graph.name.split("_")[0], graph.precision) for graph in lit_ort.explain(runner).graphs}
    assert precisions == {("training", "bf16-mixed"), ("validation", "32-true")}


def test_mixed_precision_clips_gradients_of_fused_optimizers() -> None:
    class Fused(Wide):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), fused=True)

    runner, _ = fit("ort", Fused, precision="bf16-mixed", gradient_clip_val=0.5, max_steps=2)
    assert runner.precision == "bf16-mixed"


def test_lightning_replaces_16_mixed_on_a_cpu() -> None:
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        strategy: Any = trainer("ort", precision="16-mixed").strategy
    assert strategy.options.precision == "bf16-mixed"


def test_the_strategy_compiles_a_module_that_was_compiled(caplog: pytest.LogCaptureFixture) -> None:
    backend = MagicMock(side_effect=lambda graph, inputs: graph.forward)
    torch.manual_seed(0)
    module: Any = torch.compile(Net(), backend=backend)
    runner = trainer("ort")
    with caplog.at_level("INFO"):
        runner.fit(module, loader(), loader())
        runner.validate(module, loader(), verbose=False)
    assert "Net was compiled by torch.compile; this strategy compiles its steps" in caplog.text
    assert {graph.kind for graph in lit_ort.explain(runner).graphs} == {"fused", "forward"}
    backend.assert_not_called()
    torch.manual_seed(0)
    plain = Net()
    trainer("auto").fit(plain, loader(), loader())
    assert_same_weights(module._orig_mod, plain)
    module(torch.zeros(2, 6))
    backend.assert_called_once()


def test_invalid_options_raise_when_the_strategy_is_created() -> None:
    with pytest.raises(OptionsError, match="'falback'. Did you mean 'fallback'"):
        lit_ort.ORTStrategy(falback="error")  # pyright: ignore[reportCallIssue]
    with pytest.raises(OptionsError, match="'tall_gem', which is not a pass"):
        lit_ort.ORTStrategy(disable_passes=["tall_gem"])


class Counting(Net):
    """Reads the trainer's counters, and computes with them."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scale = 2.0 if self.global_step > 3 else 1.0
        if batch_idx % 2 == 0:
            scale = scale + self.current_epoch
        return F.cross_entropy(self(batch[0]), batch[1]) * scale * (1 + self.global_step / 100)


class Unsupported(Net):
    """Has a gradient that is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table(torch.tensor([0, 2, 2])).sum(0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_fallback_warns_and_trains_as_eager() -> None:
    _, expected = fit("auto", Unsupported, max_epochs=1)
    with pytest.warns(LitOrtWarning, match="runs in eager") as caught:
        runner, module = fit("ort", Unsupported, max_epochs=1)
    assert_same_weights(module, expected)
    fallbacks = lit_ort.explain(runner).fallbacks
    assert len(fallbacks) == len([w for w in caught if issubclass(w.category, LitOrtWarning)])
    assert {graph.name.rsplit("_", 1)[0] for graph in fallbacks} == {"training_step"}


def test_fallback_error_raises_the_reason() -> None:
    with pytest.raises(CaptureError, match=REASON):
        fit(lit_ort.ORTStrategy(fallback="error"), Unsupported, max_epochs=1)


class Restless(Net):
    """Reads a different text at every call, which Dynamo specializes."""

    word = ""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.word += "x"
        return self(batch[0]).sum() * float(len(self.word))


@pytest.mark.parametrize("fallback", ["warn", "error"])
def test_the_recompile_limit_is_reported(fallback: Literal["warn", "error"], monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(tracing_settings, "RECOMPILE_LIMIT", 3)
    strategy = lit_ort.ORTStrategy(fallback=fallback)
    if fallback == "error":
        with pytest.raises(lit_ort.CaptureError, match="compiled 3 times"):
            fit(strategy, Restless, max_epochs=1)
    else:
        with pytest.warns(LitOrtWarning, match="training_step runs in eager PyTorch: it was compiled 3 times"):
            fit(strategy, Restless, max_epochs=1)


class Hidden(Net):
    """Its property hides a submodule, which nn.Module finds where the property raises; Dynamo doesn't."""

    @property
    def head(self) -> Any:
        return self._head


class Printing(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for _ in range(2):
            print(end="")
            loss = loss * 1.0
        return loss


@pytest.mark.parametrize(("make", "reason"), [(Hidden, "no attribute '_head'"), (Printing, "can't trace `print`")])
def test_each_trainer_reports_and_refuses_a_step_in_eager(make: Callable[[], Net], reason: str) -> None:
    for _ in range(2):
        with pytest.warns(LitOrtWarning, match=f"training_step runs in eager PyTorch: .*{reason}"):
            runner, _ = fit("ort", make, max_steps=1, limit_val_batches=0)
        assert any(function.name == "training_step" for function in lit_ort.explain(runner).eager_functions)
    with pytest.raises(CaptureError, match=f"training_step can't run through ONNX Runtime.*{reason}"):
        fit(lit_ort.ORTStrategy(fallback="error"), make, max_steps=1, limit_val_batches=0)


# As Any, since its declared type doesn't fit methods.
outside_of_graphs: Any = torch.compiler.disable


def has_gradients(module: Any) -> bool:
    return any(parameter.grad is not None for parameter in module.parameters())


class GradientsAfterRuns(lit_ort.ORTStrategy):
    """Records whether there were gradients of the previous step after each run of a training step."""

    has_gradients: tuple[bool, ...] = ()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        self.has_gradients += (has_gradients(self.lightning_module),)
        return output


class ReadsGradients(Net):
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.losses.append(float(sum(p.grad.norm() for p in self.parameters() if p.grad is not None)))


@pytest.mark.parametrize(
    ("make", "accumulate", "expected"),
    [
        (Net, 1, [False] * 4),
        (Branching, 1, [False] * 4),
        (Net, 2, [False, True] * 2),
        (ReadsGradients, 1, [False, True, True, True]),
    ],
)
def test_old_gradients_are_freed_before_a_run_unless_a_hook_reads_them(
    make: Callable[[], Net], accumulate: int, expected: list[bool]
) -> None:
    strategy = GradientsAfterRuns(fallback="error")
    fit(strategy, make, max_steps=4 // accumulate, accumulate_grad_batches=accumulate, max_epochs=1)
    assert list(strategy.has_gradients[:4]) == expected


def norm_of_gradients(module: nn.Module) -> Tensor:
    return sum((p.grad.norm() for p in module.parameters() if p.grad is not None), torch.zeros(()))


class Reading(Net):
    """Reads gradients of the previous step in a hook, or in its training step before, after or beside the graph."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.place = place

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        before = norm_of_gradients(self) if self.place == "before the graph" else 0
        loss = super().training_step(batch, batch_idx)
        if self.place == "after it" or (self.place == "late" and self.global_step >= 3):
            before = norm_of_gradients(self)
        if self.place == "outside" or (self.place == "outside, late" and self.global_step >= 3):
            before = self.outside()
        return loss * (1 + before / 10)

    @outside_of_graphs
    def outside(self) -> Tensor:
        return norm_of_gradients(self)


def reading(hook: str) -> Callable[[], Net]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.norms.append(float(norm_of_gradients(self)))
        return getattr(super(InHook, self), hook)(*args, **kwargs)

    class InHook(Reading):
        def __init__(self) -> None:
            super().__init__(hook)
            self.norms: list[float] = []

    setattr(InHook, hook, read)
    return InHook


PLACES = ("before the graph", "after it", "late", "outside", "outside, late")
HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "on_train_batch_end",
    "on_validation_model_zero_grad",
    "on_train_epoch_end",
)
FAST_PLACES = ("before the graph", "outside, late")
SLOW_PLACES = ("late", "on_before_backward", "optimizer_step")


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:optimizer_in_graph=True. the optimizer steps after the backward")
@pytest.mark.parametrize("in_graph", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "place",
    [
        *FAST_PLACES,
        *(pytest.param(place, marks=pytest.mark.slow) for place in SLOW_PLACES),
        *(
            pytest.param(place, marks=pytest.mark.sweep)
            for place in (*PLACES, *HOOKS)
            if place not in FAST_PLACES + SLOW_PLACES
        ),
    ],
)
def test_code_reads_the_gradients_of_eager(place: str, in_graph: bool) -> None:
    make = partial(Reading, place) if place in PLACES else reading(place)
    _, expected = fit("auto", make)
    _, module = fit(lit_ort.ORTStrategy(optimizer_in_graph=in_graph), make)
    assert_same_weights(module, expected)
    assert getattr(module, "norms", []) == pytest.approx(getattr(expected, "norms", []), rel=1e-4)


AVERAGING: dict[str, Callable[[], Callback]] = {
    "SWA": lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1),
    "EMA": lambda: WeightAveraging(avg_fn=get_ema_avg_fn(0.9)),
    "accumulation": lambda: GradientAccumulationScheduler({0: 1, 1: 3}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name != "SWA" else name for name in AVERAGING]
)
@pytest.mark.sampled(1)
def test_callbacks_that_change_the_loop(name: str) -> None:
    """In SWA's last epoch, for the statistics of BatchNorm, the optimizer steps on gradients of the epoch before."""
    _, expected = fit("auto", partial(Reading, "nowhere"), callbacks=AVERAGING[name](), max_epochs=3)
    _, module = fit("ort", partial(Reading, "nowhere"), callbacks=AVERAGING[name](), max_epochs=3)
    assert_same_weights(module, expected)


class ManyClasses(LightningModule):
    """A model with logits of 80 MB."""

    CLASSES, ROWS = 50_000, 400

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, self.CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class MemoryOfSteps(Callback):
    """Records the process's resident memory after each step, in bytes."""

    def __init__(self) -> None:
        self.resident: list[int] = []

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.resident.append(psutil.Process().memory_info().rss)


class MemoryOfSaving(TorchCheckpointIO):
    """Records it when a checkpoint is written."""

    def __init__(self) -> None:
        self.resident: list[int] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.resident.append(psutil.Process().memory_info().rss)
        super().save_checkpoint(*args, **kwargs)


@pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="the system has no madvise")
def test_buffers_of_steps_are_freed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    module, steps, saving = ManyClasses(), MemoryOfSteps(), MemoryOfSaving()
    rows = torch.randn(2 * module.ROWS, 6), torch.randint(module.CLASSES, (2 * module.ROWS,))
    data = DataLoader(TensorDataset(*rows), module.ROWS)
    runner = trainer("ort", max_epochs=1, callbacks=[steps], plugins=[saving])
    runner.fit(module, data)
    runner.save_checkpoint(tmp_path / "last.ckpt")
    assert saving.resident[-1] < steps.resident[-1] - 70e6
