"""`ort_pipeline` on two and four ranks, compared with one process that has all stages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lit_ort
from lit_ort import ORTPipelineStrategy
from lit_ort.errors import OptionsError
from tests.distributed.models import Staged, frozen_stage, normalized_stage
from tests.lightning_models import Net, loader, trainer
from tests.ranks import message_of, run_on_ranks

# All tests of the file share one launch.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipeline")]

# The last batch has 8 rows: 10 is not divisible by 4 micro-batches, and neither size is divisible by 3.
ROWS, BATCH = 38, 10
ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
Weights = dict[str, Tensor]


def strict(**arguments: Any) -> ORTPipelineStrategy:
    values: dict[str, Any] = {"fallback": "error", "micro_batches": 4, **arguments}
    return ORTPipelineStrategy(**values)


def fit(strategy: Any, module: LightningModule, **settings: Any) -> Any:
    seed_everything(1, verbose=False)
    data = settings.pop("data", None) or loader(ROWS, BATCH)
    checkpoint = settings.pop("ckpt_path", None)
    devices = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
    runner = trainer(strategy, **{"devices": devices, "limit_val_batches": 0, **settings})
    runner.fit(module, data, loader(), ckpt_path=checkpoint, weights_only=False)
    return runner


def weights(runner: Any) -> Weights:
    return {name: value.clone() for name, value in runner.strategy.lightning_module_state_dict().items()}


RUNS: dict[str, tuple[dict[str, Any], Callable[[], Staged], dict[str, Any]]] = {
    "1f1b": ({}, Staged, {"limit_val_batches": 1}),
    "gpipe": ({"schedule": "gpipe"}, Staged, {}),
    "interleaved": ({"schedule": "interleaved"}, partial(Staged, 4), {"limit_val_batches": 1}),
    "three micro-batches": ({"micro_batches": 3}, Staged, {}),
    "accumulation and clip": ({}, Staged, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    # Some micro-batches have no other class than the ignored one.
    "ignored classes, a frozen stage": (
        {"micro_batches": 5},
        partial(Staged, first=frozen_stage, loss=nn.CrossEntropyLoss(torch.arange(1.0, 5), ignore_index=1)),
        {},
    ),
    # Whose statistics are those of micro-batches.
    "batch normalization": (
        {"schedule": "gpipe", "micro_batches": 1},
        partial(Staged, last=normalized_stage),
        {"limit_val_batches": 1},
    ),
    "64-true": ({}, Staged, {"gradient_clip_val": 0.05, "precision": "64-true"}),
    "AdamW": ({}, partial(Staged, optimizer=ADAM), {"gradient_clip_val": 0.5}),
}
# The resumed run has AdamW, and another one clips.
SWEEP = ("three micro-batches", "64-true", "AdamW")
NORMAL = [name for name in RUNS if name not in SWEEP]


def metrics_of(runner: Any) -> dict[str, float]:
    return {name: float(value) for name, value in runner.callback_metrics.items()}


def validation_loss(runner: Any) -> float:
    runner.limit_val_batches = 1
    return runner.validate(runner.lightning_module, loader(), verbose=False)[0]["val_loss"]


def results_of(names: Sequence[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        arguments, make, settings = RUNS[name]
        runner = fit(strict(**arguments), make(), **settings)
        module = runner.lightning_module
        results[name] = (weights(runner), module.losses, metrics_of(runner))
        results[f"in flight: {name}"] = module.pipeline.in_flight
        results[f"stages: {name}"] = sorted({name.split(".")[2] for name, _ in module.named_parameters()})
        results[f"kinds: {name}"] = {graph.kind for graph in lit_ort.explain(runner).graphs}
    return results


def all_runs(folder: Path) -> dict[str, Any]:
    results = results_of(NORMAL)
    half = fit(strict(), Staged(optimizer=ADAM), max_epochs=1)
    half.save_checkpoint(folder / "pipeline.ckpt", weights_only=False)
    resumed = fit(strict(), Staged(optimizer=ADAM), ckpt_path=folder / "alone.ckpt")
    results["resumed"] = weights(resumed)
    results["tested"] = validation_loss(resumed)
    results["messages"] = error_messages()
    dropping = partial(Staged, dropout=0.5)
    fit(strict(), dropping(), max_epochs=1).save_checkpoint(folder / "dropping.ckpt", weights_only=False)
    results["complete and resumed"] = [
        weights(fit(strict(), dropping(), **start)) for start in ({}, {"ckpt_path": folder / "dropping.ckpt"})
    ]
    return results


class Outside(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Parameter(torch.ones(2))


class Measured(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits * self.scale, targets)


class Early(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.configure_model()


def error_messages() -> dict[str, str]:
    functions: dict[str, Callable[[], Any]] = {
        "three": lambda: fit(strict(), Staged(3)),
        "interleaved": lambda: fit(strict(schedule="interleaved"), Staged(3)),
        "plain": lambda: fit(strict(), Net()),
        "outside": lambda: fit(strict(), Outside()),
        "loss": lambda: fit(strict(), Staged(loss=Measured())),
        "sum": lambda: fit(strict(), Staged(loss=nn.CrossEntropyLoss(reduction="sum"))),
        "rounds": lambda: fit(strict(schedule="interleaved", micro_batches=5), Staged(4)),
        "early": lambda: fit(strict(), Early()),
        "short": lambda: fit(strict(micro_batches=9), Staged()),
        "size": lambda: fit(strict(pipeline_size=3), Staged()),
    }
    return {name: message_of(function) for name, function in functions.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of one process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    runner = fit("auto", Staged(optimizer=ADAM), max_epochs=1)
    runner.save_checkpoint(folder / "alone.ckpt", weights_only=False)
    return folder


@pytest.fixture(scope="module")
def results(alone: Path) -> list[dict[str, Any]]:
    return run_on_ranks(all_runs, 2, alone)


def assert_equal(actual: Weights, expected: Weights, tolerance: float = 1e-5) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert float((actual[name] - value).float().norm()) <= tolerance * max(float(value.float().norm()), 1e-3), name


@pytest.mark.parametrize("name", NORMAL)
def test_losses_and_weights_are_those_of_one_process(name: str, results: list[dict[str, Any]]) -> None:
    assert_like_one_process(name, results)


@pytest.mark.sweep
def test_more_runs() -> None:
    results = run_on_ranks(results_of, 2, SWEEP)
    for name in SWEEP:
        assert_like_one_process(name, results)


def assert_like_one_process(name: str, results: list[dict[str, Any]]) -> None:
    _, make, settings = RUNS[name]
    expected = fit("auto", make(), **settings)
    merged, losses, validation = results[0][name]
    assert_equal(merged, weights(expected))
    assert losses == pytest.approx(expected.lightning_module.losses, rel=1e-5)
    assert results[1][name][1] == losses
    assert validation == pytest.approx(metrics_of(expected), rel=1e-5)
    assert ("val_loss" in validation) == ("limit_val_batches" in settings)


def test_each_process_keeps_its_stages_and_compiles_them(results: list[dict[str, Any]]) -> None:
    assert [result["stages: 1f1b"] for result in results] == [["0"], ["1"]]
    assert [result["stages: interleaved"] for result in results] == [["0", "2"], ["1", "3"]]
    assert [result["kinds: 1f1b"] for result in results] == [{"split", "forward"}, {"fused", "forward"}]


def test_the_number_of_micro_batches_in_flight_is_the_theoretical_one(results: list[dict[str, Any]]) -> None:
    """All of them with GPipe; with 1F1B, the number of stages from this one to the last one."""
    assert [result["in flight: gpipe"] for result in results] == [4, 4]
    assert [result["in flight: 1f1b"] for result in results] == [2, 1]


def test_checkpoints_are_those_of_one_process(results: list[dict[str, Any]], alone: Path) -> None:
    whole = fit("auto", Staged(optimizer=ADAM))
    assert_equal(results[0]["resumed"], weights(whole))
    resumed = fit("auto", Staged(optimizer=ADAM), ckpt_path=alone / "pipeline.ckpt")
    assert_equal(weights(resumed), weights(whole))
    tested = validation_loss(resumed)
    assert results[0]["tested"] == pytest.approx(tested, rel=1e-5)


def test_a_resumed_run_uses_the_dropout_masks_of_an_uninterrupted_one(results: list[dict[str, Any]]) -> None:
    """Although a resumed run has another first step, in which schedules run their stages once more."""
    whole, resumed = results[0]["complete and resumed"]
    assert_equal(resumed, whole, tolerance=0.0)
    weight = "pipeline.stages.1.1.weight"
    assert not torch.equal(whole[weight], results[0]["1f1b"][0][weight])


def test_error_messages(results: list[dict[str, Any]]) -> None:
    messages = results[0]["messages"]
    assert "3 stages for the 2 processes of a pipeline" in messages["three"]
    assert "3 stages for 2 processes, but schedule='interleaved'" in messages["interleaved"]
    assert "that Net creates in configure_model, but it creates none" in messages["plain"]
    assert "extra is outside of its stages" in messages["outside"]
    assert "pipeline.loss.scale is a parameter of a Pipeline's loss" in messages["loss"]
    assert "has reduction='sum', but losses of micro-batches are combined to a mean" in messages["sum"]
    assert "schedule='interleaved' with micro_batches=5 and 4 stages: Interleaved 1F1B requires" in messages["rounds"]
    assert "creates its lit_ort.Pipeline outside of configure_model" in messages["early"]
    assert "a batch has 8 rows, but micro_batches=9" in messages["short"]
    assert "pipeline_size=3 doesn't divide the 2 processes" in messages["size"]


def two_pipelines() -> dict[str, Any]:
    """Each pipeline has every second row; together, their batches are those of one process, twice as large."""
    whole = loader(40, BATCH)
    dataset: Any = whole.dataset
    sampler = DistributedSampler(dataset, 2, int(os.environ["RANK"]) // 2, shuffle=False)
    runner = fit(strict(pipeline_size=2), Staged(), data=DataLoader(dataset, BATCH, sampler=sampler))
    return {"weights": weights(runner), "losses": runner.lightning_module.losses}


@pytest.mark.sweep
def test_two_pipelines_average_their_gradients() -> None:
    results = run_on_ranks(two_pipelines, 4)
    expected = fit("auto", Staged(), data=loader(40, 2 * BATCH))
    assert_equal(results[0]["weights"], weights(expected))
    for result in results:
        assert result["losses"] == pytest.approx(expected.lightning_module.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batches": 0}, "micro_batches=0 must be an integer above 0"),
        ({"pipeline_size": True}, "pipeline_size=True must be an integer above 0"),
        ({"schedule": "zigzag"}, "schedule='zigzag' is not one of"),
    ],
)
def test_invalid_arguments_raise_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        ORTPipelineStrategy(**arguments)


@pytest.mark.parametrize("name", ["stages", "optimizer_in_graph", "find_unused_parameters"])
def test_unknown_arguments_raise_at_once(name: str) -> None:
    arguments: dict[str, Any] = {name: True}
    with pytest.raises(OptionsError, match=f"Unknown option '{name}'"):
        ORTPipelineStrategy(**arguments)
