"""Every choice of every group is composed and instantiated; Hydra reports a misspelled one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, InstantiationException, MissingConfigException
from lightning.pytorch import Trainer
from lit_ort_tasks.commands.train import part_of
from lit_ort_tasks.data.tokenization import train_byte_level_bpe, train_wordpiece
from omegaconf import DictConfig, OmegaConf

from lit_ort import ORTOptions

SHAPES = ("constant", "linear", "cosine", "polynomial")
CONF = Path(__file__).parents[1] / "conf"
# Choices that need a further package, and a module of it.
EXTRA_MODULES = {"mlflow": "mlflow", "wandb": "wandb", "optuna": "hydra_plugins.hydra_optuna_sweeper"}
# Overlays, which other tests compose.
OVERLAYS = ("experiment", "debug", "hparams_search")


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
    """Compose the configuration as hydra.main does, with `folder` as the folder of the run."""
    full = compose(name, [*overrides, f"hydra.runtime.output_dir='{folder}'"], return_hydra_config=True)
    HydraConfig.instance().set_config(full)
    config = full.copy()
    OmegaConf.set_struct(config, False)
    config.pop("hydra")
    return config


def data_arguments(target: str) -> dict[str, Any]:
    """The arguments of a task that follow from the data."""
    words = {
        "lit_ort_tasks.transformer_lm.TransformerLM": {"vocabulary_size": 11},
        "lit_ort_tasks.pipeline_lm.PipelineLM": {"vocabulary_size": 11},
    }
    bert = train_wordpiece(["a few words"], 30)
    subwords = {
        "lit_ort_tasks.gpt2.GPT2": {"tokenizer": train_byte_level_bpe(["a few words"], 260)},
        "lit_ort_tasks.bert_pretrain.BertPretrain": {"tokenizer": bert, "vocabulary_size": len(bert)},
        "lit_ort_tasks.bert_finetune.BertFinetune": {"tokenizer": bert, "labels": ["one", "two"]},
    }
    return (words | subwords)[target] | {"max_length": 5}


def make(config: DictConfig, group: str) -> Any:
    """Instantiate the part of a group."""
    if group in ("logger", "callbacks"):
        return [part_of(part) for part in config[group].values()]
    if group == "task":
        return part_of(config.task, **data_arguments(config.task["_target_"]))
    if group in ("optimizer", "scheduler"):
        task = make(config, "task")
        task.trainer = Trainer(max_steps=10, logger=False)
        task.configure_model()
        return task.configure_optimizers()
    if group in ("precision", "trainer"):
        return part_of(config.trainer, logger=False)
    return part_of(config[group])


def test_every_group_is_found() -> None:
    groups = {group for group, _ in EVERY_CHOICE}
    assert groups == {
        *("task", "data", "strategy", "precision", "optimizer", "scheduler", "trainer", "logger", "callbacks"),
        "export",
        *OVERLAYS,
    }


@pytest.mark.parametrize(("group", "choice"), [pair for pair in EVERY_CHOICE if pair[0] not in OVERLAYS])
@pytest.mark.sampled(20)
def test_every_choice_composes_and_instantiates(
    group: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice in EXTRA_MODULES:
        pytest.importorskip(EXTRA_MODULES[choice])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # not used before the first record
    # Further callbacks are added to the default ones, whose values a task sets.
    override = f"+callbacks={choice}" if group == "callbacks" and choice != "default" else f"{group}={choice}"
    assert make(composed(tmp_path, override), group)


@pytest.mark.parametrize("optimizer", choices("optimizer"))
def test_the_state_of_every_optimizer_has_plain_values(optimizer: str, tmp_path: Path) -> None:
    made = make(composed(tmp_path, f"optimizer={optimizer}"), "optimizer")
    torch.save(made.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["param_groups"][0]["lr"] > 0


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_composes_and_instantiates(experiment: str, tmp_path: Path) -> None:
    # Without the models of the hub and in small sizes.
    sizes = {"transformer": [], "pipeline": ["task.layers=2", "task.width=32"]}
    others = ["model.pretrained=null", "model.layers=1", "model.width=32"]
    config = composed(tmp_path, f"experiment={experiment}", *sizes.get(experiment.split("_")[0], others))
    for group in ("task", "data", "optimizer", "trainer", "callbacks"):
        assert make(config, group)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("task", choices("task"))
@pytest.mark.parametrize("debug", choices("debug"))
def test_every_debug_overlay_sets_the_trainer_of_every_task(debug: str, task: str, tmp_path: Path) -> None:
    plain, config = composed(tmp_path, f"task={task}"), composed(tmp_path, f"task={task}", f"debug={debug}")
    assert {key for key in config if config[key] != plain[key]} == {"trainer"}
    trainer = make(config, "trainer")
    if debug == "overfit":
        assert (trainer.max_epochs, trainer.max_steps, trainer.check_val_every_n_epoch) == (25, -1, 5)


def test_a_search_varies_values_that_every_task_has(tmp_path: Path) -> None:
    pytest.importorskip(EXTRA_MODULES["optuna"])
    for task in choices("task"):
        config = composed(tmp_path, "hparams_search=optuna", f"task={task}")
        sweeper = HydraConfig.get().sweeper
        assert sweeper["_target_"].endswith("OptunaSweeper")
        assert sweeper.params
        for key in sweeper.params:
            OmegaConf.select(config, key, throw_on_missing=True)


def test_callbacks_are_added_by_name_or_by_list(tmp_path: Path) -> None:
    default = list(composed(tmp_path).callbacks)
    expected = [*default, "early_stopping", "learning_rate_monitor"]
    for override in (
        "+callbacks=[early_stopping,learning_rate_monitor]",
        "callbacks=[default,early_stopping,learning_rate_monitor]",
    ):
        config = composed(tmp_path, override, "callbacks.early_stopping.patience=7")
        assert list(config.callbacks) == expected
        assert make(config, "callbacks")[-2].patience == 7


def test_the_tutorials_experiment_does_not_depend_on_the_defaults(tmp_path: Path) -> None:
    config = composed(tmp_path, "experiment=transformer_lm_wikitext2")
    assert config.data["_target_"] == "lit_ort_tasks.data.text.WikiText2"
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
    [("none", None), ("step", "StepLR"), *((shape, "LambdaLR") for shape in SHAPES)],
)
def test_a_scheduler_reaches_the_task(choice: str, expected: str | None, tmp_path: Path) -> None:
    optimizers = make(composed(tmp_path, f"scheduler={choice}"), "scheduler")
    settings = optimizers["lr_scheduler"] if isinstance(optimizers, dict) else None
    schedule = settings["scheduler"] if isinstance(settings, dict) else settings
    assert (type(schedule).__name__ if schedule is not None else None) == expected
    assert (isinstance(settings, dict) and settings["interval"] == "step") == (choice in SHAPES)


@pytest.mark.parametrize("task", choices("task"))
@pytest.mark.sampled(2)
def test_every_task_trains_without_a_schedule_and_with_torchs(task: str, tmp_path: Path) -> None:
    assert isinstance(make(composed(tmp_path, f"task={task}", "scheduler=none"), "scheduler"), torch.optim.Optimizer)
    config = composed(tmp_path, f"task={task}", "scheduler=step")
    if "warmup" in config.scheduler:
        with pytest.raises(InstantiationException, match=r"has no option scheduler.warmup.*~scheduler.warmup"):
            make(config, "scheduler")
        config = composed(tmp_path, f"task={task}", "scheduler=step", "~scheduler.warmup")
    assert isinstance(make(config, "scheduler")["lr_scheduler"], torch.optim.lr_scheduler.StepLR)


def test_values_reach_their_objects(tmp_path: Path) -> None:
    overrides = ["trainer.max_steps=60", "optimizer.lr=0.5", "task.layers=1", f"data.dir={tmp_path}", "seed=7"]
    config = composed(tmp_path, *overrides)
    assert make(config, "trainer").max_steps == 60
    assert make(config, "optimizer").param_groups[0]["lr"] == 0.5
    assert len(make(config, "task").model.encoder.layers) == 1
    assert make(config, "data").dir == str(tmp_path)
    assert config.seed == 7


def test_a_task_selects_its_data_and_optimizer_unless_they_are_set(tmp_path: Path) -> None:
    config = composed(tmp_path, "task=gpt2")
    assert config.data["_target_"] == "lit_ort_tasks.data.text_blocks.TextBlocks"
    assert make_targets(config) == ("torch.optim.AdamW", "linear", "lit_ort_tasks.data.text_blocks.count_targets")
    assert composed(tmp_path, "task=bert_pretrain").callbacks.last.every_n_train_steps == 250
    config = composed(tmp_path, "task=bert_finetune", "data=table", "optimizer=lamb", "scheduler=cosine")
    assert config.data["_target_"] == "lit_ort_tasks.data.labelled_text.Table"
    assert make_targets(config) == ("pytorch_optimizer.Lamb", "cosine", "lit_ort.callbacks.first_dimension")


def make_targets(config: DictConfig) -> tuple[str, str, str]:
    counter = config.callbacks.statistics.count_items.path
    return config.optimizer["_target_"], config.scheduler.shape, counter


def test_the_recipes_are_those_of_their_sources(tmp_path: Path) -> None:
    gpt2 = composed(tmp_path, "experiment=gpt2_wikitext103")
    assert gpt2.model.pretrained == gpt2.data.tokenizer == "openai-community/gpt2"
    assert (gpt2.data.block, gpt2.data.batch_size, gpt2.data.eval_batch_size) == (1024, 1, 4)
    assert (gpt2.trainer.max_epochs, gpt2.trainer.accumulate_grad_batches, gpt2.optimizer.weight_decay) == (5, 16, 0.01)
    one = composed(tmp_path, "experiment=bert_large_phase1", "data.dir=shards")
    assert (one.model.layers, one.model.heads, one.model.width) == (24, 16, 1024)
    assert (one.data.batch_size * one.trainer.accumulate_grad_batches, one.trainer.max_steps) == (4096, 7038)
    assert (one.optimizer["_target_"], one.optimizer.lr) == ("pytorch_optimizer.Lamb", 6e-3)
    assert (one.scheduler.shape, one.scheduler.warmup, one.scheduler.power) == ("polynomial", 0.2843, 0.5)
    assert one.callbacks.last.every_n_train_steps == 200
    two = composed(tmp_path, "experiment=bert_large_phase2", "data.dir=shards", "model.pretrained=phase1.ckpt")
    assert (two.data.batch_size * two.trainer.accumulate_grad_batches, two.trainer.max_steps) == (4096, 1563)
    assert (two.optimizer.lr, two.scheduler.warmup, two.scheduler.total_steps) == (4e-3, 0.128, 1563)
    assert (two.data["_target_"], two.model.tokenizer) == (
        "lit_ort_tasks.data.pretraining_shards.PretrainingShards",
        None,
    )
    tuned = composed(tmp_path, "experiment=bert_finetune")
    assert (tuned.trainer.max_epochs, tuned.optimizer.lr, tuned.scheduler.warmup) == (3, 3e-5, 0.1)
    assert tuned.data.max_length == 128


def test_the_default_strategy_is_ort() -> None:
    assert compose("train").strategy["_target_"] == "lit_ort.ORTStrategy"


ORT_STRATEGIES = [choice for choice in choices("strategy") if choice.startswith("ort")]


@pytest.mark.parametrize("choice", ORT_STRATEGIES)
def test_strategies_through_onnx_runtime_have_the_engines_options(choice: str, tmp_path: Path) -> None:
    engine = OmegaConf.load(CONF / "strategy" / "base" / "engine.yaml")
    config = composed(tmp_path, f"strategy={choice}")
    assert isinstance(engine, DictConfig)
    assert {name: config.strategy[name] for name in engine} == dict(engine)
    # The precision comes from the Trainer, and optimizer_in_graph is an option of ORTStrategy alone.
    single = {"precision", "optimizer_in_graph"}
    fields = {field.name for field in dataclasses.fields(ORTOptions)}
    assert set(engine) == {*(fields - single), "fused_optimizer"}
    strategy = make(
        composed(tmp_path, f"strategy={choice}", "strategy.threads=3", "strategy.fallback=error"), "strategy"
    )
    assert strategy.options == ORTOptions(threads=3, fallback="error")


@pytest.mark.parametrize("choice", [choice for choice in ORT_STRATEGIES if choice != "ort"])
def test_the_optimizer_steps_in_the_graph_of_a_single_process_only(choice: str) -> None:
    assert compose("train", ["strategy.optimizer_in_graph=true"]).strategy.optimizer_in_graph
    with pytest.raises(ConfigCompositionException, match="Could not override 'strategy.optimizer_in_graph'"):
        compose("train", [f"strategy={choice}", "strategy.optimizer_in_graph=true"])


def test_the_common_options_of_strategies_are_no_strategy() -> None:
    assert GlobalHydra.instance().config_loader().get_group_options("strategy") == choices("strategy")


def test_compare_has_all_values_of_train() -> None:
    config = compose("compare", ["trainer.max_steps=60", "data=wikitext2", "experiment=transformer_lm_wikitext2"])
    assert set(config) == {*compose("train"), "strategies"}
    assert list(config.strategies) == ["eager", "compile", "ort"]
    assert config.trainer.max_steps == 60


@pytest.mark.parametrize("name", ["train", "compare"])
def test_a_misspelled_choice_lists_the_choices(name: str) -> None:
    with pytest.raises(MissingConfigException, match=r"Could not find 'data/wikitext3'(.|\n)*\twikitext2"):
        compose(name, ["data=wikitext3"])


@pytest.mark.parametrize("override", ["trainer.max_stepz=3", "datas=wikitext2", "task.model.width=3"])
def test_a_misspelled_name_is_refused(override: str) -> None:
    with pytest.raises(ConfigCompositionException, match="Could not override"):
        compose("train", [override])
