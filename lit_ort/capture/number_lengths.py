"""Lets ints that are used as sizes stay symbolic: each becomes the size of an input without elements.

In:  `x[:, n : n + 64]` of a Python int `n` that changes
Out: the same of the first size of an input of shape [n, 0]
Saves a compilation for each value of an int, such as the place of a crop or the number of nodes in a graph.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import fx

from lit_ort._compat.torch_sizes import whole_number, without_elements


def lengths_among(keys: Iterable[fx.Node], numbers: Container[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """The keys that are ints, each with the ints that it is computed from: inputs, or rounded floats.

    Args:
        keys: numbers that aren't used in arithmetic with tensors.
        numbers: Dynamo's number inputs, and the numbers that are computed from them.
    """
    origins = {key: _origins(key, numbers) for key in keys if _is_int(key)}
    return {key: found for key, found in origins.items() if all(map(_changes, found))}


def add_length_inputs(graph: fx.Graph, lengths: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Replaces each of these ints by an input that is the first size of another one, which is without elements.

    Returns:
        The inputs without elements, and the sizes.
    """
    inputs, sizes = [], []
    for length in lengths:
        with graph.inserting_before(next(iter(graph.nodes))):
            inputs.append(graph.placeholder(f"length_{length.name}"))
            sizes.append(graph.placeholder(f"size_{length.name}"))
        sizes[-1].meta["example_value"] = value = length.meta["example_value"]
        inputs[-1].meta["example_value"] = without_elements(value)
        length.replace_all_uses_with(sizes[-1])
    return inputs, sizes


def _origins(key: fx.Node, numbers: Container[fx.Node]) -> set[fx.Node]:
    """The inputs and the ints of floats that an int is computed from."""
    found, seen, pending = set[fx.Node](), {key}, [key]
    while pending:
        node = pending.pop()
        if node not in numbers:
            continue
        if node.op == "placeholder" or not all(map(_is_int, node.all_input_nodes)):
            found.add(node)
            continue
        added = set(node.all_input_nodes) - seen
        seen |= added
        pending += added
    return found


def _is_int(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymInt)


def _changes(node: fx.Node) -> bool:
    """Whether Dynamo traced for more than one value of an int."""
    return _is_int(node) and not isinstance(whole_number(node.meta["example_value"]), int)
