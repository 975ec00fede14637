"""Lightning's features have the same effect under `strategy="ort"` as in eager."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_ort import ORTBackend, ORTOptions, ORTPrecision, ORTStrategy, explain
from tests.lightning_models import BATCH, Net, assert_same_weights, loader, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging:UserWarning"),
    pytest.mark.filterwarnings("ignore:You .* Skipping val loop:UserWarning"),
]

Make = Callable[[], LightningModule]


def strict() -> ORTStrategy:
    return ORTStrategy(fallback="error")


def fit(strategy: Any, make: Make = Net, loaders: Any = None, **settings: Any) -> LightningModule:
    seed_everything(1, verbose=False)
    module = make()
    trainer(strategy, **settings).fit(module, loader() if loaders is None else loaders, loader(batch=10))
    return module


def assert_same_run(make: Make = Net, loaders: Callable[[], Any] = loader, **settings: Any) -> LightningModule:
    """Trains with both strategies. Settings that can't be shared by two runs are functions without arguments."""

    def new_settings() -> dict[str, Any]:
        return {name: value() if callable(value) else value for name, value in settings.items()}

    expected = fit("auto", make, loaders(), **new_settings())
    strategy = strict()
    actual = fit(strategy, make, loaders(), **new_settings())
    kinds = {graph.kind for graph in explain(strategy).graphs if graph.name.startswith("training")}
    # A backward of one's own need not be linear in the gradient of the loss.
    assert ("split" if make is OwnGradient else "fused") in kinds
    assert_same_weights(actual, expected)
    assert getattr(actual, "values", []) == pytest.approx(getattr(expected, "values", []), rel=1e-4)
    return actual


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation by epoch": {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]},
    "weight averaging": {"callbacks": lambda: [StochasticWeightAveraging(0.05, 1)], "max_epochs": 3},
    "moving average": {"callbacks": lambda: [EMAWeightAveraging(decay=0.9)]},
    "simple profiler": {"profiler": "simple"},
    "advanced profiler": {"profiler": "advanced"},
    "anomalies detected": {"detect_anomaly": True},
    "few batches again": {"overfit_batches": 2},
    "limits": {"limit_train_batches": 3, "limit_val_batches": 1, "num_sanity_val_steps": 2},
    "one batch of each": {"fast_dev_run": True},
    "validation within the epoch": {"val_check_interval": 2},
}


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings(
    "ignore:Swapping scheduler:UserWarning", "ignore:You requested to overfit but enabled:UserWarning"
)
@pytest.mark.parametrize("settings", [pytest.param(s, id=name) for name, s in SETTINGS.items()])
def test_same_run_under(settings: dict[str, Any]) -> None:
    assert_same_run(**settings)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log:UserWarning")
def test_barebones() -> None:
    settings: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"))
    runs = [fit(s, barebones=True, enable_checkpointing=None, **settings) for s in ("auto", strict())]
    assert_same_weights(runs[1], runs[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.sweep
def test_the_pytorch_profiler_records_the_step(tmp_path: Path) -> None:
    from lightning.pytorch.profilers import PyTorchProfiler

    fit(strict(), profiler=PyTorchProfiler(tmp_path, "profile", export_to_chrome=False, max_name_column_width=99))
    assert "ORTStrategy.validation_step" in next(tmp_path.glob("fit-profile*.txt")).read_text()


class Clipping(Net):
    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | int | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(optimizer, 0.02, "norm")


class Hooks(Net):
    """Records the gradients in every hook around the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def note(self) -> None:
        self.values.append(sum(float(p.grad.abs().sum()) for p in self.parameters() if p.grad is not None))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note()

    def on_before_backward(self, loss: Tensor) -> None:
        self.values.append(float(loss.detach()))

    def on_after_backward(self) -> None:
        self.note()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note()


class Gan(LightningModule):
    """Manual optimization with two optimizers, each for one half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
        self.values: list[float] = []

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, _ = batch
        noise = real[:, :3].flip(0)
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues] - two, as configured
        self.toggle_optimizer(first)
        score = self.discriminator(self(noise))
        loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        true, false = self.discriminator(real), self.discriminator(self(noise).detach())
        other = F.binary_cross_entropy_with_logits(true, torch.ones_like(true))
        other = other + F.binary_cross_entropy_with_logits(false, torch.zeros_like(false))
        second.zero_grad()
        self.manual_backward(other)
        second.step()
        self.untoggle_optimizer(second)
        self.values += [float(loss.detach()), float(other.detach())]

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(half.parameters(), 0.01) for half in (self.generator, self.discriminator)]


