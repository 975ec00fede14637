"""Computes cumulative sums of whole numbers, such as those of positions in packed sequences, with sums over rows.

In:  `cumsum(x, dim)` of integers or booleans, along a dimension of a fixed size
Out: sums within blocks of about the square root of the size, plus the sums of the blocks before
Saves a torch node: regions compute the sums, which are exact in any order, and a native session runs the step without a
call of Python.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from lit_ort._compat.torch_sizes import hint_of
from lit_ort.passes.node_builder import NodeBuilder, replace_nodes

aten = torch.ops.aten
# Of all sums over blocks. Above, torch's sequential sum is faster. Sizes that change can become many times as large.
_MOST_ADDITIONS, _MOST_OF_ANY_SIZE = 2**18, 2**15


def sum_in_blocks(module: fx.GraphModule) -> int:
    """Rewrites cumulative sums in a graph, in place. Returns their number."""
    return replace_nodes(module, _is_short, _sum)


def _is_short(node: fx.Node) -> bool:
    if node.target is not aten.cumsum.default:
        return False
    value, dim = node.meta["val"], node.args[1]
    if value.dtype != torch.int64 or not value.dim():
        return False
    size = value.shape[dim]
    elements = math.prod(hint_of(other) or 0 for other in value.shape)
    if not isinstance(size, int) or not elements:
        return False
    is_fixed = all(isinstance(other, int) for other in value.shape)
    return elements * sum(_blocks(size)) <= (_MOST_ADDITIONS if is_fixed else _MOST_OF_ANY_SIZE)


def _blocks(size: int) -> tuple[int, int]:
    """The number of blocks and their size, whose product is `size` and whose sum is the smallest."""
    count = next(count for count in range(math.isqrt(size), 0, -1) if size % count == 0)
    return count, size // count


def _sum_before(builder: NodeBuilder, values: fx.Node, inclusive: bool) -> fx.Node:
    """For each element along the last dimension, the sum of those before it, with or without the element."""
    example = values.meta["val"]
    places = builder(aten.arange.default, example.shape[-1], device=example.device)
    is_before = aten.le.Tensor if inclusive else aten.lt.Tensor
    mask = builder(is_before, places, builder(aten.unsqueeze.default, places, 1))
    zero = builder(aten.full.default, [], 0, dtype=torch.int64, device=example.device)
    masked = builder(aten.where.self, mask, builder(aten.unsqueeze.default, values, -2), zero)
    return builder(aten.sum.dim_IntList, masked, [-1])


def _sum(builder: NodeBuilder, node: fx.Node) -> fx.Node:
    values, dim = node.args[:2]
    assert isinstance(values, fx.Node)
    if values.meta["val"].dtype != torch.int64:
        values = builder(aten._to_copy.default, values, dtype=torch.int64)
    rows = builder(aten.transpose.int, values, dim, -1)
    shape = rows.meta["val"].shape
    parts = builder.reshape(rows, (*shape[:-1], *_blocks(shape[-1])))
    before = _sum_before(builder, builder(aten.sum.dim_IntList, parts, [-1]), inclusive=False)
    sums = builder(
        aten.add.Tensor, _sum_before(builder, parts, inclusive=True), builder(aten.unsqueeze.default, before, -1)
    )
    moved = builder(aten.transpose.int, builder.reshape(sums, shape), dim, -1)
    # Torch's result is contiguous.
    is_last = dim in (-1, len(shape) - 1)
    return moved if is_last else builder(aten.clone.default, moved, memory_format=torch.contiguous_format)
