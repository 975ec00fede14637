"""train.py with debug=..., in eager PyTorch and through ONNX Runtime, on a small text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks.commands.small import run

pytestmark = pytest.mark.usefixtures("one_thread")

STRATEGIES = pytest.mark.parametrize("strategy", ["eager", "ort"])


@pytest.mark.slow
@STRATEGIES
@pytest.mark.sampled(1)
def test_a_fast_dev_run_takes_one_batch_of_each_kind_and_writes_to_the_folder_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, strategy: str
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    results = run(monkeypatch, Path("run"), text, "debug=fast_dev_run", f"strategy={strategy}")
    assert results["steps"]["steps"] == 1
    assert {"val/loss", "test/loss"} <= results["metrics"].keys()
    assert [path.name for path in Path.cwd().iterdir()] == ["run"]
    assert not list(Path("run").rglob("events.out.tfevents.*"))


@pytest.mark.slow
@STRATEGIES
@pytest.mark.sampled(1)
def test_a_model_overfits_a_few_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, strategy: str
) -> None:
    results = run(monkeypatch, tmp_path / "run", text, "debug=overfit", f"strategy={strategy}", "optimizer.lr=0.03")
    assert results["steps"]["steps"] == 4 * 25
    assert results["metrics"]["train/loss"] < 0.1


@pytest.mark.slow
@STRATEGIES
@pytest.mark.sampled(1)
def test_profiles_are_in_the_folder_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, strategy: str
) -> None:
    run(monkeypatch, tmp_path / "run", text, "debug=profiler", f"strategy={strategy}", "trainer.max_steps=2")
    for stage, action in (("fit", "training_step"), ("test", "test_step")):
        assert action in (tmp_path / "run" / f"{stage}-profile.txt").read_text()


@pytest.mark.slow
@STRATEGIES
def test_an_anomaly_of_a_compiled_step_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ("trainer.max_steps=1", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
    run(monkeypatch, tmp_path / "run", text, "debug=anomaly", f"strategy={strategy}", *limits)
    note = "a compiled step is checked as one operator; `python"
    assert (note in capsys.readouterr().out) == (strategy == "ort")


def test_anomalies_are_not_detected_where_gradients_stay_in_the_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    with pytest.raises(SystemExit, match="Set strategy.optimizer_in_graph=false"):
        run(monkeypatch, tmp_path / "run", text, "debug=anomaly", "strategy=ort", "strategy.optimizer_in_graph=true")