@dataclasses.dataclass
class Sample:
    x: Tensor
    label: str | None


class Complicated(Net):
    """Batches with lists, tuples, None, a dataclass, text and numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, (second, nothing), sample = batch["first"], batch["more"], batch["sample"]
        assert nothing is None
        scale = {"half": 0.5}.get(sample.label, 1.0)
        loss = F.cross_entropy(self(first[0]), first[1]) + scale * self(second).square().mean()
        loss = loss + sample.x.sum() * sum(p.square().sum() for p in self.parameters()) * 1e-3
        if batch["numbers"][0] > 1:
            loss = loss * 2
        self.log("loss", loss)
        return loss


class Batches(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        for k, (x, y) in enumerate(loader()):
            sample = Sample(x.mean(0), "half" if k % 2 else None)
            yield {"first": [x, y], "more": (x * 2, None), "sample": sample, "numbers": [k % 3]}


class Unused(Net):
    """Has parameters that a step doesn't use, and one that is frozen in the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)
        self.body[0].weight.requires_grad_(False)

    def on_after_backward(self) -> None:
        assert self.spare.weight.grad is None
        assert (self.body[0].weight.grad is None) == (self.current_epoch == 0)

    def on_train_epoch_start(self) -> None:
        self.body[0].weight.requires_grad_(self.current_epoch > 0)


class Growing(Net):
    """Gets one more layer in its second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.tail: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(super().forward(x))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.tail = nn.Linear(4, 4)
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": list(self.tail.parameters())})


class Thawing(BaseFinetuning):
    """Trains the body from the second epoch on."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=0.05)


class Headed(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


class Double(torch.autograd.Function):
    """A Function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * 3


class OwnGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.body[0]
        return super().forward(Double.apply(x * first.weight.mean()))


class Shared(Net):
    """Calls one module twice, with a hook that changes its output, and once without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(6, 6)
        self.square.register_forward_hook(lambda module, inputs, output: output.tanh())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.square(x).mean()
        return super().forward(self.square(self.square(x)) + shift)


class Autocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.body(x)
        return self.head(x.float())


MODULES: dict[str, Make] = {
    "custom autograd function": OwnGradient,
    "custom clipping": Clipping,
    "hooks": Hooks,
    "parameters that are added later": Growing,
    "unused, frozen and thawed parameters": Unused,
    "shared modules, hooks, no_grad": Shared,
}


# Dynamo creates an instance of a Function.
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_same_run_of(make: Make) -> None:
    assert_same_run(make)


def test_a_finetuning_callback() -> None:
    module = assert_same_run(Headed, callbacks=lambda: [Thawing()])
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_manual_optimization_with_two_optimizers() -> None:
    module = assert_same_run(Gan, loaders=lambda: loader(), callbacks=list)
    assert isinstance(module, Gan)
    assert len(module.values) == 20


@pytest.mark.slow
def test_batches_of_many_types() -> None:
    assert_same_run(Complicated, lambda: DataLoader(Batches(), batch_size=None))


def test_several_loaders_at_once() -> None:
    class Pairs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["a"], batch_idx) + 0.5 * F.cross_entropy(
                self(batch["b"][0]), batch["b"][1]
            )

    assert_same_run(Pairs, lambda: CombinedLoader({"a": loader(), "b": loader(24)}, "max_size_cycle"))


def test_several_validation_loaders() -> None:
    class Two(Net):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"val_{dataloader_idx}", F.cross_entropy(self(batch[0]), batch[1]), add_dataloader_idx=False)

    metrics = []
    for strategy in ("auto", strict()):
        seed_everything(1, verbose=False)
        runner = trainer(strategy)
        runner.fit(Two(), loader(), [loader(batch=10), loader(30, 10), loader(batch=10)])
        metrics.append({name: float(value) for name, value in runner.callback_metrics.items()})
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)
    assert {"val_0", "val_1", "val_2"} <= metrics[0].keys()
    explanation = explain(runner)
    assert not explanation.is_partly_eager
    assert explanation.recompiles == ()


@pytest.mark.filterwarnings("ignore:.*checkpoint:UserWarning")
def test_learning_rate_finder(tmp_path: Path) -> None:
    losses = []
    for strategy in ("auto", strict()):
        seed_everything(1, verbose=False)
        module = Net()
        runner = trainer(strategy, tmp_path, max_epochs=1)
        finder = Tuner(runner).lr_find(module, loader(), num_training=12, attr_name="learning_rate", max_lr=0.5)
        assert finder is not None
        losses.append(finder.results["loss"])
        runner.fit(module, loader())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.*checkpoint:UserWarning")
