"""Temporarily replaces attributes and dictionary entries of other packages."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Sets `owner.name` to a value while the block runs.

    Raises:
        AttributeError: there is no such attribute.
    """
    original = getattr(owner, name)
    # An object with slots has no attributes of a class to fall back on.
    is_own = not hasattr(owner, "__dict__") or name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def replaced_entry(entries: MutableMapping[Key, Value], key: Key, value: Value) -> Iterator[None]:
    """Sets `entries[key]` to a value while the block runs; the key can be new."""
    original = {key: entries[key]} if key in entries else {}
    entries[key] = value
    try:
        yield
    finally:
        if original:
            entries[key] = original[key]
        else:
            del entries[key]


@contextmanager
def removed_entry(entries: MutableMapping[Key, Value], key: Key) -> Iterator[None]:
    """Removes `entries[key]` while the block runs, if it exists."""
    original = {key: entries.pop(key)} if key in entries else {}
    try:
        yield
    finally:
        entries.update(original)
