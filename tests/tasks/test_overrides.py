"""Misspelt keys are told with the key that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.overrides import require_known_keys

CONF = Path(__file__).parents[2] / "conf"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("trainer.max_epoch=3", "Did you mean trainer.max_epochs?"),
        ("optimizer.momentum_of_a_kind=1", "--help"),
        ("optimiser.lr=1", "Did you mean optimizer.lr?"),
        ("sed=1", "Did you mean seed?"),
        ("taks=gpt2", "Did you mean task?"),
    ],
)
def test_a_misspelt_key_is_told_with_the_one_that_was_meant(word: str, meant: str) -> None:
    with pytest.raises(InputError, match="no such key in this configuration") as caught:
        require_known_keys([word], CONF, "train")
    assert str(caught.value).startswith(word.partition("=")[0])
    assert meant in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.max_epochs=3", "seed=2", "task=gpt2", "model.layers=2", "data.block=8"],
        ["-m", "strategy=eager,ort", "seed=1,2"],
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
def test_other_words_are_left_to_hydra(words: list[str]) -> None:
    require_known_keys(words, CONF, "train")
