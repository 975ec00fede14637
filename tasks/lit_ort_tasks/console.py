"""Keeps the terminal to what the user can act on."""

from __future__ import annotations

import logging
import warnings

# Regular expressions at the start of a warning, each with why nothing is to be done about it.
KNOWN_WARNINGS = (
    # Batches are slices of a tensor in memory: worker processes would make loading slower.
    r"The '\w+_dataloader' does not have many workers",
    # Lightning 2.6 on torch 2.13; only Lightning can change it.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # A resumed run has a folder of its own: its best checkpoint is the best of its own epochs.
    r"The dirpath has changed from .*, therefore `best_model_score`",
)

# The starts of log lines of Lightning that no choice of the user's changes.
KNOWN_LINES = ("GPU available: False", "TPU available: False", "💡 Tip:")


def drop_known_messages() -> None:
    """Drops the messages above, and no others, for this process."""
    for pattern in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for library in ("lightning.pytorch", "pytorch_lightning"):  # the same code, installed under two names
        logging.getLogger(f"{library}.utilities.rank_zero").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(KNOWN_LINES)
