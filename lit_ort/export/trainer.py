"""The trainer that a module is attached to, which stays with it after fit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn


def trainer_of(module: nn.Module) -> Any | None:
    """The trainer of a LightningModule, or None."""
    # What a module without a trainer raises, and what one that is none of Lightning's does.
    with contextlib.suppress(RuntimeError, AttributeError):
        return module.trainer
    return None


@contextlib.contextmanager
def without_trainer(module: nn.Module) -> Iterator[None]:
    """Lets a module's step log, which it may only in a trainer's loop or without a trainer."""
    attached = trainer_of(module)
    if attached is not None:
        setattr(module, "trainer", None)  # noqa: B010 - a property of Lightning's
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"You are trying to `self\.log\(\)`")
            yield
    finally:
        if attached is not None:
            setattr(module, "trainer", attached)  # noqa: B010
