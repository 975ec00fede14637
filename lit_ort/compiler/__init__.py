"""From a graph of Dynamo's to a model that ONNX Runtime trains: capture, convert, gradient, passes, kernels."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """`passes` at its first use: a run whose graphs are cached needs none of what it imports."""
    if name == "passes":
        return importlib.import_module("lit_ort.compiler.passes")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
