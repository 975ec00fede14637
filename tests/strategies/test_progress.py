"""The progress bar and the log while a step compiles."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lit_ort._compat.lightning import describe_bar
from lit_ort.backend import watch
from tests.lightning_models import Net, loader, trainer

TEXT = "compiling training_step"


class Describing(Callback):
    """Describes the bar in the middle of a run, and puts back what was there."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        bar = trainer.progress_bar_callback
        before = _description(bar)
        restore = describe_bar(bar, "train", TEXT)
        assert restore is not None
        self.seen.append(_description(bar))
        restore()
        assert _description(bar) == before


def _description(bar: Any) -> str:
    if isinstance(bar, TQDMProgressBar):
        return bar.train_progress_bar.desc
    return bar.progress.tasks[bar.train_progress_bar_id].description


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_the_bar_says_what_is_compiled(kind: type[Any], tmp_path: Path) -> None:
    describing = Describing()
    run = trainer(
        "auto", tmp_path, max_steps=2, num_sanity_val_steps=0, callbacks=[kind(), describing], enable_progress_bar=True
    )
    run.fit(Net(), loader(), loader())
    assert len(describing.seen) == 2
    assert all(seen.startswith(TEXT) for seen in describing.seen)


def test_a_bar_that_is_hidden_is_not_described(tmp_path: Path) -> None:
    bar = RichProgressBar()
    seen: list[bool] = []

    class Hidden(Callback):
        def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            if not trainer.sanity_checking:
                assert bar.progress is not None
                restore = describe_bar(bar, "val", TEXT)
                shown = [task for task in bar.progress.tasks if task.description == TEXT]
                seen.append(restore is not None and len(shown) == 1 and shown[0].visible)

    trainer("auto", tmp_path, max_epochs=1, callbacks=[bar, Hidden()], enable_progress_bar=True).fit(
        Net(), loader(), loader()
    )
    assert seen
    assert all(seen)


def test_without_a_bar_there_is_nothing_to_describe() -> None:
    assert describe_bar(None, "train", TEXT) is None


@pytest.mark.parametrize("bar", [False, True])
def test_the_log_says_what_was_compiled(
    bar: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.0)
    callbacks = [TQDMProgressBar()] if bar else []
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer("ort", tmp_path, max_steps=3, num_sanity_val_steps=0, callbacks=callbacks, enable_progress_bar=bar).fit(
            Net(), loader(), loader()
        )
    lines = [line for line in caplog.messages if line.startswith("lit_ort")]
    if not bar:
        assert lines.pop(0) == "lit_ort: compiling training_step ..."
    assert len(lines) == 1
    assert lines[0].startswith("lit_ort: compiled training_step in")
