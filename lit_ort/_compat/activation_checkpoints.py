"""Restores torch's activation checkpoints, which the Python package of onnxruntime-training replaces."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

from lit_ort._compat.imports import when_imported

_PACKAGE = "onnxruntime"


def keep_checkpoints() -> None:
    """Makes Dynamo trace activation checkpoints in a process that imports onnxruntime-training, now or later.

    `import onnxruntime` wraps `torch.utils.checkpoint.checkpoint` in a function that Dynamo does not trace
    (`_override_gradient_checkpoint` of onnxruntime 1.19.2's ORTModule), and wraps it again if the import is retried.
    This function restores torch's. In modules that have imported the wrapper by name, Dynamo traces torch's instead.
    """
    when_imported(_PACKAGE, _restore)


def _restore() -> None:
    function = checkpoint.checkpoint
    while (original := _wrapped(function)) is not None:
        torch.compiler.substitute_in_graph(function)(_checkpoint)  # pyright: ignore[reportArgumentType] - any results
        function = original
    checkpoint.checkpoint = function


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that onnxruntime's function wraps, or None for any other function."""
    if not (function.__module__ or "").startswith(f"{_PACKAGE}."):
        return None
    return inspect.getclosurevars(function).nonlocals.get("original_checkpoint")


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Read at each trace, since Dynamo recognizes the function by its attribute path.
    return checkpoint.checkpoint(function, *args, **kwargs)
