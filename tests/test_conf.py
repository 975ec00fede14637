"""Every choice of every group composes and makes what it names; a misspelt one gets Hydra's own error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).parents[1] / "conf"
# What a choice needs beyond the packages that train.py needs.
EXTRA_MODULES = {"mlflow": "mlflow"}


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


EVERY_CHOICE = [
    (path.name, choice) for path in sorted(CONF.iterdir()) if path.is_dir() for choice in choices(path.name)
]


@pytest.fixture(autouse=True)
def hydra_session() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def composed(folder: Path, *overrides: str, name: str = "train") -> DictConfig:
    """The configuration as hydra.main hands it over, with `folder` as the run's folder."""
    full = compose(name, [*overrides, f"hydra.runtime.output_dir='{folder}'"], return_hydra_config=True)
    HydraConfig.instance().set_config(full)
    config = full.copy()
    OmegaConf.set_struct(config, False)
    config.pop("hydra")
    return config


def make(config: DictConfig, group: str) -> Any:
    """What the group's part of the configuration makes."""
    if group in ("logger", "callbacks"):
        return [instantiate(part) for part in config[group].values()]
    if group == "task":
        return instantiate(config.task, vocabulary_size=11, max_length=5)
    if group in ("optimizer", "scheduler"):
        task = instantiate(config.task, vocabulary_size=11, max_length=5, width=4, feed_forward=4)
        return task.configure_optimizers()
    if group in ("precision", "trainer"):
        return instantiate(config.trainer, logger=False)
    return instantiate(config[group])


def test_every_group_is_found() -> None:
    groups = {group for group, _ in EVERY_CHOICE}
    assert groups == {
        *("task", "data", "strategy", "precision", "optimizer", "scheduler", "trainer", "logger", "callbacks"),
        "experiment",
    }


@pytest.mark.parametrize(("group", "choice"), [pair for pair in EVERY_CHOICE if pair[0] != "experiment"])
def test_every_choice_composes_and_instantiates(
    group: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice in EXTRA_MODULES:
        pytest.importorskip(EXTRA_MODULES[choice])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # asked for at the first record only
    assert make(composed(tmp_path, f"{group}={choice}"), group)


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_composes_and_instantiates(experiment: str, tmp_path: Path) -> None:
    config = composed(tmp_path, f"experiment={experiment}")
    for group in ("task", "data", "optimizer", "trainer", "callbacks"):
        assert make(config, group)


def test_the_tutorials_experiment_does_not_depend_on_the_defaults(tmp_path: Path) -> None:
    config = composed(tmp_path, "experiment=transformer_lm_wikitext2")
    assert config.data["_target_"] == "tasks.text.WikiText2"
    task, data = make(config, "task"), make(config, "data")
    assert dict(task.hparams) == dict(
        vocabulary_size=11, max_length=5, layers=2, heads=2, width=200, feed_forward=200, dropout=0.2
    )
    assert (data.batch_size, data.eval_batch_size, data.bptt, data.min_frequency) == (20, 10, 35, 1)
    optimizer = task.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert (config.trainer.max_epochs, config.trainer.gradient_clip_val, config.trainer.log_every_n_steps) == (
        3,
        0.5,
        50,
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("none", None), ("step", "StepLR"), ("linear", "LinearLR"), ("cosine", "CosineAnnealingLR")],
)
def test_a_scheduler_reaches_the_task(choice: str, expected: str | None, tmp_path: Path) -> None:
    made = make(composed(tmp_path, f"scheduler={choice}"), "scheduler")
    assert (type(made["lr_scheduler"]).__name__ if isinstance(made, dict) else None) == expected


def test_values_reach_what_they_name(tmp_path: Path) -> None:
    overrides = ["trainer.max_steps=60", "optimizer.lr=0.5", "task.layers=1", f"data.dir={tmp_path}", "seed=7"]
    config = composed(tmp_path, *overrides)
    assert make(config, "trainer").max_steps == 60
    assert make(config, "optimizer").param_groups[0]["lr"] == 0.5
    assert len(make(config, "task").model.encoder.layers) == 1
    assert make(config, "data").dir == str(tmp_path)
    assert config.seed == 7


def test_the_default_strategy_is_ort() -> None:
    assert compose("train").strategy["_target_"] == "lit_ort.ORTStrategy"


def test_compare_takes_all_of_trains_values() -> None:
    config = compose("compare", ["trainer.max_steps=60", "data=wikitext2", "experiment=transformer_lm_wikitext2"])
    assert set(config) == {*compose("train"), "strategies"}
    assert list(config.strategies) == ["eager", "compile", "ort"]
    assert config.trainer.max_steps == 60


@pytest.mark.parametrize("name", ["train", "compare"])
def test_a_misspelt_choice_lists_the_choices(name: str) -> None:
    with pytest.raises(MissingConfigException, match=r"Could not find 'data/wikitext3'(.|\n)*python_docs\n\twikitext2"):
        compose(name, ["data=wikitext3"])


@pytest.mark.parametrize("override", ["trainer.max_stepz=3", "datas=wikitext2", "task.model.width=3"])
def test_a_misspelt_name_is_refused(override: str) -> None:
    with pytest.raises(ConfigCompositionException, match="Could not override"):
        compose("train", [override])
