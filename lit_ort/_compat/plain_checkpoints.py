"""Reads the tensors and plain values of a checkpoint file, whatever else is in it.

Of classes and functions that torch does not take for safe, none is imported or called: placeholders are in their place.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Mapping
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


def _placeholder_of(*_: Any) -> type[_Placeholder]:
    return _Placeholder


def _tensor_of_subclass(make: Callable[..., torch.Tensor], kind: type, arguments: Any, state: Any) -> torch.Tensor:
    return make(*arguments)


# Classes within classes are attributes, and tensors of classes that are not known are tensors.
_OWN: Mapping[str, Any] = types.MappingProxyType(
    {"builtins.getattr": _placeholder_of, "torch._tensor._rebuild_from_type_v2": _tensor_of_subclass}
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        # The name of the module in Python 2, which files of torch have.
        name = f"{'builtins' if module_name == '__builtin__' else module_name}.{global_name}"
        return _OWN[name] if name in _OWN else _get_allowed_globals().get(name, _Placeholder)


def _load(file: Any, **settings: Any) -> Any:
    return _Unpickler(file, **settings).load()


# What torch reads with in place of the module `pickle`.
_PICKLE = types.SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__="pickle")


def plain_values(path: Path) -> dict[str, Any]:
    """The content of a checkpoint file on the CPU, without objects that are no plain values."""
    return torch.load(path, map_location="cpu", pickle_module=_PICKLE, weights_only=False)
