"""What Lightning and its users do with a strategy besides training: copies, pickles, mocks, steps outside of runs."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import logging
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lit_ort import LitOrtWarning, ORTStrategy, explain
from tests.lightning_models import Net, assert_same_weights, loader, trainer
from tests.scripts import run_code

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging:UserWarning"),
    pytest.mark.filterwarnings("ignore:You .* Skipping val loop:UserWarning"),
    pytest.mark.usefixtures("one_thread"),
]


class Copies(Callback):
    """Copies and pickles a Trainer in the middle of a run."""

    def __init__(self) -> None:
        self.copied: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.copied = copy.deepcopy(pl_module)
            copy.deepcopy(trainer.strategy)
            torch.save(trainer, io.BytesIO())


def test_a_trainer_is_copied_and_pickled_in_the_middle_of_a_run() -> None:
    callback = Copies()
    own = trainer(ORTStrategy(fallback="error"), callbacks=[callback])
    own.fit(Net(), loader(), loader())
    file = io.BytesIO()
    torch.save(own, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert len(explain(again).graphs) == len(explain(own).graphs)
    twin = trainer(ORTStrategy(fallback="error"))
    twin.fit(callback.copied, loader())
    assert [graph.kind for graph in explain(twin).graphs] == ["fused"]


@pytest.mark.parametrize("manual", [False, True])
def test_a_wrapped_backward_is_called_once_per_step(manual: bool) -> None:
    class Manual(Net):
        automatic_optimization = not manual  # pyright: ignore[reportAssignmentType,reportIncompatibleMethodOverride]

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if manual:
                optimizer: Any = self.optimizers()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return loss

    own = trainer(ORTStrategy(fallback="error"), max_epochs=1)
    with (
        mock.patch.object(Strategy, "backward", wraps=own.strategy.backward) as backward,
        mock.patch("torch.optim.SGD.zero_grad") as zero_grad,
    ):
        own.fit(Manual(), loader())
    assert backward.call_count == len(loader())
    assert zero_grad.call_count == len(loader())


def test_a_step_that_is_mocked_runs_compiled() -> None:
    module, strategy = Net(), ORTStrategy(fallback="error")
    step = mock.Mock(wraps=module.training_step)
    del step.__name__
    module.training_step = step
    trainer(strategy, max_epochs=1).fit(module, loader())
    assert step.call_count == len(loader())
    assert [graph.kind for graph in explain(strategy).graphs] == ["fused"]


def test_a_step_that_dynamo_fails_to_trace_runs_in_eager_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise AttributeError("__name__")

    outcomes = []
    for strategy in ("auto", "ort"):
        seed_everything(1, verbose=False)
        module = Net()
        own = trainer(strategy, max_epochs=1)
        if strategy == "ort":
            monkeypatch.setattr("torch._dynamo.convert_frame.trace_frame", broken)
            with pytest.warns(LitOrtWarning, match="training_step runs in eager PyTorch: .*AttributeError") as warned:
                own.fit(module, loader())
            assert len([warning for warning in warned if warning.category is LitOrtWarning]) == 1
        else:
            own.fit(module, loader())
        outcomes.append(module)
    assert_same_weights(*outcomes)


def test_garbage_collection_is_disabled_only_in_the_first_step() -> None:
    class Watching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.enabled: list[bool] = []

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.record()  # pyright: ignore[reportCallIssue] - `disable` returns an untyped function
            return loss

        @torch.compiler.disable
        def record(self) -> None:
            self.enabled.append(gc.isenabled())

    module = Watching()
    trainer(ORTStrategy(fallback="error"), max_epochs=1).fit(module, loader())
    assert module.enabled == [False, *[True] * (len(loader()) - 1)]
    assert gc.isenabled()


def test_steps_outside_of_a_run_are_not_compiled() -> None:
    module, strategy = Net(), ORTStrategy(fallback="error")
    own = trainer(strategy, max_epochs=1)
    own.fit(module, loader())
    batch = next(iter(loader()))
    own.strategy.model = module
    graphs = len(explain(strategy).graphs)
    assert torch.is_tensor(own.strategy.predict_step(batch, 0))
    assert len(explain(strategy).graphs) == graphs


@pytest.mark.parametrize("strategy", ["auto", "ort"])
def test_logged_values_survive_an_error_of_the_step(strategy: str) -> None:
    class Failing(Net):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self.log("seen", float(batch_idx))
            if batch_idx == 2:
                raise KeyError("third batch")
            return super().training_step(batch, batch_idx)

    class Last(Callback):
        value = -1.0

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.value = float(trainer.callback_metrics["seen"])

    last = Last()
    with pytest.raises(KeyError, match="third batch"):
        trainer(strategy, max_epochs=1, callbacks=[last]).fit(Failing(), loader())
    assert last.value == 2


def test_log_raises_where_it_is_not_allowed() -> None:
    class Logging(Net):
        def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self.log("value", 1.0)
            return super().predict_step(batch, batch_idx)

    with pytest.raises(Exception, match="result collection is not registered"):
        trainer("ort").predict(Logging(), loader())


IMPORT = """
import sys
import logging
import lit_ort
assert "pytorch_lightning" not in sys.modules
from lightning_utilities.core import rank_zero
assert rank_zero.log.name.startswith("lightning."), rank_zero.log.name
import pytorch_lightning as pl
from pytorch_lightning.strategies import Strategy, StrategyRegistry
assert "ort" in StrategyRegistry and isinstance(lit_ort.ORTStrategy(), Strategy)
assert pl.__spec__.loader.__class__.__module__.startswith(("importlib", "_frozen")), pl.__spec__.loader
"""


@pytest.mark.slow
def test_the_other_package_is_registered_when_it_is_imported() -> None:
    process = run_code([sys.executable, "-c", IMPORT])
    assert process.returncode == 0, process.stderr


def _as_libraries_derive(package: str) -> tuple[Any, Any]:
    """A quiet Trainer and a module of a package, each of them and of its plugins derived from Lightning's."""
    pl = importlib.import_module(package)
    accelerators = importlib.import_module(f"{package}.accelerators")
    progress = importlib.import_module(f"{package}.callbacks.progress")

    class OwnTrainer(pl.Trainer): ...

    class OwnAccelerator(accelerators.CPUAccelerator): ...

    class OwnBar(progress.TQDMProgressBar): ...

    class OwnModule(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 2)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.linear(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Derived(OwnModule): ...

    def own_trainer(strategy: Any, max_epochs: int = 1) -> Any:
        settings: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
        settings |= {"devices": 1, "max_epochs": max_epochs}
        return OwnTrainer(strategy=strategy, accelerator=OwnAccelerator(), callbacks=[OwnBar()], **settings)

    return own_trainer, Derived


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_classes_that_libraries_derive_are_lightnings(package: str, caplog: pytest.LogCaptureFixture) -> None:
    own_trainer, module = _as_libraries_derive(package)
    own = own_trainer("ort")
    with caplog.at_level(logging.INFO, package):
        own.fit(module(), loader())
    assert [graph.kind for graph in explain(own).graphs] == ["fused"]
    assert any("1 graph (1 fused)" in line for line in caplog.messages)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_strategies_that_libraries_derive(package: str) -> None:
    class Counting(ORTStrategy):
        steps = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return super().training_step(*args, **kwargs)

    strategy = Counting(fallback="error")
    own_trainer, module = _as_libraries_derive(package)
    own_trainer(strategy).fit(module(), loader())
    assert strategy.steps == len(loader())


class Options:
    """An object in a checkpoint."""


def test_checkpoints_of_pytorch_lightning_before_2_6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its strategies have no `weights_only`, and it reads any object."""
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.strategies import Strategy

    def load_strategy(self: Any, checkpoint_path: Any) -> Any:
        return self.checkpoint_io.load_checkpoint(checkpoint_path)

    def load(self: Any, path: Any, map_location: Any = None) -> Any:
        return torch.load(path, map_location, weights_only=False)

    monkeypatch.setattr(Strategy, "load_checkpoint", load_strategy)
    monkeypatch.setattr(TorchCheckpointIO, "load_checkpoint", load)
    own_trainer, module = _as_libraries_derive("pytorch_lightning")
    first = own_trainer("ort")
    first.fit(module(), loader())
    checkpoint = first._checkpoint_connector.dump_checkpoint()
    first.strategy.save_checkpoint({**checkpoint, "of a user": Options()}, tmp_path / "a")
    again = own_trainer("ort", max_epochs=2)
    again.fit(module(), loader(), ckpt_path=tmp_path / "a")
    assert again.global_step == 2 * len(loader())


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")
def test_an_instance_works_with_the_other_package() -> None:
    import pytorch_lightning as pl

    class Other(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 2)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.linear(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    strategy = ORTStrategy(fallback="error")
    own = pl.Trainer(
        strategy=strategy,  # pyright: ignore[reportArgumentType] - registered as one of its strategies
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    own.fit(Other(), loader())
    assert own.strategy is strategy
    assert [graph.kind for graph in explain(strategy).graphs] == ["fused"]
    assert [kind.__module__ for kind in map(type, own.strategy._lightning_optimizers)] == [
        "pytorch_lightning.core.optimizer"
    ]


class CountsInNumPy(Net):
    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        predicted = self(batch[0]).argmax(-1)
        self.log("accuracy", (predicted.numpy() == batch[1].numpy()).mean())
        self.log_dict({"largest": predicted.numpy().max()})


def test_numbers_of_numpy_are_logged() -> None:
    eager, module = trainer("auto"), CountsInNumPy()
    runner = trainer(ORTStrategy(fallback="error"))
    (expected,) = eager.validate(module, loader(), verbose=False)
    (found,) = runner.validate(module, loader(), verbose=False)
    assert found == pytest.approx(expected)
