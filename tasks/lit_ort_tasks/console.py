"""Messages of Lightning: which of them are hidden, and where the others are written."""

from __future__ import annotations

import logging
import warnings

# Regular expressions for the start of a warning, each with the reason for hiding it.
KNOWN_WARNINGS = (
    # Batches are slices of a tensor in memory: worker processes would make loading slower.
    r"The '\w+_dataloader' does not have many workers",
    # Lightning 2.6 with torch 2.13; only Lightning can change it.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # A resumed run has a separate folder, whose best checkpoint is the best of the epochs since.
    r"The dirpath has changed from .*, therefore `best_model_score`",
)

# The starts of log lines of Lightning that are the same in every run.
KNOWN_LINES = ("GPU available: False", "TPU available: False", "💡 Tip:")


def drop_known_messages() -> None:
    """Drops the messages above in this process."""
    for pattern in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for library in ("lightning.pytorch", "pytorch_lightning"):  # the same code, installed under two names
        logging.getLogger(f"{library}.utilities.rank_zero").addFilter(_is_unknown)


def record_messages() -> None:
    """Writes the messages of Lightning and of the strategies to the log file of Hydra's run as well.

    Lightning's loggers have handlers of their own, and don't pass messages on to Hydra's.
    """
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            # That of an earlier run of this process.
            if isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)
        if not logger.propagate:
            for handler in files:
                logger.addHandler(handler)


def _is_unknown(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(KNOWN_LINES)
