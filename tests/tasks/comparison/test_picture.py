"""Curves of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lit_ort_tasks.comparison.outcome import Outcome
from lit_ort_tasks.comparison.picture import Curve, read_curve
from torch.utils.tensorboard.writer import SummaryWriter

from tests.tasks.comparison.runs import METRICS, STEPS


def test_curves_are_those_of_the_last_run_in_the_folder(tmp_path: Path) -> None:
    for earlier_s, losses in ((500.0, (9.0, 8.0)), (0.0, (7.0, 6.5))):
        with SummaryWriter(str(tmp_path / "eager"), filename_suffix=f".{earlier_s}") as writer:
            for step, loss in zip((49, 99), losses, strict=True):
                writer.add_scalar("train/loss", loss, step, walltime=1000.0 - earlier_s + step)
    results: dict[str, Any] = dict(steps=STEPS | dict(started_unix_s=1000.0), metrics=METRICS)
    outcome = Outcome("eager", tmp_path / "eager" / "output.log", results, None)
    curve = read_curve(outcome, "train/loss")
    assert curve.steps == [49, 99]
    assert curve.values == [7.0, 6.5]
    # A step takes 100 ms.
    assert curve.seconds == pytest.approx([5.0, 10.0])
    assert read_curve(outcome, "absent") == Curve([], [], [])
