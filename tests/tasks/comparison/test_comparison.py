"""compare.py: the table, report.md and report.png. A program without training replaces train.py where possible."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from lit_ort_tasks.commands.compare import compare
from lit_ort_tasks.comparison.outcome import Outcome
from lit_ort_tasks.comparison.picture import read_curve

from tests.tasks.comparison.runs import METRICS, STEPS, console, output_of

REPOSITORY = Path(__file__).parents[3]
EAGER = "eager 100.0 7000 0.5 700 280 6.5000 600.00 500.00"
ORT = "ort 80.0 7000 0.5 700 280 6.5000 600.00 500.00"

pytestmark = pytest.mark.xdist_group("compare")


@pytest.mark.parametrize(("percent", "is_busy"), [(3.0, False), (71.0, True)])
def test_a_busy_machine_is_reported(
    train_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent: float, is_busy: bool
) -> None:
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: percent)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    terminal = console()
    compare(["eager"], [], tmp_path, terminal)
    for text in (output_of(terminal), (tmp_path / "report.md").read_text()):
        assert ("71 % of 2 cores" in text) == is_busy


def test_a_failure_has_a_row_and_the_others_finish(train_program: Path, tmp_path: Path) -> None:
    terminal = console()
    assert not compare(["eager", "compile", "ort"], [], tmp_path, terminal)
    lines = output_of(terminal).splitlines()
    log = tmp_path / "compile" / "output.log"
    reason = "exit code 1: backend.CompileError: no such | kernel [yet]"
    index = lines.index(f"compile   failed, {reason}")
    assert lines[index + 1].split() == ["log:", str(log)]
    assert lines[index - 1].split() == f"{EAGER} 1.00".split()
    assert lines[index + 2].split() == f"{ORT} 1.25".split()
    report = (tmp_path / "report.md").read_text()
    escaped = reason.replace("|", r"\|")
    assert f"| compile |{' - |' * 9} {escaped} (log: {log}) |" in report
    assert "| ort | 80.0 | 7000 | 0.5 | 700 | 280 | 6.5000 | 600.00 | 500.00 | 1.25 |  |" in report


def test_the_ratio_is_unknown_when_the_first_strategy_fails(train_program: Path, tmp_path: Path) -> None:
    terminal = console()
    assert not compare(["compile", "ort"], [], tmp_path, terminal)
    assert output_of(terminal).splitlines()[-5].split() == f"{ORT} -".split()


def test_earlier_results_do_not_hide_a_failure(train_program: Path, tmp_path: Path) -> None:
    (tmp_path / "compile").mkdir()
    (tmp_path / "compile" / "results.json").write_text(json.dumps(dict(steps=STEPS, metrics=METRICS)))
    assert not compare(["compile"], [], tmp_path, console())


def test_the_report_has_the_command_the_versions_and_the_picture(train_program: Path, tmp_path: Path) -> None:
    assert compare(["eager", "ort"], ["seed=3", "data.dir=a b"], tmp_path, console())
    report = (tmp_path / "report.md").read_text()
    assert "    lit-ort compare 'strategies=[eager,ort]' seed=3 'data.dir=a b'\n" in report
    assert "| failed |" not in report
    assert "torch " in report
    assert "![Loss, step time and memory](report.png)" in report
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_comparison_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the real train.py, which trains in plain PyTorch on a small text."""
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "valid", "test"):
        (text / f"{name}.txt").write_text("a b c d e f g h i j k l m n o p " * 15)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    values = ["strategies=[eager]", "data=wikitext2", f"data.dir={text}", "data.batch_size=4", "data.eval_batch_size=2"]
    values += ["data.bptt=6", "task.width=8", "task.layers=1", "trainer.max_epochs=1", "trainer.log_every_n_steps=2"]
    values += ["hydra/job_logging=none", "hydra/hydra_logging=none", f"hydra.run.dir={tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *values])
    runpy.run_path(str(REPOSITORY / "compare.py"), run_name="__main__")
    output = capfd.readouterr().out
    row = next(line.split() for line in output.splitlines() if line.startswith("eager  "))
    results = json.loads((tmp_path / "out" / "eager" / "results.json").read_text())
    assert row[1] == f"{results['steps']['step_ms_median']:.1f}"
    assert row[8] == f"{results['metrics']['test/ppl']:.2f}"
    outcome = Outcome("eager", tmp_path / "out" / "eager" / "output.log", results, None)
    curve = read_curve(outcome, "train/loss")
    assert curve.steps == [1, 3, 5, 7, 9]
    assert 0 < curve.seconds[0] < curve.seconds[-1] < 60
    assert f"tensorboard --logdir {tmp_path}/out" in output
