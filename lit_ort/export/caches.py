"""Converts transformers' key-value caches to tuples of tensors, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Layers(NamedTuple):
    """A cache as tensors.

    Args:
        tensors: the keys and values of each layer.
        cache: the original cache.
    """

    tensors: tuple[tuple[Tensor, Tensor], ...]
    cache: Any


class Pair(NamedTuple):
    """The self-attention and cross-attention caches of a decoder that attends to an encoder."""

    own: Layers
    cross: Layers
    cache: Any


def is_cache(value: Any) -> bool:
    return hasattr(value, "layers") and hasattr(value, "get_seq_length")


def is_pair(value: Any) -> bool:
    return hasattr(value, "self_attention_cache") and hasattr(value, "cross_attention_cache")


def unpack_caches(value: Any) -> Any:
    """Replace the caches in a value by `Layers` and `Pair`."""
    if is_pair(value):
        return Pair(unpack_caches(value.self_attention_cache), unpack_caches(value.cross_attention_cache), value)
    if is_cache(value):
        return Layers(tuple((layer.keys, layer.values) for layer in value.layers), value)
    if isinstance(value, Mapping):
        return {key: unpack_caches(part) for key, part in value.items()}
    return type(value)(map(unpack_caches, value)) if type(value) in (tuple, list) else value


def pack_caches(value: Any) -> Any:
    """Replace `Layers` and `Pair` in a value by copies of the caches, which a call can update."""
    if isinstance(value, Pair):
        pair = copy.copy(value.cache)
        pair.self_attention_cache, pair.cross_attention_cache = pack_caches(value.own), pack_caches(value.cross)
        return pair
    if isinstance(value, Layers):
        cache = copy.copy(value.cache)
        cache.layers = [copy.copy(layer) for layer in value.cache.layers]
        for layer, (keys, values) in zip(cache.layers, value.tensors, strict=True):
            layer.keys, layer.values = keys, values
        return cache
    if isinstance(value, dict):
        return {key: pack_caches(part) for key, part in value.items()}
    return type(value)(map(pack_caches, value)) if type(value) in (tuple, list) else value
