"""The trainer that a module is attached to; a module stays attached after fit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn


def trainer_of(module: nn.Module) -> Any | None:
    """The trainer of a LightningModule, or None."""
    # A LightningModule without a trainer raises RuntimeError, any other module AttributeError.
    with contextlib.suppress(RuntimeError, AttributeError):
        return module.trainer
    return None


@contextlib.contextmanager
def without_trainer(module: nn.Module) -> Iterator[None]:
    """Detaches a module from its trainer, so that its step can call `self.log` outside of a trainer's loop."""
    attached = trainer_of(module)
    if attached is not None:
        setattr(module, "trainer", None)  # noqa: B010 - a property of LightningModule
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"You are trying to `self\.log\(\)`")
            yield
    finally:
        if attached is not None:
            setattr(module, "trainer", attached)  # noqa: B010
