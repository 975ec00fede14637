"""Activation checkpoints beside onnxruntime-training, whose Python module puts a function of its own in their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

from lit_ort._compat.imports import when_imported

_PACKAGE = "onnxruntime"


def keep_checkpoints() -> None:
    """Makes Dynamo trace checkpoints of modules in a process that imports onnxruntime-training, before this or after.

    `import onnxruntime` replaces `torch.utils.checkpoint.checkpoint` by a function that Dynamo does not follow
    (`_override_gradient_checkpoint` of onnxruntime 1.19.2's ORTModule), once for each time that it is tried. Torch's
    own one goes back; modules that hold the other one by name have it traced as torch's.
    """
    when_imported(_PACKAGE, _give_back)


def _give_back() -> None:
    found = checkpoint.checkpoint
    while (original := _wrapped(found)) is not None:
        torch.compiler.substitute_in_graph(found)(_checkpoint)  # pyright: ignore[reportArgumentType] - of any results
        found = original
    checkpoint.checkpoint = found


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What onnxruntime's function stands for, or None for any other function."""
    if not (function.__module__ or "").startswith(f"{_PACKAGE}."):
        return None
    return inspect.getclosurevars(function).nonlocals.get("original_checkpoint")


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Looked up at each trace: Dynamo knows the function by the place it is read from.
    return checkpoint.checkpoint(function, *args, **kwargs)
