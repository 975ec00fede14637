"""`self.log` of steps: what it collects is what Lightning's own method collects, and it raises the same errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

import lit_ort
from lit_ort._compat.repeated_logs import RepeatedLogs
from tests.lightning_models import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning")


class Logging(Net):
    """Logs in many ways, and keeps the metrics after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("step", loss, on_step=True, on_epoch=False, prog_bar=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("smallest", loss, on_epoch=True, reduce_fx=torch.min)
        self.log("sum", loss.detach().reshape(1), on_epoch=True, reduce_fx="sum", batch_size=3)
        self.log("index", float(batch_idx), on_epoch=True)
        self.log("count", batch_idx, batch_size=batch_idx + 1, on_epoch=True)
        self.log("positional", loss, True)
        self.log("half", loss.bfloat16(), on_epoch=True, sync_dist=True)
        self.log("float64", loss.double(), on_epoch=True)
        if batch_idx % 2:
            self.log("every_second", loss, on_epoch=True)
        self.metric(loss.detach())
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self(batch[0]).square().mean()
        self.log("val_loss", loss)
        self.log(f"val_{dataloader_idx}", loss, add_dataloader_idx=False, on_step=True, on_epoch=True)
        self.log_dict({"val_a": loss, "val_b": loss * 2})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self._note()

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._note()

    def _note(self) -> None:
        collected = {
            **self.trainer.callback_metrics,
            **self.trainer.progress_bar_metrics,
            **self.trainer.logged_metrics,
        }
        self.seen.append({name: float(value) for name, value in collected.items()})


def fit(strategy: Any, module: Net, folder: Path, **settings: Any) -> Any:
    torch.manual_seed(0)
    runner = trainer(strategy, default_root_dir=folder, **{"max_epochs": 3, "log_every_n_steps": 1, **settings})
    several = isinstance(module, Logging)
    runner.fit(module, loader(rows=44), [loader(), loader(rows=12)] if several else loader())
    return runner


@pytest.mark.parametrize("compile", ["never", "always"])
@pytest.mark.sampled(1)
def test_the_same_is_collected(compile: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Logging()
    torch.manual_seed(0)
    module = Logging()
    reference = fit("auto", expected, tmp_path)
    runner = fit(lit_ort.ORTStrategy(compile=compile), module, tmp_path)
    assert len(module.seen) == len(expected.seen)
    for actual, wanted in zip(module.seen, expected.seen, strict=True):
        assert actual == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert runner.callback_metrics.keys() == reference.callback_metrics.keys()


def test_lightnings_own_method_is_called_for_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    log = LightningModule.log

    def counting(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        called.append(name)
        log(self, name, *args, **kwargs)

    counting.__module__ = log.__module__
    monkeypatch.setattr(LightningModule, "log", counting)
    fit(lit_ort.ORTStrategy(compile="never"), Net(), tmp_path, max_epochs=2)
    batches = 6
    # The names of a step at the first batch of an epoch.
    assert called.count("loss") < batches
    assert called.count("val_loss") < batches


@pytest.mark.parametrize("compile", ["never", "always"])
def test_errors_are_lightnings(compile: Any, tmp_path: Path) -> None:
    class Growing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("value", loss if batch_idx < 3 else loss.repeat(2))
            return loss

    class Changing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("value", loss, on_epoch=batch_idx >= 3)
            return loss

    with pytest.raises(ValueError, match="the tensor must have a single element"):
        fit(lit_ort.ORTStrategy(compile=compile), Growing(), tmp_path)
    with pytest.raises(MisconfigurationException, match="twice in `training_step` with different arguments"):
        fit(lit_ort.ORTStrategy(compile=compile), Changing(), tmp_path)


def test_a_modules_own_log_is_called_each_time(tmp_path: Path) -> None:
    names: list[str] = []

    class Own(Net):
        def log(self, name: str, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            names.append(name)
            super().log(name, *args, **kwargs)

    fit(lit_ort.ORTStrategy(compile="never"), Own(), tmp_path, max_epochs=2)
    assert names.count("loss") == 12


def test_what_is_logged_can_be_changed_in_place_afterwards(tmp_path: Path) -> None:
    class InPlace(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            value = torch.full((), float(batch_idx))
            self.log("value", value, on_step=True, on_epoch=True)
            value.add_(100)
            return loss

    expected = fit("auto", InPlace(), tmp_path).callback_metrics
    actual = fit(lit_ort.ORTStrategy(compile="never"), InPlace(), tmp_path).callback_metrics
    assert {k: actual[k] for k in actual if "value" in k} == {k: expected[k] for k in expected if "value" in k}


def test_a_module_without_a_trainer_is_warned_as_in_lightning() -> None:
    module = Net()
    with pytest.warns(UserWarning, match="not registered on the model"):
        RepeatedLogs(module).log("loss", torch.zeros(()))


def test_the_other_package(tmp_path: Path) -> None:
    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(6, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def run(strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        quiet = dict.fromkeys(("enable_progress_bar", "logger", "enable_checkpointing", "enable_model_summary"), False)
        runner = pytorch_lightning.Trainer(
            strategy=strategy, accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, **quiet
        )
        runner.fit(Module(), loader())
        return dict(runner.callback_metrics)

    assert run(lit_ort.ORTStrategy(compile="never")) == run("auto")


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
def test_numbers_are_not_rounded_to_a_16_bit_precision(precision: Any) -> None:
    class Counting(Net):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self.log("tokens", 100_001.0, on_epoch=True)
            return self(batch[0]).float().square().mean()

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            pass

    own = trainer(lit_ort.ORTStrategy(compile="never"), precision=precision, max_epochs=1)
    own.fit(Counting(), loader(), loader())
    assert own.callback_metrics["tokens"] == 100_001.0
