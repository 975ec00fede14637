"""What the Python code of a step sees and changes is what it sees and changes in eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lit_ort
from lit_ort.strategies.compiled_code import description_of
from tests.lightning_models import trainer

BATCHES, ROWS = 6, 8
# A batch with a value that is not finite, where a module is about one.
BAD = 3


class Plain(LightningModule):
    """A regression without a target; derived classes change the step."""

    data_is_bad = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.seen: list[float] = []

    def loss(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]) if outputs else float("nan"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), 0.05)


class LoggedThenChanged(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Buffer(torch.ones(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("plain", loss, on_epoch=True)
        self.log_dict({"rate": self.rate, "first": self.net.weight[0, 0]}, on_epoch=True)
        loss += 10.0
        self.rate.mul_(0.5)
        self.log("whole", loss, on_epoch=True)
        return loss


class LoggedBeforeABreak(Plain):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("plain", loss, on_epoch=True)
        torch._dynamo.graph_break()
        return loss.add_(10.0)


class LoggedBeforeTheUpdate(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch[0])
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.log("first", self.net.weight[0, 0], on_epoch=True)
        self.log("bias", self.net.bias, on_epoch=True)
        optimizer.step()
        return loss


class OwnLog(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.task, self.logged = "", []

    def log(self, name: str, value: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.logged.append(f"{self.task}/{name}")
        super().log(f"{self.task}/{name}", value, **kwargs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        total = torch.zeros(())
        for task, factor in (("a", 1.0), ("b", 2.0)):
            self.task = task
            loss = self.loss(batch[0] * factor)
            self.log("loss", loss, on_epoch=True)
            self.log_dict({"double": 2 * loss}, on_epoch=True)
            total = total + loss
        assert len(self.logged) % 4 == 0
        return total


class Replaced(Plain):
    def second(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - 5).square().mean()
        self.log("second", loss, on_epoch=True)
        return loss

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.training_step = self.second


class CaughtCheck(Plain):
    """Skips bad batches by an exception, which the buffers of a layer must not see."""

    data_is_bad = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def checked(self, x: Tensor) -> Tensor:
        if torch.isnan(self.net(x)).any():
            raise ValueError("a bad batch")
        return self.loss(self.norm(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        try:
            return self.checked(batch[0])
        except ValueError:
            return None


class AveragedTarget(Plain):
    """Updates a copy through `.data`, before a branch that can run the step again."""

    data_is_bad = True

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        for own, averaged in zip(self.net.parameters(), self.target.parameters(), strict=True):
            averaged.data.mul_(0.9).add_(own.data, alpha=0.1)
        loss = self.loss(batch[0]) + self.target(batch[0]).square().mean()
        return loss if torch.isfinite(loss) else None


class NoisyAndSkipped(Plain):
    """Skips a batch for its noise, which a repeated step must have too."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        noise = torch.randn_like(batch[0])
        loss = self.loss(batch[0] + noise) + (noise[0, 0] + 0.3).log().nan_to_num(float("nan"))
        self.log("noise", noise.mean(), on_epoch=True)
        if torch.isnan(loss):
            return None
        return loss


class LateGradients(Plain):
    """Reads the gradients of the step before, in code that comes after a metric and is traced late."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        mean = self.mean(loss.detach())
        loss = loss * (2 - mean.clamp(max=1))
        if self.global_step >= 3:
            gradient = self.net.weight.grad
            assert gradient is not None
            self.log("before", gradient.norm(), on_epoch=True)
        return loss


CASES = [
    LoggedThenChanged, LoggedBeforeABreak, LoggedBeforeTheUpdate, OwnLog, Replaced, CaughtCheck, AveragedTarget,
    NoisyAndSkipped, LateGradients,
]  # fmt: skip


def data(is_bad: bool) -> DataLoader[Any]:
    x = torch.randn(BATCHES * ROWS, 4, generator=torch.Generator().manual_seed(1))
    if is_bad:
        x[BAD * ROWS] = float("nan")
    return DataLoader(TensorDataset(x), ROWS)


def fit(kind: type[Plain], strategy: Any, folder: Path) -> tuple[Plain, dict[str, float]]:
    seed_everything(0, verbose=False)
    module = kind()
    runner = trainer(strategy, default_root_dir=folder, max_epochs=2, limit_val_batches=0)
    runner.fit(module, data(kind.data_is_bad))
    return module, {name: float(value) for name, value in runner.callback_metrics.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "always": {"compile": "always"},
    "never": {"compile": "never"},
    "optimizer in graph": {"compile": "always", "optimizer_in_graph": True},
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore:.*training_step. returned .None", "ignore:.*runs in eager PyTorch")
@pytest.mark.filterwarnings("ignore:.*the optimizer steps after the backward")
def test_values_are_those_of_eager(kind: type[Plain], options: dict[str, Any], tmp_path: Path) -> None:
    expected, metrics = fit(kind, "auto", tmp_path)
    module, found = fit(kind, lit_ort.ORTStrategy(**options), tmp_path)
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert module.seen == pytest.approx(expected.seen, rel=1e-4, abs=1e-6, nan_ok=True)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-6, equal_nan=True)


class Checked(Plain):
    data_is_bad = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        if not torch.isfinite(loss):
            raise ValueError("a bad batch")
        return loss


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore:.*the optimizer steps after the backward")
def test_a_check_raises_before_the_update(options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for strategy in ("auto", lit_ort.ORTStrategy(**options)):
        seed_everything(0, verbose=False)
        module = Checked()
        with pytest.raises(ValueError, match="a bad batch"):
            trainer(strategy, default_root_dir=tmp_path).fit(module, data(is_bad=True))
        found.append(module.net.weight.detach().clone())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_the_cases_are_about_what_they_say(tmp_path: Path) -> None:
    skipped, _ = fit(NoisyAndSkipped, "auto", tmp_path)
    assert 0 < sum(value != value for value in skipped.seen) < len(skipped.seen)
    _, metrics = fit(OwnLog, "auto", tmp_path)
    assert {"a/loss", "b/loss", "a/double"} <= metrics.keys()
    changed, metrics = fit(LoggedThenChanged, "auto", tmp_path)
    assert metrics["whole_epoch" if "whole_epoch" in metrics else "whole"] > metrics["plain"] + 9


def test_settings_of_layers_are_read_without_their_repr() -> None:
    """Which may draw random numbers, as that of a module with sampled weights does, or raise."""

    class Sampled(torch.nn.Linear):
        def extra_repr(self) -> str:
            raise ValueError("no text")

    modules = [torch.nn.Sequential(Sampled(3, 4), torch.nn.Dropout(p)) for p in (0.1, 0.1, 0.5)]
    first, second, third = map(description_of, modules)
    assert first == second != third
