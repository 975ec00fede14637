"""How messages name a command."""

from __future__ import annotations

from pathlib import Path

import pytest
from lit_ort_tasks.commands import compare
from lit_ort_tasks.commands.program import command_line, configuration_folder

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("program", ["train.py", "compare.py", "predict.py"])
def test_a_program_of_a_clone_names_the_programs_of_the_clone(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [str(ROOT / program)])
    assert command_line("train") == "python train.py"
    monkeypatch.chdir(ROOT / "docs")
    assert command_line("predict") == "python ../predict.py"


@pytest.mark.parametrize("program", ["/usr/bin/lit-ort", str(compare.__file__), "my_program.py", ""])
def test_other_programs_name_installed_commands(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [program])
    assert command_line("train") == "lit-ort train"
    assert command_line("predict") == "lit-ort predict"


def test_the_configuration_of_a_clone_is_at_its_top() -> None:
    assert configuration_folder() == ROOT / "conf"
