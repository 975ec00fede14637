"""`lit_ort.benchmark`: its measurements, its table, its errors, and that it doesn't change the module."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lit_ort
from lit_ort.benchmark import BaselineFigures, Benchmark, peak_memory
from lit_ort.benchmark.run import largest_error
from lit_ort.benchmark.training_step import Workload, optimizer_of, set_dropout_to_zero, without_dropout
from lit_ort.commands import benchmark as command
from lit_ort.errors import OptionsError
from tests.lightning_models import Net, OwnLog, loader, trainer

BASELINES = ("eager", "ort")
QUICK: dict[str, Any] = {"baselines": ("ort",), "rounds": 1}
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset a process's peak memory")


class Scored(nn.Module):
    """Returns the cross entropy of its scores."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), y)


class Noisy(Scored):
    """Draws random numbers besides dropout."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x), y)


class Strided(Scored):
    """Has an operator that no session supports."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = torch.as_strided(x, (3, 6), (6, 1))
        return super().forward(x, y) + self.head(self.body(rows)).mean()


class AsksForSteps(Net):
    """Its schedule is as long as the run."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        self.lengths = (steps, self.trainer.num_training_batches, self.trainer.max_epochs)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class AsksForData(Net):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), 1 / len(self.trainer.train_dataloader))  # pyright: ignore[reportArgumentType]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6), torch.randint(4, (8,))


def measured(module: nn.Module, inputs: Any = None, **settings: Any) -> Benchmark:
    inputs = batch() if inputs is None else inputs
    return lit_ort.benchmark(module, inputs, **{"baselines": BASELINES, "rounds": 3, **settings})


class Adapted(Scored):
    """Saves only some of its state, as fine-tuned modules do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "head" in name}


@pytest.mark.parametrize("make", [Adapted, pytest.param(Scored, marks=pytest.mark.sweep)])
def test_measures_each_baseline_without_changing_the_module(make: type[Scored]) -> None:
    module = make()
    before = copy.deepcopy({**dict(module.named_parameters()), **dict(module.named_buffers())})
    result = measured(module, clip=0.5)
    assert list(result.figures) == list(BASELINES)
    for figures in result.figures.values():
        assert len(figures.step_ms) == 3
        assert figures.median_ms > 0
        assert figures.first_step_s > 0
    error = result.figures["ort"].gradient_error
    assert error is not None
    assert error < 1e-5
    assert result.figures["eager"].gradient_error is None
    assert result.figures["ort"].cached_first_step_s is not None
    torch.testing.assert_close({**dict(module.named_parameters()), **dict(module.named_buffers())}, before)
    assert all(parameter.grad is None for parameter in module.parameters())
    text = str(result)
    assert "| eager |" in text
    assert "| ort |" in text
    assert "1 fused), no fallback" in text
    assert f"torch {importlib.metadata.version('torch')}" in text


def test_ratios_are_computed_from_medians() -> None:
    times = {"eager": (4.0, 90.0, 2.0), "ort": (1.0, 0.1, 70.0)}
    figures = {name: BaselineFigures(step_ms, first_step_s=1.0) for name, step_ms in times.items()}
    result = Benchmark("step", "machine", {}, figures)
    assert result.ratio("ort", "eager") == 0.25
    assert result.ratio("ort", "inductor") is None
    assert "| 0.25 |" in str(result)


@pytest.mark.sweep
@pytest.mark.parametrize("inputs", [{"x": batch()[0], "y": batch()[1]}, list(batch())])
def test_accepts_dictionaries_and_lists_as_batches(inputs: Any) -> None:
    assert measured(Scored(), inputs, **QUICK).figures["ort"].fallbacks == ()


@pytest.mark.slow
def test_logging_of_a_lightning_module_is_ignored() -> None:
    result = measured(Net(0.1), **QUICK)
    assert result.step.startswith("Net")
    assert result.figures["ort"].fallbacks == ()


def test_a_log_of_the_modules_own_runs() -> None:
    module = OwnLog()
    workload = Workload(module, (torch.randn(8, 6), torch.randint(4, (8,))))
    with workload.without_trainer():
        workload.forward(module, workload.batch)
    assert module.names == ["loss", "accuracy", "double"]


