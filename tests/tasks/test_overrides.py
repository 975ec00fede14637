"""Errors of the command line: misspelled keys, groups without a choice, missing extras."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from lit_ort_tasks import overrides
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.overrides import override_of, require_usable

CONF = Path(__file__).parents[2] / "conf"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trainer.max_epoch=3", "Did you mean trainer.max_epochs?"),
        ("optimizer.momentum_of_a_kind=1", "--help"),
        ("optimiser.lr=1", "Did you mean optimizer.lr?"),
        ("sed=1", "Did you mean seed?"),
        ("taks=gpt2", "Did you mean task?"),
    ],
)
def test_a_misspelled_key_is_refused_with_the_closest_key(word: str, hint: str) -> None:
    with pytest.raises(InputError, match="no such key in this configuration") as caught:
        require_usable([word], CONF, "train")
    assert str(caught.value).startswith(word.partition("=")[0])
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.max_epochs=3", "seed=2", "task=gpt2", "model.layers=2", "data.block=8"],
        ["-m", "strategy=eager,ort", "seed=1,2"],
        ["-m", "strategy=glob(*)", "trainer.max_epochs=3"],
        ["-m", "strategy=glob(none*)", "trainer.max_epochs=3"],
        ["+trainer.num_nodes=2", "hydra.run.dir=runs/a", "+task.more=1", "~callbacks.progress"],
        [
            "experiment=gpt2_wikitext103",
            "strategy=ort",
            "strategy.fallback=error",
            "callbacks.last.train_time_interval=5",
        ],
        ["task=no_such_task", "trainer.max_epoch=1"],
        ["--cfg", "job", "logger=csv"],
    ],
)
def test_other_arguments_are_left_to_hydra(words: list[str]) -> None:
    require_usable(words, CONF, "train")


@pytest.mark.parametrize("group", ["logger", "callbacks", "debug"])
def test_a_group_without_a_choice_is_refused(group: str) -> None:
    with pytest.raises(InputError, match=rf"{group}=null: a group needs a choice.*~{group}"):
        require_usable([f"{group}=null"], CONF, "train")


@pytest.mark.parametrize(
    "word", ["logger=wandb", "logger=glob(w*)", "logger=[tensorboard,wandb]", "logger=csv,wandb", "+logger=wandb"]
)
def test_a_missing_extra_is_named(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(overrides.EXTRAS, ("logger", "wandb"), ("wandb", "no_such_package.module"))
    with pytest.raises(InputError, match="logger=wandb: needs the wandb extra.*pip install 'wandb"):
        require_usable([word], CONF, "train")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--strategy", "ort"], "strategy=ort"),
        (["--trainer.max_steps=3"], "trainer.max_steps=3"),
        (["task=bert", "--max-epochs", "--multirun"], "max_epochs=VALUE"),
    ],
)
def test_an_option_with_dashes_is_shown_as_a_setting(arguments: list[str], remedy: str) -> None:
    with pytest.raises(InputError, match=f"written without dashes, as NAME=VALUE. Use {remedy}"):
        require_usable(arguments, CONF, "train")


def test_options_of_hydra_have_dashes() -> None:
    require_usable(["--multirun", "--config-name=train", "task=bert"], CONF, "train")


@pytest.mark.parametrize(
    "value",
    ["a/b-1.ckpt", "a(1)=b,c.ckpt", "é", "~/a", " a", "it's", "a\\'b\\", "null", "1", "[a]", "choice(a)", "a b"],
)
def test_hydra_reads_a_value_as_it_is(value: str) -> None:
    override = OverridesParser.create().parse_override(override_of("ckpt_path", value))
    assert (override.is_sweep_override(), override.value()) == (False, value)
    assert ("'" in override_of("ckpt_path", value)) == (value not in ("a/b-1.ckpt", "a b"))
