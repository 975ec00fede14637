"""Arguments of torch operators in plain words, which JSON can hold: what a torch node is called with.

A value that is computed is `{"slot": k}`, a size that changes `{"size": k}`, a type or format `{"torch": name}`, a
complex number `{"complex": [re, im]}`, a device `{"device": name}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SLOT, SIZE, TORCH, DEVICE, COMPLEX = "slot", "size", "torch", "device", "complex"
_NAMED = (torch.dtype, torch.memory_format, torch.layout)


def word_for(value: Any, computed: Callable[[Any], dict[str, int] | None]) -> Any:
    """An argument in plain words.

    Args:
        computed: the word for a node or a symbolic size, or None for anything else.

    Raises:
        TypeError: it has none.
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
    raise TypeError(f"an argument is a {type(value).__name__}, which a torch node can't be told")


def constant_of(word: Any) -> Any:
    """The argument that a word without slots and sizes stands for."""
    if isinstance(word, list):
        return [constant_of(part) for part in word]
    if not isinstance(word, dict):
        return word
    ((kind, value),) = word.items()
    if kind == TORCH:
        found = getattr(torch, value)
        if not isinstance(found, _NAMED):
            raise TypeError(f"torch.{value} is no type and no format")
        return found
    if kind == DEVICE:
        return torch.device(value)
    if kind == COMPLEX:
        return complex(*value)
    raise TypeError(f"{word} is no constant")


def is_constant(word: Any) -> bool:
    """Whether a word is the same in every run."""
    if isinstance(word, list):
        return all(map(is_constant, word))
    return not isinstance(word, dict) or word.keys().isdisjoint({SLOT, SIZE})
