"""`fused_optimizer`: strategies step in torch's fused form, with eager's weights, state and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import lit_ort
from lit_ort.errors import OptionsError
from tests.lightning_models import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*dataloader' does not have many workers:UserWarning",
    "ignore:The number of training batches .* is smaller than the logging interval:UserWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint:UserWarning",
)

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda groups: Adam(groups, 1e-2),
    "amsgrad": lambda groups: Adam(groups, 1e-2, amsgrad=True, weight_decay=0.1),
    "adamw": lambda groups: AdamW(groups, 1e-2),
    "tensor lr": lambda groups: AdamW(groups, torch.tensor(1e-2), maximize=True),
    "sgd": lambda groups: SGD(groups, 0.1, momentum=0.9),
    "nesterov": lambda groups: SGD(groups, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda groups: Adagrad(groups, 0.1, lr_decay=0.1),
}
OTHERS: dict[str, Make] = {
    "loop": lambda groups: Adam(groups, 1e-2, fused=False),
    "lbfgs": lambda groups: torch.optim.LBFGS(groups[0]["params"], 1e-2),
}
# With several tensors as state, and with one.
OF_CHECKPOINTS = ("adam", "nesterov")
NOT_OF_CHECKPOINTS = [name for name in OPTIMIZERS if name not in OF_CHECKPOINTS]
every_optimizer = pytest.mark.parametrize(
    "optimizer", [name if name == "adam" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)


class Optimized(Net):
    """A module with two groups, a schedule, and a record of each group's form at each step."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.forms: list[list[bool | None]] = []

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 5e-3}]
        optimizer = self.noted({**OPTIMIZERS, **OTHERS}[self.optimizer](groups))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def noted(self, optimizer: Optimizer) -> Optimizer:
        optimizer.register_step_post_hook(lambda o, *_: self.forms.append([g.get("fused") for g in o.param_groups]))
        return optimizer


class WithoutHooks(Optimized):
    """For `optimizer_in_graph`, which hooks on the optimizer's step turn off."""

    def noted(self, optimizer: Optimizer) -> Optimizer:
        return optimizer


def fit(strategy: Any, module: Net | None = None, folder: Path | None = None, **settings: Any) -> Any:
    seed_everything(1, verbose=False)
    module = Optimized() if module is None else module
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    runner = trainer(strategy, folder, **settings)
    runner.fit(module, loader(), loader(batch=10))
    return runner


def strict(**arguments: Any) -> lit_ort.ORTStrategy:
    return lit_ort.ORTStrategy(fallback="error", **arguments)


def assert_same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """The same weights, and the same options and state of optimizers."""
    weights = (dict(runner.lightning_module.state_dict()) for runner in (found, expected))
    torch.testing.assert_close(*weights, rtol=tolerance, atol=tolerance)
    for a, b in zip(found.optimizers, expected.optimizers, strict=True):
        a, b = a.state_dict(), b.state_dict()
        assert_same_options(a, b)
        torch.testing.assert_close(a["state"], b["state"], rtol=tolerance, atol=tolerance)


def assert_same_options(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for a, b in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert (a.pop("lr"), a) == (pytest.approx(b.pop("lr")), b)


@pytest.mark.sampled(3)
@every_optimizer
def test_ten_steps_as_in_eager(optimizer: str) -> None:
    expected, found = (fit(s, Optimized(optimizer)) for s in ("auto", strict()))
    assert found.global_step == len(found.lightning_module.forms) == 10
    assert_same(found, expected)
    assert expected.lightning_module.forms == [[None, None]] * 10
    assert found.lightning_module.forms[1:] == [[True, True]] * 9


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"gradient_clip_val": 0.05}, marks=pytest.mark.sweep),
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"detect_anomaly": True},
        pytest.param({"precision": "64-true"}, marks=pytest.mark.sweep),
        {"precision": "bf16-mixed", "gradient_clip_val": 0.05},
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_settings_of_the_trainer(settings: dict[str, Any]) -> None:
    strategies = strict(fused_optimizer=False), strict()
    expected, found = (fit(strategy, **settings) for strategy in strategies)
    assert_same(found, expected, 1e-4 if "precision" in settings else 1e-6)
    assert found.lightning_module.forms[1:] == [[True, True]] * (found.global_step - 1)
    assert expected.lightning_module.forms == [[None, None]] * found.global_step


def test_a_precision_plugin_that_clips() -> None:
    class Own(MixedPrecision):
        pass

    runner = fit(strict(), plugins=[Own("bf16-mixed", "cpu")], gradient_clip_val=0.5, max_steps=2)
    assert runner.lightning_module.forms[1] == [True, True]