def test_batch_size_finder(tmp_path: Path) -> None:
    class Data(LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2

        def train_dataloader(self) -> Any:
            return loader(batch=self.batch_size)

        def val_dataloader(self) -> Any:
            return loader(batch=10)

    sizes, strategy = [], strict()
    for each in ("auto", strategy):
        data, runner = Data(), trainer(each, tmp_path, max_epochs=1)
        size = Tuner(runner).scale_batch_size(Net(), datamodule=data, max_trials=3, steps_per_trial=2)
        sizes.append((size, data.batch_size))
    assert sizes[0] == sizes[1]
    # One graph for the first size, and one for all others.
    assert sum(graph.name.startswith("training") for graph in explain(strategy).graphs) == 2


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Tensor] = []
        self.epochs: list[int] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *args: Any, **kwargs: Any) -> None:
        self.batches.append(prediction)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append(len(predictions))


class Several(Net):
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().predict_step(batch, batch_idx)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_predictions_are_written(inference_mode: bool) -> None:
    module, writer = Several(), Writer()
    predictions = trainer(strict(), callbacks=[writer], inference_mode=inference_mode).predict(
        module, [loader(20, 10), loader(rows=8)]
    )
    assert predictions is not None
    assert [len(part) for part in predictions] == [2, 1]
    assert writer.epochs == [2]
    expected = [module.eval()(x).softmax(-1) for batches in (loader(20, 10), loader(rows=8)) for x, _ in batches]
    for prediction, reference in zip(writer.batches, expected, strict=True):
        torch.testing.assert_close(prediction, reference.detach())


