"""The commands of `lit-ort`, and the errors for wrong arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from lit_ort import extras
from lit_ort.commands import main as program
from lit_ort.version import __version__
from tests.scripts import run_code


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def make() -> tuple[nn.Module, Any]:
    return Scorer(), torch.randn(4, 6)


def make_list() -> list[nn.Module]:
    return [Scorer()]


HERE = f"{__name__}:make"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    program.main([])
    text = capsys.readouterr().out
    assert all(f"\n  lit-ort {name} " in text for name in (*program.COMMANDS, *program.PROGRAMS))
    program.main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


def test_an_unknown_command_lists_all_commands() -> None:
    with pytest.raises(SystemExit, match="lit-ort tain: no such command. Use one of train, compare, predict"):
        program.main(["tain"])


def test_explain_runs_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["explain", HERE])
    short = capsys.readouterr().out
    assert "1 graph" in short
    assert "no fallback" in short
    program.main(["explain", HERE, "--details"])
    details = capsys.readouterr().out
    assert "passes" not in short
    assert "  runs  " in details


class Reader(nn.Module):
    """Reads the value of a tensor in a loop, which Dynamo can't trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for row in self.layer(inputs):
            total = total + row.sum() * (1 if row.sum().item() > 0 else 2)
        return total


def make_reader() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Reader(), {"inputs": torch.randn(4, 6)}


@pytest.mark.filterwarnings("ignore:.*runs in eager PyTorch:lit_ort.errors.LitOrtWarning")
@pytest.mark.parametrize("command", ["explain", "benchmark"])
def test_functions_in_eager_are_listed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [] if command == "explain" else ["--rounds", "1", "--baselines", "ort"]
    program.main([command, f"{__name__}:make_reader", *arguments])
    printed = capsys.readouterr().out
    assert "1 function in eager PyTorch" in printed
    assert "forward of training_step runs in eager PyTorch" in printed
    assert "the step reads the value of a tensor" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("forked_sessions")
def test_export_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    program.main(["export", HERE, str(path), "--fixed"])
    assert "largest error compared with eager" in capsys.readouterr().out
    sizes = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    assert [size.dim_value for size in sizes] == [4, 6]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_sessions")
def test_export_training_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["export-training", HERE, str(tmp_path / "step"), "--fixed", "--optimizer", "sgd"])
    assert "2 parameters are trained\n  largest error compared with eager" in capsys.readouterr().out
    assert (tmp_path / "step" / "train_step.onnx").is_file()
    with pytest.raises(SystemExit):
        program.main(["export-training", HERE, str(tmp_path / "step")])
    assert capsys.readouterr().err.endswith("step exists. Choose a folder that doesn't exist, or remove it.\n")


@pytest.mark.parametrize("command", ["explain", "export"])
def test_a_function_must_return_a_module_and_a_batch(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main([command, f"{__name__}:make_list", *(["a.onnx"] if command == "export" else [])])
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.endswith("make_list() returned a list. Return a tuple of a module and its batch.\n")


def test_training_needs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other packages that need Hydra have it without the rest.
    monkeypatch.setattr(extras, "_needed", lambda extra: ["hydra-core>=1", "no-such-package>=1"])
    with pytest.raises(SystemExit, match=r"lit-ort train needs the tasks extra. Install it: pip install"):
        program.main(["train", "strategy=ort"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "compare"])
def test_programs_run_as_the_main_module(name: str) -> None:
    command = [sys.executable, "-c", "from lit_ort.commands.main import main; main()", name, "--help"]
    process = run_code(command)
    assert process.returncode == 0, process.stderr
    assert f"  lit-ort {name} [GROUP=CHOICE ...]" in process.stdout