@pytest.mark.parametrize(
    "optimizer", [*OF_CHECKPOINTS, *(pytest.param(name, marks=pytest.mark.sweep) for name in NOT_OF_CHECKPOINTS)]
)
def test_checkpoints_resume_in_either_form(optimizer: str, tmp_path: Path) -> None:
    whole = fit("auto", Optimized(optimizer), max_epochs=4)
    for name, before, after in (("eager", "auto", strict()), ("fused", strict(), "auto")):
        half = fit(before, Optimized(optimizer), tmp_path / name, max_epochs=2)
        path = tmp_path / f"{name}.ckpt"
        half.save_checkpoint(path)
        states = torch.load(path, weights_only=True)["optimizer_states"]
        assert [group["fused"] for state in states for group in state["param_groups"]] == [None, None]
        module = Optimized(optimizer)
        resumed = trainer(after, max_epochs=4)
        resumed.fit(module, loader(), loader(batch=10), ckpt_path=str(path))
        assert_same(resumed, whole)
        assert module.forms == [[True, True] if name == "eager" else [None, None]] * 10


def test_a_form_in_a_checkpoint_stays(tmp_path: Path) -> None:
    fit("auto", Optimized("loop"), tmp_path).save_checkpoint(tmp_path / "a.ckpt")
    module = Optimized()
    trainer(strict(), max_epochs=3).fit(module, loader(), loader(batch=10), ckpt_path=str(tmp_path / "a.ckpt"))
    assert module.forms == [[False, False]] * 5


def test_the_option_turns_it_off() -> None:
    runner = fit(strict(fused_optimizer=False), max_epochs=1)
    assert runner.lightning_module.forms == [[None, None]] * 5
    for kind in (lit_ort.ORTStrategy, lit_ort.ORTDDPStrategy, lit_ort.ORTPipelineStrategy, lit_ort.ORTTensorStrategy):
        with pytest.raises(OptionsError, match="fused_optimizer='yes' is not a bool"):
            kind(fused_optimizer="yes")  # pyright: ignore[reportArgumentType]


class TwoOptimizers(Optimized):
    """Steps two optimizers by hand, one of them with a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return self.noted(AdamW(self.body.parameters())), self.noted(SGD(self.head.parameters(), 0.1, momentum=0.9))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]

        def closure() -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            second.zero_grad()
            self.manual_backward(loss)
            return loss

        first.zero_grad()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        first.step()
        second.step(closure)
        return loss


def test_manual_optimization() -> None:
    expected, found = (fit(s, TwoOptimizers(), max_epochs=1) for s in ("auto", lit_ort.ORTStrategy()))
    assert_same(found, expected)
    assert found.lightning_module.forms == [[None]] * 2 + [[True]] * 8


class Sparse(Net):
    """Has an embedding with sparse gradients beside other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]) + self.table(batch[1]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), 0.1, momentum=0.9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lit_ort.errors.LitOrtWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_sparse_gradients() -> None:
    expected, found = (fit(s, Sparse(), max_epochs=1) for s in ("auto", lit_ort.ORTStrategy()))
    weights = (dict(runner.lightning_module.state_dict()) for runner in (found, expected))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_lbfgs() -> None:
    # In float32, its curvatures are mostly rounding.
    settings = {"max_epochs": 1, "precision": "64-true"}
    expected, found = (fit(s, Optimized("lbfgs"), **settings) for s in ("auto", lit_ort.ORTStrategy()))
    assert found.lightning_module.losses == pytest.approx(expected.lightning_module.losses, rel=1e-4)


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning], ids=lambda package: package.__name__)
def test_both_packages(package: Any) -> None:
    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.forms = nn.Linear(6, 4), []

        def training_step(self, batch: Any) -> Any:
            return F.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = Adagrad(self.parameters())
            optimizer.register_step_post_hook(lambda o, *_: self.forms.append(o.param_groups[0]["fused"]))
            return optimizer

    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    module = Module()
    package.Trainer(strategy="ort", accelerator="cpu", devices=1, max_steps=2, **quiet).fit(module, loader())
    assert module.forms == [True, True]


def test_optimizer_in_graph_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    fused: Any = torch._fused_adam_  # pyright: ignore[reportPrivateImportUsage]

    def counted(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append(len(parameters))
        fused(parameters, *args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adam_", counted)
    expected, found = (fit(s, WithoutHooks()) for s in ("auto", strict(optimizer_in_graph=True)))
    assert_same(found, expected)
    # Both groups at once, from the second step on.
    assert calls == [4, 2] * 9
