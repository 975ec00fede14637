"""Keys and values that a decoder keeps between calls (transformers' caches) as tensors in tuples, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Layers(NamedTuple):
    """A cache as its tensors.

    Args:
        tensors: keys and values of each layer.
        cache: what they were taken from.
    """

    tensors: tuple[tuple[Tensor, Tensor], ...]
    cache: Any


class Pair(NamedTuple):
    """The two caches of a decoder that attends to an encoder as well."""

    own: Layers
    cross: Layers
    cache: Any


def is_cache(value: Any) -> bool:
    return hasattr(value, "layers") and hasattr(value, "get_seq_length")


def is_pair(value: Any) -> bool:
    return hasattr(value, "self_attention_cache") and hasattr(value, "cross_attention_cache")


def opened(value: Any) -> Any:
    """A value with `Layers` and `Pair` in place of the caches in it."""
    if is_pair(value):
        return Pair(opened(value.self_attention_cache), opened(value.cross_attention_cache), value)
    if is_cache(value):
        return Layers(tuple((layer.keys, layer.values) for layer in value.layers), value)
    if isinstance(value, Mapping):
        return {key: opened(part) for key, part in value.items()}
    return type(value)(map(opened, value)) if type(value) in (tuple, list) else value


def closed(value: Any) -> Any:
    """A value with caches again in place of `Layers` and `Pair`, which the call may fill."""
    if isinstance(value, Pair):
        pair = copy.copy(value.cache)
        pair.self_attention_cache, pair.cross_attention_cache = closed(value.own), closed(value.cross)
        return pair
    if isinstance(value, Layers):
        cache = copy.copy(value.cache)
        cache.layers = [copy.copy(layer) for layer in value.cache.layers]
        for layer, (keys, values) in zip(cache.layers, value.tensors, strict=True):
            layer.keys, layer.values = keys, values
        return cache
    if isinstance(value, dict):
        return {key: closed(part) for key, part in value.items()}
    return type(value)(map(closed, value)) if type(value) in (tuple, list) else value
