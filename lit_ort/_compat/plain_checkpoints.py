"""Reads the tensors and plain values of a checkpoint file, whatever else is in it.

Of classes and functions that torch does not take for safe, none is imported or called: placeholders are in their place.
"""

from __future__ import annotations

import pickle
import types
from pathlib import Path
from typing import Any

import torch
from torch._weights_only_unpickler import _get_allowed_globals


class _Placeholder:
    """An object of any class, without its content."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> _Placeholder:
        return self

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def add(self, item: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _get_allowed_globals().get(f"{module_name}.{global_name}", _Placeholder)


# What torch reads with in place of the module `pickle`.
_PICKLE = types.SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")


def plain_values(path: Path) -> dict[str, Any]:
    """The content of a checkpoint file on the CPU, without objects that are no plain values."""
    return torch.load(path, map_location="cpu", pickle_module=_PICKLE, weights_only=False)
