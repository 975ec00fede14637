"""compare.py: what it refuses, how it runs its children, what it reports. A stub stands for train.py where it can."""

from __future__ import annotations

import json
import sys
import textwrap
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from lit_ort_tasks.commands import compare
from lit_ort_tasks.errors import InputError
from rich.console import Console

REPOSITORY = Path(__file__).parents[3]
STEPS = dict(step_ms_median=100.0, items_per_s=7000.0, first_step_s=0.5, peak_mib=700.0, peak_above_start_mib=280.0)
STEPS |= dict(item="tokens")
METRICS = {"train/loss": 6.5, "val/ppl": 600.0, "test/ppl": 500.0}


pytestmark = pytest.mark.xdist_group("compare")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A train.py that takes no time: eager needs 100 ms, ort 80 ms, compile fails as Hydra reports it."""
    path = tmp_path / "train.py"
    program = f"""
        import json, sys, time
        from pathlib import Path
        options = dict(argument.split("=", 1) for argument in sys.argv[1:])
        folder = Path(options["hydra.run.dir"].strip("'"))
        print("Epoch 0: 50%\\rEpoch 0: 100%", flush=True)
        if options["strategy"] == "compile":
            print("Error executing job with overrides: []")
            print("Traceback (most recent call last):\\n  File ...\\nbackend.CompileError: no such | kernel [yet]\\n")
            sys.exit("Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.")
        steps = {STEPS!r} | dict(started_unix_s=time.time())
        if options["strategy"] == "ort":
            steps |= dict(step_ms_median=80.0)
        (folder / "arguments.json").write_text(json.dumps(sys.argv[1:]))
        results = dict(steps=steps, metrics={METRICS!r}, headline=["ppl"], checkpoint="best.ckpt")
        (folder / "results.json").write_text(json.dumps(results))
    """
    path.write_text(textwrap.dedent(program))
    monkeypatch.setattr(compare, "TRAIN", (str(path),))
    return path


def console() -> Console:
    return Console(file=StringIO(), width=110)


def shown(on: Console) -> str:
    assert isinstance(on.file, StringIO)
    return on.file.getvalue()


@pytest.mark.parametrize(
    ("strategies", "overrides", "message"),
    [
        ([], [], r"strategies=\[\]: at least one.*compile, eager, ort"),
        (["eager", "orrt"], [], "'orrt' is not a strategy. Choose from compile, eager, ort"),
        (["eager", "eager"], [], "'eager' is there twice"),
        (["eager"], ["strategy=ort"], "strategy=ort: a comparison sets strategy itself"),
        (["eager"], ["strategy.fallback=error"], "strategy.fallback=error: a comparison sets strategy itself"),
        (["eager"], ["logger=csv"], "logger=csv: a comparison sets logger itself"),
        (["eager"], ["~logger.tensorboard"], "~logger.tensorboard: a comparison sets logger itself"),
        (["eager"], ["ckpt_path=a.ckpt"], "ckpt_path=a.ckpt: a comparison sets ckpt_path itself"),
    ],
)
def test_what_cannot_be_compared_is_refused(strategies: list[str], overrides: list[str], message: str) -> None:
    with (
        initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"),
        pytest.raises(InputError, match=message),
    ):
        compare.check(strategies, overrides)


def test_what_can_be_compared_is_taken() -> None:
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        compare.check(["ort", "eager", "compile"], ["trainer.max_steps=60", "data=wikitext2", "seed=2"])


@pytest.mark.parametrize(("load", "told"), [(0.1, False), (3.0, True)])
def test_a_busy_machine_is_told(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, told: bool
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    on = console()
    compare.compare(["eager"], [], tmp_path, on)
    for text in (shown(on), (tmp_path / "report.md").read_text()):
        assert ("load 3.0 on 2 cores" in text) == told


def test_each_strategy_gets_the_same_values_and_a_folder_of_its_own(stub: Path, tmp_path: Path) -> None:
    assert compare.compare(["eager", "ort"], ["trainer.max_steps=60", "seed=3"], tmp_path / "out", console())
    for strategy in ("eager", "ort"):
        own = tmp_path / "out" / strategy
        expected = ["trainer.max_steps=60", "seed=3", f"strategy={strategy}", f"hydra.run.dir='{own}'"]
        assert json.loads((own / "arguments.json").read_text()) == expected
        assert "Epoch 0: 100%" in (own / "output.log").read_text()


def test_a_folder_reaches_hydra_whatever_its_name(stub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it's, [a] {b}=c"
    stub.write_text("import sys; print(sys.argv[-1])")
    outcome = compare.run("eager", [], folder, console())
    override = OverridesParser.create().parse_override(outcome.log.read_text().strip())
    assert override.value() == str(folder / "eager")


def test_a_failure_has_its_row_and_the_others_finish(stub: Path, tmp_path: Path) -> None:
    on = console()
    assert not compare.compare(["eager", "compile", "ort"], [], tmp_path, on)
    lines = shown(on).splitlines()
    log = tmp_path / "compile" / "output.log"
    reason = "exit code 1: backend.CompileError: no such | kernel [yet]"
    place = lines.index(f"compile   failed, {reason}")
    assert lines[place + 1].split() == ["log:", str(log)]
    assert lines[place - 1].split() == "eager 100.0 7000 0.5 700 280 6.5000 600.00 500.00 1.00".split()
    assert lines[place + 2].split() == "ort 80.0 7000 0.5 700 280 6.5000 600.00 500.00 1.25".split()
    report = (tmp_path / "report.md").read_text()
    assert (
        f"| compile |{' - |' * 9} exit code 1: backend.CompileError: no such \\| kernel [yet] (log: {log}) |" in report
    )
    assert "| ort | 80.0 | 7000 | 0.5 | 700 | 280 | 6.5000 | 600.00 | 500.00 | 1.25 |  |" in report


def test_the_ratio_is_unknown_when_the_first_fails(stub: Path, tmp_path: Path) -> None:
    on = console()
    assert not compare.compare(["compile", "ort"], [], tmp_path, on)
    assert shown(on).splitlines()[-5].split() == "ort 80.0 7000 0.5 700 280 6.5000 600.00 500.00 -".split()


def test_an_old_result_does_not_stand_for_a_failed_run(stub: Path, tmp_path: Path) -> None:
    (tmp_path / "compile").mkdir()
    (tmp_path / "compile" / "results.json").write_text(json.dumps(dict(steps=STEPS, metrics=METRICS)))
    assert not compare.compare(["compile"], [], tmp_path, console())


def test_a_child_that_says_nothing_is_reported(stub: Path, tmp_path: Path) -> None:
    stub.write_text("import sys; sys.exit(3)")
    outcome = compare.run("eager", [], tmp_path, console())
    assert outcome.results is None
    assert outcome.failure == "exit code 3: no output"


def test_the_report_holds_what_is_needed_to_run_it_again(stub: Path, tmp_path: Path) -> None:
    compare.compare(["eager", "ort"], ["seed=3"], tmp_path, console())
    report = (tmp_path / "report.md").read_text()
    assert "    lit-ort compare strategies=[eager,ort] seed=3\n" in report
    assert "| failed |" not in report
    assert "torch " in report
    assert "![Loss, step time and memory](report.png)" in report
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("error: absent: no such folder.\n", "error: absent: no such folder."),
        ("Traceback\nValueError: bad\n\nSet the environment variable HYDRA_FULL_ERROR=1 for more.", "ValueError: bad"),
        ("Error executing job with overrides: []\nError locating target 'x'\nkey: a\n", "Error locating target 'x'"),
        ("10%\r20%\nKilled", "Killed"),
    ],
)
def test_the_last_error_is_found(tmp_path: Path, lines: str, expected: str) -> None:
    log = tmp_path / "output.log"
    log.write_text(lines)
    assert compare.last_error(log) == expected


def test_curves_are_read_from_the_events(tmp_path: Path) -> None:
    from torch.utils.tensorboard.writer import SummaryWriter

    for earlier_s, losses in ((500.0, (9.0, 8.0)), (0.0, (7.0, 6.5))):
        with SummaryWriter(str(tmp_path / "eager"), filename_suffix=f".{earlier_s}") as writer:
            for step, loss in zip((49, 99), losses, strict=True):
                writer.add_scalar("train/loss", loss, step, walltime=1000.0 - earlier_s + step)
    results: dict[str, Any] = dict(steps=STEPS | dict(started_unix_s=1000.0), metrics=METRICS)
    outcome = compare.Outcome("eager", tmp_path / "eager" / "output.log", results, None)
    curve = compare.read_curve(outcome, "train/loss")
    assert curve == compare.Curve(steps=[49, 99], seconds=[49.0, 99.0], values=[7.0, 6.5])
    assert compare.read_curve(outcome, "absent") == compare.Curve([], [], [])


@pytest.mark.slow
def test_a_comparison_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole way once, with the real train.py: PyTorch's own training on a small text."""
    import runpy

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
    outcome = compare.Outcome("eager", tmp_path / "out" / "eager" / "output.log", results, None)
    curve = compare.read_curve(outcome, "train/loss")
    assert curve.steps == [1, 3, 5, 7, 9]
    assert 0 < curve.seconds[0] < curve.seconds[-1] < 60
    assert f"tensorboard --logdir {tmp_path}/out" in output
