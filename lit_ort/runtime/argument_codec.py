"""The arguments of a torch node's operators as plain data that JSON can store; one argument is a "word".

A computed value is `{"slot": k}`, a dynamic size `{"size": k}`, a dtype, memory format or layout `{"torch": name}`, a
complex number `{"complex": [re, im]}` and a device `{"device": name}`. Other constants are themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

SLOT, SIZE, TORCH, DEVICE, COMPLEX = "slot", "size", "torch", "device", "complex"
_NAMED = (torch.dtype, torch.memory_format, torch.layout)


def word_for(value: Any, computed: Callable[[Any], dict[str, int] | None]) -> Any:
    """Return the word for an argument.

    Args:
        value: the argument.
        computed: returns the word for an FX node or a symbolic size, and None for anything else.

    Raises:
        TypeError: the argument's type has no word.
    """
    word = computed(value)
    if word is not None:
        return word
    if isinstance(value, (list, tuple)):
        return [word_for(part, computed) for part in value]
    if isinstance(value, _NAMED):
        return {TORCH: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {DEVICE: str(value)}
    if isinstance(value, complex):
        return {COMPLEX: [value.real, value.imag]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an argument is a {type(value).__name__}, which a torch node can't store")


def constant_of(word: Any) -> Any:
    """Return the argument that a word without slots and sizes encodes.

    Raises:
        TypeError: the word contains a slot, a size, or an unknown torch name.
    """
    if isinstance(word, list):
        return [constant_of(part) for part in word]
    if not isinstance(word, dict):
        return word
    ((kind, value),) = word.items()
    if kind == TORCH:
        constant = getattr(torch, value)
        if not isinstance(constant, _NAMED):
            raise TypeError(f"torch.{value} is not a dtype, memory format or layout")
        return constant
    if kind == DEVICE:
        return torch.device(value)
    if kind == COMPLEX:
        return complex(*value)
    raise TypeError(f"{word} is not a constant")


def is_constant(word: Any) -> bool:
    """Whether a word has the same value in every run."""
    if isinstance(word, list):
        return all(map(is_constant, word))
    return not isinstance(word, dict) or word.keys().isdisjoint({SLOT, SIZE})


def exact(value: Any) -> Any:
    """A key of a constant that is equal only for the same bits and type: 0.0 == -0.0, 1 == True and nan != nan."""
    if isinstance(value, float):
        return float, struct.pack("d", value)
    if isinstance(value, complex):
        return complex, struct.pack("dd", value.real, value.imag)
    return type(value), value
