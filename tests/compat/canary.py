"""What a canary says: which private symbol broke, what that breaks, and the file that has to be mended."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def canary(symbol: str, file: str, effect: str) -> Iterator[Any]:
    """Gives the file of the fence; whatever goes wrong with the symbol is reported by these three words."""
    message = f"{symbol} has changed, so that {effect}. Mend lit_ort/_compat/{file}.py"
    try:
        yield importlib.import_module(f"lit_ort._compat.{file}")
    except (AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError, RuntimeError) as error:
        pytest.fail(f"{message} ({type(error).__name__}: {error})")
