"""`ort_pipeline` on two and four ranks beside one process with all stages."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import lit_ort
from lit_ort import ORTPipelineStrategy
from lit_ort.errors import OptionsError
from tests.distributed.models import Staged
from tests.lightning_models import Net, loader, trainer
from tests.ranks import message_of, run_on_ranks

# One launch serves all tests of the file.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipeline")]

# The last batch has 8 rows, so that neither divides into 4 micro-batches and one of them into 3.
ROWS, BATCH = 38, 10
ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
Weights = dict[str, Tensor]


def strict(**arguments: Any) -> ORTPipelineStrategy:
    return ORTPipelineStrategy(fallback="error", **{"micro_batches": 4, **arguments})


def fit(strategy: Any, module: LightningModule, **settings: Any) -> Any:
    seed_everything(1, verbose=False)
    data = settings.pop("data", None) or loader(ROWS, BATCH)
    checkpoint = settings.pop("ckpt_path", None)
    devices = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
    made = trainer(strategy, **{"devices": devices, "limit_val_batches": 1, **settings})
    made.fit(module, data, loader(), ckpt_path=checkpoint, weights_only=False)
    return made


def weights(made: Any) -> Weights:
    return {name: value.clone() for name, value in made.strategy.lightning_module_state_dict().items()}


RUNS: dict[str, tuple[dict[str, Any], Callable[[], Staged], dict[str, Any]]] = {
    "1f1b": ({}, Staged, {}),
    "gpipe": ({"schedule": "gpipe"}, Staged, {}),
    "interleaved": ({"schedule": "interleaved"}, partial(Staged, 4), {}),
    "three micro-batches": ({"micro_batches": 3}, Staged, {}),
    "accumulation and clip": ({}, Staged, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "AdamW": ({}, partial(Staged, optimizer=ADAM), {"gradient_clip_val": 0.5}),
}


def all_runs(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (arguments, make, settings) in RUNS.items():
        made = fit(strict(**arguments), make(), **settings)
        module = made.lightning_module
        results[name] = (weights(made), module.losses, float(made.callback_metrics["val_loss"]))
        results[f"in flight: {name}"] = module.pipeline.in_flight
        results[f"own: {name}"] = sorted({name.split(".")[2] for name, _ in module.named_parameters()})
        results[f"kinds: {name}"] = {graph.kind for graph in lit_ort.explain(made).graphs}
    half = fit(strict(), Staged(optimizer=ADAM), max_epochs=1)
    half.save_checkpoint(folder / "pipeline.ckpt", weights_only=False)
    resumed = fit(strict(), Staged(optimizer=ADAM), ckpt_path=folder / "alone.ckpt")
    results["resumed"] = weights(resumed)
    results["tested"] = resumed.validate(resumed.lightning_module, loader(), verbose=False)[0]["val_loss"]
    results["refused"] = refusals()
    dropping = partial(Staged, dropout=0.5)
    fit(strict(), dropping(), max_epochs=1).save_checkpoint(folder / "dropping.ckpt", weights_only=False)
    results["gone on with"] = [
        weights(fit(strict(), dropping(), **start)) for start in ({}, {"ckpt_path": folder / "dropping.ckpt"})
    ]
    return results


class Outside(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Parameter(torch.ones(2))


class Early(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.configure_model()


def refusals() -> dict[str, str]:
    tried: dict[str, Callable[[], Any]] = {
        "three": lambda: fit(strict(), Staged(3)),
        "interleaved": lambda: fit(strict(schedule="interleaved"), Staged(3)),
        "plain": lambda: fit(strict(), Net()),
        "outside": lambda: fit(strict(), Outside()),
        "early": lambda: fit(strict(), Early()),
        "short": lambda: fit(strict(micro_batches=9), Staged()),
        "size": lambda: fit(strict(pipeline_size=3), Staged()),
    }
    return {name: message_of(function) for name, function in tried.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a checkpoint of one process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = fit("auto", Staged(optimizer=ADAM), max_epochs=1)
    made.save_checkpoint(folder / "alone.ckpt", weights_only=False)
    return folder


@pytest.fixture(scope="module")
def results(alone: Path) -> list[dict[str, Any]]:
    return run_on_ranks(all_runs, 2, alone)


def assert_equal(found: Weights, expected: Weights, tolerance: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= tolerance * max(float(value.norm()), 1e-3), name


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_weights_are_those_of_one_process(name: str, results: list[dict[str, Any]]) -> None:
    _, make, settings = RUNS[name]
    expected = fit("auto", make(), **settings)
    merged, losses, validation = results[0][name]
    assert_equal(merged, weights(expected))
    assert losses == pytest.approx(expected.lightning_module.losses, rel=1e-5)
    assert results[1][name][1] == losses
    assert validation == pytest.approx(float(expected.callback_metrics["val_loss"]), rel=1e-5)


def test_each_process_keeps_its_stages_and_compiles_them(results: list[dict[str, Any]]) -> None:
    assert [found["own: 1f1b"] for found in results] == [["0"], ["1"]]
    assert [found["own: interleaved"] for found in results] == [["0", "2"], ["1", "3"]]
    assert [found["kinds: 1f1b"] for found in results] == [{"split", "forward"}, {"fused", "forward"}]


def test_as_many_micro_batches_are_kept_as_theory_says(results: list[dict[str, Any]]) -> None:
    """All of them with GPipe; the stages from here to the last with one forward and one backward in turn."""
    assert [found["in flight: gpipe"] for found in results] == [4, 4]
    assert [found["in flight: 1f1b"] for found in results] == [2, 1]


def test_checkpoints_are_those_of_one_process(results: list[dict[str, Any]], alone: Path) -> None:
    whole = fit("auto", Staged(optimizer=ADAM))
    assert_equal(results[0]["resumed"], weights(whole))
    resumed = fit("auto", Staged(optimizer=ADAM), ckpt_path=alone / "pipeline.ckpt")
    assert_equal(weights(resumed), weights(whole))
    tested = resumed.validate(resumed.lightning_module, loader(), verbose=False)[0]["val_loss"]
    assert results[0]["tested"] == pytest.approx(tested, rel=1e-5)


def test_a_run_that_goes_on_drops_what_one_in_a_piece_drops(results: list[dict[str, Any]]) -> None:
    """Though each of its sizes has its first step anew."""
    whole, resumed = results[0]["gone on with"]
    assert_equal(resumed, whole, tolerance=0.0)
    weight = "pipeline.stages.1.1.weight"
    assert not torch.equal(whole[weight], results[0]["1f1b"][0][weight])


def test_what_cannot_work_is_refused_with_a_sentence(results: list[dict[str, Any]]) -> None:
    refused = results[0]["refused"]
    assert "3 stages for the 2 processes of a pipeline" in refused["three"]
    assert "3 stages for 2 processes, and schedule='interleaved'" in refused["interleaved"]
    assert "that Net makes in configure_model, and it makes none" in refused["plain"]
    assert "extra is outside of its stages" in refused["outside"]
    assert "makes its lit_ort.Pipeline outside of configure_model" in refused["early"]
    assert "a batch of 8 rows, and micro_batches=9" in refused["short"]
    assert "pipeline_size=3 doesn't divide the 2 processes" in refused["size"]


def two_pipelines() -> dict[str, Any]:
    """Each pipeline takes every second row: together their batches are those of one process that are twice as large."""
    whole = loader(40, BATCH)
    dataset: Any = whole.dataset
    sampler = DistributedSampler(dataset, 2, int(os.environ["RANK"]) // 2, shuffle=False)
    made = fit(strict(pipeline_size=2), Staged(), data=DataLoader(dataset, BATCH, sampler=sampler))
    return {"weights": weights(made), "losses": made.lightning_module.losses}


def test_two_pipelines_average_their_gradients() -> None:
    found = run_on_ranks(two_pipelines, 4)
    expected = fit("auto", Staged(), data=loader(40, 2 * BATCH))
    assert_equal(found[0]["weights"], weights(expected))
    for part in found:
        assert part["losses"] == pytest.approx(expected.lightning_module.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batches": 0}, "micro_batches=0 must be a whole number above 0"),
        ({"pipeline_size": True}, "pipeline_size=True must be a whole number above 0"),
        ({"schedule": "zigzag"}, "schedule='zigzag' is not one of"),
    ],
)
def test_wrong_arguments_raise_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        ORTPipelineStrategy(**arguments)


@pytest.mark.parametrize("name", ["stages", "optimizer_in_graph", "find_unused_parameters"])
def test_unknown_arguments_raise_at_once(name: str) -> None:
    arguments: dict[str, Any] = {name: True}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        ORTPipelineStrategy(**arguments)
