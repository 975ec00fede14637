"""The progress bar and Lightning's log while a step compiles."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lit_ort._compat.lightning import describe_bar
from lit_ort.backend import compile_timer
from lit_ort.callbacks import OneLineProgressBar
from lit_ort.strategies.compile_progress import ProgressListener, above_bars
from tests.lightning_models import Net, loader, trainer

TEXT = "compiling training_step"


class Describing(Callback):
    """Describes the bar during a run, and restores its description."""

    def __init__(self) -> None:
        self.descriptions: list[str] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        bar = trainer.progress_bar_callback
        original = _description(bar)
        restore = describe_bar(bar, "train", TEXT)
        assert restore is not None
        self.descriptions.append(_description(bar))
        restore()
        assert _description(bar) == original


def _description(bar: Any) -> str:
    if isinstance(bar, TQDMProgressBar):
        return bar.train_progress_bar.desc
    return bar.progress.tasks[bar.train_progress_bar_id].description


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_the_bar_shows_a_description(kind: type[Any], tmp_path: Path) -> None:
    describing = Describing()
    run = trainer(
        "auto", tmp_path, max_steps=2, num_sanity_val_steps=0, callbacks=[kind(), describing], enable_progress_bar=True
    )
    run.fit(Net(), loader(), loader())
    assert len(describing.descriptions) == 2
    assert all(description.startswith(TEXT) for description in describing.descriptions)


def test_a_hidden_bar_is_not_described(tmp_path: Path) -> None:
    bar = RichProgressBar()
    is_visible: list[bool] = []

    class Hidden(Callback):
        def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            if not trainer.sanity_checking:
                assert bar.progress is not None
                restore = describe_bar(bar, "val", TEXT)
                tasks = [task for task in bar.progress.tasks if task.description == TEXT]
                is_visible.append(restore is not None and len(tasks) == 1 and tasks[0].visible)

    trainer("auto", tmp_path, max_epochs=1, callbacks=[bar, Hidden()], enable_progress_bar=True).fit(
        Net(), loader(), loader()
    )
    assert is_visible
    assert all(is_visible)


def test_without_a_bar_nothing_is_described() -> None:
    assert describe_bar(None, "train", TEXT) is None


@pytest.mark.parametrize("bar", [None, TQDMProgressBar, OneLineProgressBar, RichProgressBar])
def test_a_long_compilation_is_shown(
    bar: type[Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a bar, the bar shows the seconds and one line follows; without a bar, there is one line."""
    monkeypatch.setattr(compile_timer, "SECONDS", 0.02)
    texts: list[str] = []

    def describe(progress_bar: Any, stage: str, text: str) -> Callable[[], None] | None:
        restore = describe_bar(progress_bar, stage, text)
        if restore is not None:
            texts.append(text)
        return restore

    monkeypatch.setattr("lit_ort.strategies.compile_progress.describe_bar", describe)
    callbacks: list[Callback] = [] if bar is None else [bar()]
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer("ort", tmp_path, max_steps=3, callbacks=callbacks, enable_progress_bar=bar is not None).fit(
            Net(), loader(), loader()
        )
    compiling = [line for line in caplog.messages if line.startswith("lit_ort: compiling training_step")]
    compiled = [line for line in caplog.messages if line.startswith("lit_ort: compiled training_step in")]
    if bar is None:
        assert (compiling, compiled, texts) == (["lit_ort: compiling training_step ..."], [], [])
    else:
        assert (len(compiling), len(compiled)) == (0, 1)
        own = [text for text in texts if text.startswith("compiling training_step, ")]
        assert len(own) >= 2
        assert all(text.endswith(" s") for text in own)


class OtherRank:
    is_global_zero, progress_bar_callback = False, None


def test_other_ranks_show_nothing(caplog: pytest.LogCaptureFixture) -> None:
    runner = OtherRank()
    listener = ProgressListener(runner)
    with caplog.at_level(logging.INFO):
        listener.compiling("training_step", 1.0)
        listener.note("graph break")
        listener.finished("training_step", 2.0)
    assert caplog.messages == []


class Printing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        print(end="")
        return loss * 2


def test_a_graph_break_is_a_line_of_lightnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer("ort", tmp_path, max_steps=3).fit(Printing(), loader(), loader())
    breaks = [line for line in caplog.messages if line.startswith("lit_ort: graph break")]
    assert len(breaks) == 1
    assert breaks[0].startswith(f"lit_ort: graph break in training_step at {__file__}:")
    assert breaks[0].endswith("Print in a hook such as on_train_batch_end, or log the value with self.log.")
    assert "Traceback" not in capfd.readouterr().err


def test_lines_are_written_to_the_stream_by_which_a_bar_replaces_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    own, original, replacement = trainer("auto"), io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", original)
    monkeypatch.setattr(sys, "stderr", replacement)
    handler = logging.StreamHandler(original)
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        with above_bars(own):
            logger.info("a line")
        logger.info("another line")
    finally:
        logger.removeHandler(handler)
    assert replacement.getvalue() == "a line\n"
    assert original.getvalue() == "another line\n"
