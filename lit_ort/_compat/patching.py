"""Replaces attributes and entries of other packages' objects for a while."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Sets `owner.name` to a value for as long as the block runs.

    Raises:
        AttributeError: there is no such attribute, so that nothing would be replaced.
    """
    original = getattr(owner, name)
    is_own = name in vars(owner)
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
    """Sets `entries[key]` to a value for as long as the block runs, whether or not there was one."""
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
    """Leaves `entries[key]` out for as long as the block runs, if there is one."""
    original = {key: entries.pop(key)} if key in entries else {}
    try:
        yield
    finally:
        entries.update(original)
