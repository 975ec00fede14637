"""The message of a failing canary: the private symbol that has changed, what that breaks, and the file to fix."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def canary(symbol: str, file: str, effect: str) -> Iterator[Any]:
    """A context that yields a module of the fence, and reports errors in the block with a canary's message."""
    message = f"{symbol} has changed, and as a result {effect}. Fix lit_ort/_compat/{file}.py"
    try:
        yield importlib.import_module(f"lit_ort._compat.{file}")
    except (AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError, RuntimeError) as error:
        pytest.fail(f"{message} ({type(error).__name__}: {error})")