class Rows(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(batch=10)


# jsonargparse deprecates how Lightning uses it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    settings = ["--trainer.max_epochs=1", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    settings += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    modules = []
    for strategy in ("auto", "ort"):
        args = ["fit", f"--trainer.strategy={strategy}", "--trainer.accelerator=cpu", *settings]
        cli = LightningCLI(Net, Rows, args=args, save_config_callback=None, seed_everything_default=1)
        modules.append(cli.model)
    assert_same_weights(modules[1], modules[0])


def test_several_fits_and_evaluations_by_one_trainer() -> None:
    modules = []
    for strategy in ("auto", strict()):
        seed_everything(1, verbose=False)
        module, runner = Net(), trainer(strategy, max_epochs=1)
        runner.fit(module, loader(), loader(batch=10))
        runner.validate(module, loader(batch=10), verbose=False)
        runner.fit_loop.max_epochs = 2
        runner.fit(module, loader(), loader(batch=10))
        other = Net()
        runner.fit_loop.max_epochs = 3
        runner.fit(other, loader())
        modules.append(nn.ModuleList([module, other]))
    assert_same_weights(modules[1], modules[0])


def test_calls_of_the_module_in_hooks_are_not_compiled() -> None:
    class Calling(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            x = next(iter(loader()))[0]
            with torch.no_grad():
                pl_module(x)
            pl_module(x).sum().backward()
            pl_module.zero_grad()

    assert_same_run(callbacks=lambda: [Calling()])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_non_finite_values_propagate_as_in_eager(bad: float, clip: float | None) -> None:
    x, y = next(iter(loader()))
    x = x.clone()
    x[0, 0] = bad

    def data() -> Any:
        return DataLoader(TensorDataset(x, y), BATCH)

    states = []
    for strategy in ("auto", strict()):
        module = fit(strategy, loaders=data(), max_epochs=1, gradient_clip_val=clip)
        assert isinstance(module, Net)
        states.append((module.losses, [value.isnan() for value in module.state_dict().values()]))
    assert [str(loss) for loss in states[0][0]] == [str(loss) for loss in states[1][0]]
    for a, b in zip(states[0][1], states[1][1], strict=True):
        assert torch.equal(a, b)


def test_an_anomaly_is_detected() -> None:
    x, y = next(iter(loader()))
    data = DataLoader(TensorDataset(x * float("inf"), y), BATCH)
    with pytest.raises(RuntimeError, match="nan"):
        fit(strict(), loaders=data, max_epochs=1, detect_anomaly=True)


@pytest.mark.parametrize("compile", ["auto", "always"])
def test_a_mocked_clock_ticks_for_the_program_alone(compile: Literal["auto", "always"]) -> None:
    with mock.patch("time.perf_counter", side_effect=AssertionError("not the program's call")):
        fit(ORTStrategy(compile=compile))


def test_the_same_seed_produces_the_same_bits() -> None:
    def run() -> tuple[list[float], dict[str, Tensor]]:
        module = fit(strict(), lambda: Net(dropout=0.3), max_epochs=3)
        assert isinstance(module, Net)
        return module.losses, module.state_dict()

    (losses, weights), (again, others) = run(), run()
    assert losses == again
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


def test_fabric() -> None:
    weights = []
    for backend in (None, "ort"):
        seed_everything(1, verbose=False)
        fabric = Fabric(accelerator="cpu", devices=1)
        plain = Net()
        options: dict[str, Any] = {"fallback": "error"}
        module: Any = plain if backend is None else torch.compile(plain, backend=backend, options=options)
        prepared, optimizer = fabric.setup(module, torch.optim.SGD(plain.parameters(), 0.1))
        for x, y in fabric.setup_dataloaders(loader()):
            loss = F.cross_entropy(prepared(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        weights.append(plain)
    assert_same_weights(weights[1], weights[0])


@pytest.mark.parametrize("what", ["module", "function"])
def test_fabric_with_mixed_precision(what: str) -> None:
    """Fabric's hook on the module's output, which checks that `fabric.backward` is called, is outside of graphs."""
    weights, engine = [], ORTBackend(ORTOptions(fallback="error"))
    for is_compiled in (False, True):
        seed_everything(1, verbose=False)
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        plain = Net()
        module, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.1))
        if is_compiled and what == "module":
            module = torch.compile(module, backend=engine)

        def step(x: Tensor, y: Tensor, module: Any = module) -> Tensor:
            return F.cross_entropy(module(x), y)

        if is_compiled and what == "function":
            step = torch.compile(step, backend=engine)
        for x, y in fabric.setup_dataloaders(loader()):
            loss = step(x, y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        weights.append(plain)
    assert_same_weights(weights[1], weights[0], 1e-2)
    explanation = explain(engine)
    assert len(explanation.graphs) == (1 if what == "module" else 2)
    assert "bf16-mixed" in explanation.graphs[0].precision
    assert explanation.counts.endswith("no fallback, no graph break" if what == "module" else ", 1 by design")
    assert all(graph_break.by_design for graph_break in explanation.breaks)


def test_fabrics_check_is_kept() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    module = torch.compile(fabric.setup(Net()), backend=ORTBackend(ORTOptions(fallback="error")))
    loss = module(torch.zeros(2, 6)).sum()
    with pytest.raises(RuntimeError, match="fabric.backward"):
        loss.backward()


class Lazy(LightningModule):
    """Its parameters get their shapes in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("compile", ["auto", "always"])
def test_lazy_modules(compile: Any) -> None:
    weights = []
    for strategy in ("auto", ORTStrategy(compile=compile)):
        torch.manual_seed(0)
        module = Lazy()
        trainer(strategy).fit(module, loader())
        weights.append(module)
    assert_same_weights(weights[1], weights[0])


@pytest.mark.parametrize("settings", [{"precision": "bf16-mixed"}, {"plugins": [ORTPrecision("bf16-mixed")]}])
def test_hooks_can_enter_the_context_of_steps(settings: dict[str, Any]) -> None:
    dtypes = []

    class Ending(Net):
        def on_train_epoch_end(self) -> None:
            with self.trainer.precision_plugin.forward_context():
                dtypes.append(self.head(torch.zeros(2, 16)).dtype)

    trainer("ort", max_epochs=1, **settings).fit(Ending(), loader())
    assert dtypes == [torch.bfloat16]


@torch.no_grad()
def update_momentum(module: nn.Module, average: nn.Module) -> None:
    for target, source in zip(average.parameters(), module.parameters(), strict=True):
        target.data = target.data * 0.9 + source.data * 0.1


class MovingAverage(Net):
    """Compares itself with a moving average of its weights, as MoCo, BYOL and DINO do."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.body).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        update_momentum(self.body, self.average)
        return F.mse_loss(self.body(batch[0]), self.average(batch[0] + 0.1)) + 0 * self.head.weight.sum()


@pytest.mark.filterwarnings("ignore:update_momentum of training_step runs in eager:lit_ort.errors.LitOrtWarning")
def test_only_the_update_of_a_moving_average_is_left_in_eager() -> None:
    modules = []
    for strategy in ("auto", ORTStrategy(compile="always")):
        torch.manual_seed(0)
        modules.append(MovingAverage())
        runner = trainer(strategy, max_epochs=1)
        runner.fit(modules[-1], loader())
    assert_same_weights(modules[1], modules[0])
    assert [graph.kind for graph in explain(runner).graphs] == ["fused"]
