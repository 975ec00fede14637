"""Callbacks for any Trainer: time and memory of a run, checkpoints, a progress bar, checks of the loss."""

from __future__ import annotations

from functools import partial

from lit_ort._compat.imports import when_imported
from lit_ort._compat.lightning import PYTORCH_LIGHTNING, derive_from_pytorch_lightning
from lit_ort.callbacks.checkpoint_callbacks import BestCheckpoint, LastCheckpoint
from lit_ort.callbacks.nonfinite import NonFiniteLoss
from lit_ort.callbacks.progress import OneLineProgressBar, short_figure, short_name
from lit_ort.callbacks.resident_memory import MIB, peak_rss_bytes, reset_peak_rss, rss_bytes
from lit_ort.callbacks.statistics import StepStatistics, StepSummary, first_dimension

__all__ = [
    "MIB",
    "BestCheckpoint",
    "LastCheckpoint",
    "NonFiniteLoss",
    "OneLineProgressBar",
    "StepStatistics",
    "StepSummary",
    "first_dimension",
    "peak_rss_bytes",
    "reset_peak_rss",
    "rss_bytes",
    "short_figure",
    "short_name",
]

when_imported(
    PYTORCH_LIGHTNING,
    partial(
        derive_from_pytorch_lightning, BestCheckpoint, LastCheckpoint, NonFiniteLoss, OneLineProgressBar, StepStatistics
    ),
)
