"""Keeps notes of torch's exporter that are not for users from them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def ignore_torch_deprecation() -> None:
    """Drops torch's warning about its own use of its own deprecated class, until `catch_warnings` ends."""
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*isinstance\(treespec, LeafSpec\).*")


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Keeps the exporter's progress notes (missing torchvision and the like) from the user; errors still raise."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            ignore_torch_deprecation()
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        logger.setLevel(level)
