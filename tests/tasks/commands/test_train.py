"""train.py from the command line to the folder of the run, on a small text in plain PyTorch."""

from __future__ import annotations

import math
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra.errors import InstantiationException
from lit_ort_tasks.data.text import WikiText2
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.transformer_lm import TransformerLM
from omegaconf import OmegaConf

from lit_ort import LitOrtWarning, load_training_checkpoint
from lit_ort.export.safetensors_file import read_tensors
from tests.export.elsewhere import train_elsewhere
from tests.scripts import run_script
from tests.tasks.commands.small import QUIET, SMALL, TRAIN, run, start

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["transformer_lm", "pipeline_lm"])
@pytest.mark.sampled(1)
def test_a_plan_is_printed_and_nothing_trained(
    task: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("strategy=ort", "plan_memory=true", f"task={task}", "task.layers=2")
    with pytest.raises(FileNotFoundError, match="results.json"):
        run(monkeypatch, tmp_path / "run", text, *overrides)
    output = capsys.readouterr().out
    assert "MB while it runs for a batch of 4" in output
    assert "batches of up to" in output


def test_only_steps_through_onnx_runtime_are_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    with pytest.raises(SystemExit, match="choose strategy=ort"):
        run(monkeypatch, tmp_path / "run", text, "plan_memory=true")


@pytest.mark.parametrize("note", [None, "note.txt", "own.log"])
def test_a_refused_run_leaves_no_folder_unless_it_has_other_files(
    note: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "refused"
    if note is not None:
        folder.mkdir(parents=True)
        (folder / note).write_text("of the user")
    with pytest.raises(SystemExit, match="must be a whole number"):
        run(monkeypatch, folder, text, "trainer.max_steps=abc")
    assert (tmp_path / "runs").exists() == (note is not None)
    assert note is None or (folder / note).read_text() == "of the user"


def test_a_refused_run_without_hydras_record_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="must be a whole number"):
        run(monkeypatch, tmp_path / "runs" / "refused", text, "trainer.max_steps=abc", "hydra.output_subdir=null")
    assert not (tmp_path / "runs").exists()


def loss_of(checkpoint: Path, text: Path) -> float:
    """Compute the test loss of a checkpoint without Lightning's loops."""
    data = WikiText2(dir=text, batch_size=4, eval_batch_size=2, bptt=6)
    task = TransformerLM.load_from_checkpoint(checkpoint, weights_only=True).eval()
    with torch.no_grad():
        parts = [(task.loss(batch).item(), batch[1].numel()) for batch in data.test_dataloader()]
    return sum(loss * tokens for loss, tokens in parts) / sum(tokens for _, tokens in parts)


def test_the_files_in_the_folder_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "run"
    results = run(monkeypatch, folder, text, "trainer.max_epochs=2", "seed=5")
    config = OmegaConf.load(folder / ".hydra" / "config.yaml")
    assert (config.seed, config.trainer.max_epochs, config.data.dir) == (5, 2, str(text))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert list(folder.glob("events.out.tfevents.*"))
    assert results["checkpoint"] == str(folder / "checkpoints" / "best.ckpt")
    assert results["steps"]["steps"] == 20
    assert results["steps"]["item"] == "tokens"
    for split in ("train", "val", "test"):
        loss, ppl = results["metrics"][f"{split}/loss"], results["metrics"][f"{split}/ppl"]
        assert ppl == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.slow
@pytest.mark.sweep
def test_the_training_step_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    results = run(monkeypatch, tmp_path / "run", text, "trainer.max_epochs=1", "export=training")
    folder = tmp_path / "run" / "training"
    assert results["exported"].startswith(str(folder))
    losses = train_elsewhere(folder, [read_tensors(folder / "batch.safetensors")] * 3, 1e-2)["loss"]
    assert losses[2] < losses[0]
    task = TransformerLM.load_from_checkpoint(results["checkpoint"], weights_only=True)
    assert set(load_training_checkpoint(task, folder)) == {name for name, _ in task.named_parameters()}


def test_the_test_is_of_the_best_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    # From the second epoch on the rate is a thousand times as high, and the loss increases.
    overrides = ("trainer.max_epochs=2", "scheduler=step", "scheduler.gamma=1000")
    results = run(monkeypatch, tmp_path / "run", text, *overrides)
    best, last = (loss_of(tmp_path / "run" / "checkpoints" / f"{name}.ckpt", text) for name in ("best", "last"))
    assert results["metrics"]["test/loss"] == pytest.approx(best, rel=1e-5)
    assert abs(best - last) > 1e-3


def test_a_step_limit_within_the_first_epoch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    results = run(monkeypatch, tmp_path / "run", text, "trainer.max_steps=3")
    assert results["steps"]["steps"] == 3
    assert results["checkpoint"] == str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert results["metrics"]["val/loss"] > 0
    assert results["metrics"]["test/loss"] == pytest.approx(loss_of(Path(results["checkpoint"]), text), rel=1e-5)


@pytest.mark.slow
def test_the_seed_determines_the_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    losses = [
        run(monkeypatch, tmp_path / str(index), text, "trainer.max_steps=3", f"seed={seed}", "task.dropout=0.3")[
            "metrics"
        ]["test/loss"]
        for index, seed in enumerate((1, 1, 2))
    ]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_resuming_continues_where_the_run_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    whole = run(monkeypatch, tmp_path / "whole", text, "trainer.max_epochs=2")
    run(monkeypatch, tmp_path / "first", text, "trainer.max_epochs=1")
    checkpoint = tmp_path / "first" / "checkpoints" / "last.ckpt"
    second = run(monkeypatch, tmp_path / "second", text, "trainer.max_epochs=2", f"ckpt_path={checkpoint}")
    assert second["steps"]["steps"] == 10
    assert second["metrics"]["test/loss"] == pytest.approx(whole["metrics"]["test/loss"], rel=1e-6)


@pytest.mark.slow
def test_a_stopped_run_resumes_in_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "run"
    arguments = [*SMALL, f"data.dir={text}", f"hydra.run.dir={folder}", "trainer.max_epochs=100000"]
    with subprocess.Popen(
        [sys.executable, str(TRAIN), *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as started:
        last = folder / "checkpoints" / "last.ckpt"
        while not last.exists() and started.poll() is None:
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        output = started.communicate(timeout=60)[1]
    assert started.returncode == 143, output
    command = " ".join(["train.py", *arguments, f"ckpt_path={last}"])
    assert f"saved {last}. Resume: python " in output
    assert output.rstrip().endswith(command)
    assert not (folder / "results.json").exists()

    epochs = f"trainer.max_epochs={torch.load(last, weights_only=True)['epoch'] + 2}"
    with pytest.raises(SystemExit, match=r"checkpoints/best.ckpt of another run.*resume that run: ckpt_path="):
        run(monkeypatch, folder, text, epochs)
    resumed = run(monkeypatch, folder, text, epochs, "ckpt_path=last")
    whole = run(monkeypatch, tmp_path / "whole", text, epochs)
    assert resumed["metrics"]["test/loss"] == pytest.approx(whole["metrics"]["test/loss"], rel=1e-6)


@pytest.mark.parametrize("limits", [["val"], ["test"], ["val", "test"]], ids=str)
def test_runs_without_batches_to_evaluate_end_with_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, limits: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"trainer.limit_{name}_batches=0" for name in limits]
    results = run(monkeypatch, tmp_path / "run", text, "trainer.max_epochs=1", *overrides)
    assert {name for name in ("val", "test") if f"{name}/loss" not in results["metrics"]} == set(limits)
    assert Path(results["checkpoint"]).is_file()
    assert ("nothing was tested" in capsys.readouterr().out) == ("test" in limits)


def test_a_loss_that_is_not_finite_ends_the_run_or_is_null(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    wild = ("optimizer=sgd", "optimizer.lr=1e30", "trainer.gradient_clip_val=null", "trainer.max_epochs=1")
    with pytest.raises(SystemExit, match=r"error: the training loss is (nan|inf) at step \d+, batch \d+ of epoch 0"):
        run(monkeypatch, tmp_path / "stop", text, *wild)
    with pytest.warns(LitOrtWarning, match="Training continues"):
        results = run(monkeypatch, tmp_path / "warn", text, *wild, "on_nonfinite=warn")
    assert results["metrics"]["test/loss"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.width=16", "error: The checkpoint is of another model: task.width=8 there and 16 here"),
        ("optimizer=sgd", "error: The checkpoint has the state of Adam, and this run's optimizer is SGD"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, override: str, message: str
) -> None:
    run(monkeypatch, tmp_path / "one", text, "trainer.max_epochs=1")
    last = tmp_path / "one" / "checkpoints" / "last.ckpt"
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, tmp_path / "two", text, f"ckpt_path={last}", override)
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.write_bytes(data)
    with pytest.raises(SystemExit, match=r"error: .*last.ckpt is damaged"):
        run(monkeypatch, tmp_path / "two", text, f"ckpt_path={last}")


@pytest.mark.slow
def test_several_runs_have_a_folder_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "sweep"
    values = (f"data.dir={text}", f"hydra.sweep.dir={folder}", "trainer.max_steps=2", "seed=1,2")
    start(monkeypatch, "hydra.mode=MULTIRUN", *values)
    assert sorted(path.parent.name for path in folder.glob("*/results.json")) == ["0-eager", "1-eager"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.dir=absent", r"error: absent: no such folder.*data\.dir"),
        ("task.heads=3", "error: task.width=8: not divisible by task.heads=3"),
        ("data.bptt=0", "error: data.bptt=0: must be a whole number of at least 1"),
        ("data.bptt=100", r"error: .*valid\.txt: 240 tokens.*needs 202|error: .*train\.txt: 240 tokens.*needs 404"),
        ("ckpt_path=absent.ckpt", "error: ckpt_path=absent.ckpt: no such file"),
        ("ckpt_path=.", "error: ckpt_path=.: is no file"),
        ("optimizer.lr=nan", "error: optimizer.lr=nan: must be a number above 0"),
        ("on_nonfinite=explode", r"error: action='explode' .on_nonfinite of `lit-ort train`.: choose from stop, warn"),
        (
            "callbacks.last.train_time_interval=0",
            "error: callbacks.last.train_time_interval=0: must be a number",
        ),
        ("data.batch_size=true", "error: data.batch_size=True: must be a whole number"),
        ("trainer.max_epoch=3", "error: trainer.max_epoch: no such key.*Did you mean trainer.max_epochs"),
    ],
)
def test_invalid_values_end_with_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, override: str, message: str
) -> None:
    values = [value for value in SMALL if value.partition("=")[0] != override.partition("=")[0]]
    if not override.startswith("data.dir"):
        values.append(f"data.dir={text}")
    monkeypatch.setattr(sys, "argv", ["train.py", *values, *QUIET, f"hydra.run.dir={tmp_path}/run", override])
    with pytest.raises(SystemExit, match=message):
        runpy.run_path(str(TRAIN), run_name="__main__")
    assert not (tmp_path / "run" / "results.json").exists()


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(InstantiationException, match=r"trainer") as caught:
        run(monkeypatch, tmp_path / "run", text, "trainer.devices=none")
    assert not isinstance(caught.value.__cause__, InputError)


def test_help_shows_the_usage_and_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--help", "hydra/hydra_logging=none"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(TRAIN), run_name="__main__")
    output = capsys.readouterr().out
    assert "python train.py [GROUP=CHOICE ...]" in output
    assert "strategy: compile, eager, ort" in output
    assert "max_epochs: 3" in output


def terminal(*overrides: str) -> tuple[int, str]:
    """Runs train.py in a separate process. Returns its exit code and its output."""
    command = [sys.executable, "-W", "always", str(TRAIN), *overrides]
    ended = subprocess.run(command, capture_output=True, env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"})
    return ended.returncode, (ended.stderr + ended.stdout).decode()


@pytest.mark.slow
def test_the_terminal_shows_progress_and_the_result_alone(tmp_path: Path, text: Path) -> None:
    code, output = terminal(*SMALL, f"data.dir={text}", f"hydra.run.dir={tmp_path}/run", "trainer.max_epochs=1")
    assert code == 0, output
    # The last state of each progress bar.
    lines = [line.rsplit("\r", 1)[-1] for line in output.split("\n")]
    bars = ("Epoch 0:", "Validation", "Testing DataLoader")
    messages = ("`Trainer.fit` stopped:", "Restoring states", "Loaded model")
    result = [line for line in lines if line.strip() and not line.startswith(bars + messages)]
    starts = [" ".join(line.split()[:2]) for line in result]
    assert starts[0] == "test loss"
    assert result[1].split()[1] == "ms/batch"
    assert starts[2:] == ["run folder", "checkpoint " + str(tmp_path / "run" / "checkpoints" / "best.ckpt")]


@pytest.mark.slow
def test_an_invalid_value_shows_no_traceback(tmp_path: Path) -> None:
    ended = run_script(TRAIN, [*SMALL, "data.dir=absent", f"hydra.run.dir={tmp_path}/run"], tmp_path, seconds=60)
    assert ended.returncode == 1
    message = "error: absent: no such folder. Set data.dir to the folder with the WikiText-2 files.\n"
    assert ended.stderr + ended.stdout == message