@pytest.mark.slow
def test_bf16_is_compared_under_autocast() -> None:
    x, y = batch()
    result = measured(Scored(), {"x": x, "y": y}, options=lit_ort.ORTOptions(precision="bf16-mixed"), rounds=1)
    error = result.figures["ort"].gradient_error
    assert error is not None
    assert error < 0.05
    assert "bf16-mixed" in result.step


@pytest.mark.slow
def test_a_step_with_random_numbers_draws_those_of_eager() -> None:
    result = measured(Noisy(), list(batch()), rounds=1)
    error = result.figures["ort"].gradient_error
    assert error is not None
    assert error < 1e-4


# Inductor takes a minute for the first step in an environment.
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_inductors_random_numbers_are_not_compared() -> None:
    result = measured(Noisy(), list(batch()), rounds=1, baselines=("eager", "inductor"))
    assert result.figures["inductor"].gradient_error is None
    assert "Inductor's error is not measured" in str(result)


@pytest.mark.slow
def test_fallbacks_are_reported() -> None:
    (reason,) = measured(Strided(), **QUICK).figures["ort"].fallbacks
    assert "strides" in reason


def test_the_largest_error() -> None:
    expected = {"loss": torch.tensor(1.0), "weight": torch.ones(4)}
    assert largest_error({**expected, "weight": torch.ones(4) * 1.1}, expected) == pytest.approx(0.1, rel=1e-3)
    assert largest_error({"loss": torch.tensor(1.0)}, expected) == pytest.approx(1.0)
    assert largest_error({**expected, "weight": torch.full((4,), math.nan)}, expected) == math.inf
    # A satisfied hinge loss and its gradients.
    zeros = {name: torch.zeros_like(value) for name, value in expected.items()}
    assert largest_error(zeros, zeros) == 0
    assert largest_error(expected, zeros) == math.inf


class OfBatchesAlone(Net):
    """Lightning passes the index of a batch to steps that take it."""

    def training_step(self, batch: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().training_step(batch, 0)

    def predict_step(self, batch: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().predict_step(batch, 0)


@pytest.mark.sweep
def test_a_step_without_the_index_of_the_batch(tmp_path: Path) -> None:
    module, batch = OfBatchesAlone(), next(iter(loader()))
    assert measured(module, batch, baselines=("eager",), rounds=1).figures["eager"].median_ms > 0
    assert lit_ort.plan_memory(module, batch).run_bytes > 0
    assert lit_ort.export(module, tmp_path / "m.onnx", batch, step="predict_step").outputs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"baselines": ("eager", "onnx")}, "must be one or more of eager, inductor, ort"),
        ({"baselines": ()}, "must be one or more of"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
        ({"loss": lambda output: None}, "scalar loss"),
    ],
)
def test_invalid_arguments_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        measured(Scored(), **settings)


def test_modules_without_a_step_raise() -> None:
    with pytest.raises(OptionsError, match="without a scalar loss"):
        measured(nn.Linear(6, 4), batch()[0])
    with pytest.raises(OptionsError, match="no parameter that requires a gradient"):
        measured(Scored().requires_grad_(False))
    manual = Net()
    manual.automatic_optimization = False
    with pytest.raises(OptionsError, match="uses manual optimization"):
        measured(manual)


