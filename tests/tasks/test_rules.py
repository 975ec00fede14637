"""Invalid values of a configuration are refused with the value and the rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from lit_ort_tasks.checkpoints import ORIGIN, origin_of, require_same_origin
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.rules import RULES, require_processes, require_rules
from lit_ort_tasks.transformer_lm import TransformerLM
from omegaconf import open_dict

CONF = str(Path(__file__).parents[2] / "conf")


def composed(*overrides: str) -> Any:
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose("train", list(overrides))


@pytest.mark.parametrize("task", ["transformer_lm", "gpt2", "bert_pretrain", "bert_finetune", "pipeline_lm"])
def test_the_defaults_are_valid(task: str) -> None:
    require_rules(composed(f"task={task}"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=-1", r"optimizer.lr=-1: must be a number above 0\."),
        ("optimizer.lr=fast", "optimizer.lr=fast: must be a number"),
        ("optimizer.lr=nan", "optimizer.lr=nan: must be a number"),
        ("optimizer.lr=null", "optimizer.lr=null: must be a number"),
        ("trainer.accumulate_grad_batches=0", "accumulate_grad_batches=0: must be a whole number of at least 1"),
        ("trainer.val_check_interval=0", "val_check_interval=0: must be a share of the epoch"),
        ("trainer.val_check_interval=1.5", "val_check_interval=1.5: must be a share of the epoch"),
        ("trainer.log_every_n_steps=0", "log_every_n_steps=0: must be a whole number of at least 1"),
        ("trainer.limit_train_batches=1.5", "limit_train_batches=1.5: must be a share"),
        ("trainer.gradient_clip_val=-0.5", "gradient_clip_val=-0.5: must be a number of at least 0"),
        ("seed=-1", "seed=-1: must be a whole number from 0 to 4294967295"),
        ("seed=4294967296", "seed=4294967296: must be a whole number"),
        ("seed=1.5", "seed=1.5: must be a whole number"),
    ],
)
def test_invalid_values_are_named(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        require_rules(composed(override))


def test_torchrun_started_the_number_of_processes_of_the_configuration() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    require_processes(composed("trainer.devices=1"), {})
    require_processes(composed("trainer.devices=2", "strategy=ort_ddp"), torchrun)
    for devices in (1, 4):
        with pytest.raises(
            InputError, match=rf"devices={devices}: torchrun started 2 processes.*Set trainer.devices=2"
        ):
            require_processes(composed(f"trainer.devices={devices}"), torchrun)


@pytest.mark.parametrize("override", ["trainer.val_check_interval=1", "trainer.limit_val_batches=0", "seed=0"])
def test_limits_are_valid(override: str) -> None:
    require_rules(composed(override))


def test_each_rule_is_for_a_key_of_a_configuration() -> None:
    config = composed("optimizer=lamb")
    with open_dict(config):
        missing = [rule.key for rule in RULES if not _has(config, rule.key)]
    assert missing == []


def _has(config: Any, key: str) -> bool:
    for part in key.split("."):
        if part not in config:
            return False
        config = config[part]
    return True


def task(**sizes: Any) -> TransformerLM:
    return TransformerLM(20, **{"width": 8, "heads": 2, "feed_forward": 8, "layers": 1, "max_length": 6, **sizes})


def checkpoint_of(module: TransformerLM, optimizer: str = "Adam") -> dict[str, Any]:
    origin = {ORIGIN: origin_of(module, optimizer)}
    return {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), **origin}


def test_a_checkpoint_of_the_same_task_is_accepted() -> None:
    require_same_origin(task(), "Adam", checkpoint_of(task()), is_whole=True)
    old = checkpoint_of(task())
    del old[ORIGIN], old["hyper_parameters"]
    require_same_origin(task(), "Adam", old, is_whole=True)


def test_other_checkpoints_are_refused_by_name() -> None:
    def refuse(checkpoint: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            require_same_origin(task(), "Adam", checkpoint, is_whole=True)

    refuse(checkpoint_of(task(width=16)), r"task.width=16 there and 8 here.*Resume with the task and the values")
    refuse(checkpoint_of(task(), "SGD"), "has the state of SGD, and this run's optimizer is Adam")
    refuse({**checkpoint_of(task()), ORIGIN: {"task": "GPT2"}}, "is one of GPT2, and this run trains TransformerLM")
    refuse({"epoch": 1}, "has no weights")
    refuse({"state_dict": {"a": torch.zeros(1)}}, "TransformerLM has none of its 1 weights")
    name = next(iter(task().state_dict()))
    refuse({"state_dict": {name: torch.zeros(3)}}, r"has the shape \(3,\) there")
