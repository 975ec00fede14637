"""Strategies and overrides that can't be compared, and the processes of a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from lit_ort_tasks.comparison.processes import last_error, require_comparable, run, strategies_of
from lit_ort_tasks.errors import InputError
from omegaconf import OmegaConf

from tests.tasks.comparison.runs import console

CONF = str(Path(__file__).parents[3] / "conf")


@pytest.mark.parametrize(
    ("strategies", "overrides", "message"),
    [
        ([], [], r"strategies=\[\]: at least one.*compile, eager, ort"),
        (["eager", "orrt"], [], "'orrt' is not a strategy. Choose from compile, eager, ort"),
        (["eager", "eager"], [], "'eager' is repeated"),
        (["eager"], ["strategy=ort"], "strategy=ort: a comparison sets strategy itself"),
        (["eager"], ["strategy.fallback=error"], "strategy.fallback=error: a comparison sets strategy itself"),
        (["eager"], ["logger=csv"], "logger=csv: a comparison sets logger itself"),
        (["eager"], ["~logger.tensorboard"], "~logger.tensorboard: a comparison sets logger itself"),
        (["eager"], ["ckpt_path=a.ckpt"], "ckpt_path=a.ckpt: a comparison sets ckpt_path itself"),
        (["eager"], ["hparams_search=optuna"], "hparams_search=optuna: a comparison sets hparams_search itself"),
    ],
)
def test_what_cannot_be_compared_is_refused(strategies: list[str], overrides: list[str], message: str) -> None:
    with initialize_config_dir(CONF, version_base="1.3"), pytest.raises(InputError, match=message):
        require_comparable(strategies, overrides)


@pytest.mark.parametrize(
    ("value", "message"),
    [("ort", r"strategies=ort: must be a list. Write strategies=\[ort\]"), (None, "strategies=null: must be a list")],
)
def test_strategies_are_a_list(value: str | None, message: str) -> None:
    assert strategies_of(OmegaConf.create(["ort", "eager"])) == ["ort", "eager"]
    with pytest.raises(InputError, match=message):
        strategies_of(value)


def test_other_strategies_and_overrides_are_accepted() -> None:
    with initialize_config_dir(CONF, version_base="1.3"):
        require_comparable(["ort", "eager", "compile"], ["trainer.max_steps=60", "data=wikitext2", "seed=2"])


@pytest.mark.parametrize("strategy", ["eager", "ort"])
def test_a_strategy_gets_the_overrides_and_a_separate_folder(
    train_program: Path, tmp_path: Path, strategy: str
) -> None:
    outcome = run(strategy, ["trainer.max_steps=60", "seed=3"], tmp_path / "out", console())
    folder = tmp_path / "out" / strategy
    expected = ["trainer.max_steps=60", "seed=3", f"strategy={strategy}", f"hydra.run.dir={folder}"]
    assert json.loads((folder / "arguments.json").read_text()) == expected
    assert outcome.log == folder / "output.log"
    assert "Epoch 0: 100%" in outcome.log.read_text()


def test_hydra_reads_the_folder_whatever_its_name(train_program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it's, [a] {b}=c"
    train_program.write_text("import sys; print(sys.argv[-1])")
    outcome = run("eager", [], folder, console())
    override = OverridesParser.create().parse_override(outcome.log.read_text().strip())
    assert override.value() == str(folder / "eager")


def test_a_failed_run_without_output_is_reported(train_program: Path, tmp_path: Path) -> None:
    train_program.write_text("import sys; sys.exit(3)")
    outcome = run("eager", [], tmp_path, console())
    assert outcome.results is None
    assert outcome.failure == "exit code 3: no output"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("error: absent: no such folder.\n", "error: absent: no such folder."),
        ("Traceback\nValueError: bad\n\nSet the environment variable HYDRA_FULL_ERROR=1 for more.", "ValueError: bad"),
        ("Error executing job with overrides: []\nError locating target 'x'\nkey: a\n", "Error locating target 'x'"),
        ("10%\r20%\nKilled", "Killed"),
    ],
)
def test_the_last_error_of_a_log(tmp_path: Path, lines: str, expected: str) -> None:
    log = tmp_path / "output.log"
    log.write_text(lines)
    assert last_error(log) == expected