class Rows(nn.Module):
    """Its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 3, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class NeedsClosure(Scored):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


@pytest.mark.parametrize("make", [Rows, NeedsClosure])
def test_steps_whose_optimizer_or_gradients_are_special(make: type[nn.Module]) -> None:
    inputs = torch.tensor([1, 2]) if make is Rows else batch()
    assert measured(make(), inputs, baselines=("eager",), rounds=1).figures["eager"].median_ms > 0


@pytest.mark.sweep
def test_a_benchmark_does_not_depend_on_those_before_it(tmp_path: Path) -> None:
    compiled = list[str]()
    options = lit_ort.ORTOptions(cache_dir=str(tmp_path / "cache"), dump_dir=str(tmp_path / "graphs"))
    for rows in (8, 8, 5, 3):
        module, (x, y) = Scored(), batch()
        state = torch.get_rng_state()
        figures = measured(module, (x[:rows], y[:rows]), options=options, **QUICK).figures["ort"]
        compiled.append(figures.ran.splitlines()[0])
        assert figures.gradient_error is not None
        assert 0 < figures.gradient_error < 1e-5
        assert torch.equal(torch.get_rng_state(), state)
    # Nothing is taken from an earlier one, nor compiled for any size.
    assert compiled == ["lit_ort: 1 graph (1 fused), no fallback, no graph break"] * 4
    assert not (tmp_path / "cache").exists()


def test_orders_of_norms_are_no_drop_probabilities() -> None:
    module = nn.ModuleDict({"loss": nn.TripletMarginLoss(p=2.0), "drop": nn.Dropout(0.4)})
    set_dropout_to_zero(module)
    assert (module["loss"].p, module["drop"].p) == (2.0, 0.0)


def test_dropout_is_disabled_in_modules_and_configurations() -> None:
    config = transformers.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    model: Any = transformers.BertForMaskedLM(config)
    ids = torch.randint(20, (2, 5))
    workload = without_dropout(Workload(model, {"input_ids": ids, "labels": ids}))
    losses = {float(workload.forward(workload.module.train(), workload.batch).detach()) for _ in range(3)}
    assert len(losses) == 1
    assert model.config.hidden_dropout_prob == 0.1


@ON_LINUX
def test_the_peak_memory_is_that_of_the_call() -> None:
    def run() -> None:
        torch.ones(100 * 2**20, dtype=torch.uint8)

    peak = peak_memory.peak_mb(run)
    assert peak is not None
    assert 90 < peak < 150


def make() -> tuple[nn.Module, Any]:
    return Scored(), batch()


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    command.main([f"{__name__}:make", "--rounds", "2", "--baselines", "eager", "ort", "--json", str(file)])
    assert "| ort |" in capsys.readouterr().out
    assert set(json.loads(file.read_text())["figures"]) == set(BASELINES)


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(SystemExit):
        command.main([f"{__name__}:make", "--json", str(tmp_path / "a_file" / "figures.json")])
    assert "figures.json: can't be written. Choose a file in a folder" in capsys.readouterr().err


def test_measurements_are_json() -> None:
    result = Benchmark("step", "machine", {}, {"ort": BaselineFigures((1.0,), 1.0, gradient_error=math.inf)})
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["figures"]["ort"]["gradient_error"] == "inf"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:make", "no_such_module can't be imported: No module named"),
        (f"{__name__}:no_such_function", f"{__name__} has no function no_such_function."),
        ("nothing", "nothing has no ':FUNCTION'."),
    ],
)
def test_the_command_line_names_what_is_missing(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([name])
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_busy_machine_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 80.0)
    assert "Other programs were running (80 % of" in str(measured(Scored(), baselines=("eager",), rounds=1))


def test_configure_optimizers_can_ask_the_trainer(capfd: pytest.CaptureFixture[str]) -> None:
    figures = measured(AsksForSteps(), next(iter(loader())), rounds=1).figures
    assert set(figures) == set(BASELINES)
    assert "GPU" not in capfd.readouterr().err
    module = AsksForSteps()
    optimizer_of(module)
    assert module.lengths == (1000, 1000, 1)
    with pytest.raises(RuntimeError, match="not attached"):
        module.trainer  # noqa: B018 - a property that raises


@pytest.mark.filterwarnings("ignore:You .* Skipping val loop:UserWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging:UserWarning")
def test_configure_optimizers_asks_the_trainer_of_the_last_fit() -> None:
    module = AsksForData()
    with pytest.raises(
        OptionsError, match="AsksForData.configure_optimizers fails .* Pass the module after trainer.fit"
    ):
        measured(module, next(iter(loader())), rounds=1, baselines=["eager"])
    own = trainer("auto", max_epochs=1)
    own.fit(module, loader())
    assert measured(module, next(iter(loader())), rounds=1, baselines=["eager"]).figures
    assert module.trainer is own
