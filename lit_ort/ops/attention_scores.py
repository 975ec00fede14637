"""Divides the scores of attention into pieces: some queries of some heads, without keys that are hidden from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Scores of a piece: 2 MB, which stay in the cache of a core between two matmuls.
CHUNK_ELEMENTS = 2**19
# The number of queries of a block that omits hidden keys, and the fraction of all scores below which this is faster.
BLOCK = 128
WORTH = 0.8


@dataclass(frozen=True)
class Block:
    """Consecutive queries, and the number of keys that they read, from the first."""

    queries: slice
    keys: int

    @property
    def size(self) -> int:
        return self.queries.stop - self.queries.start


@dataclass(frozen=True)
class Group:
    """Some heads of one row of the batch, or all heads of several rows, and the blocks of their queries, in order."""

    rows: slice
    heads: slice
    blocks: tuple[Block, ...]

    def of(self, whole: torch.Tensor, queries: slice | None = None) -> torch.Tensor:
        """The group's part of a tensor [batch, heads, length, width], contiguous, as [rows * heads, ..., width]."""
        part = whole[self.rows, self.heads] if queries is None else whole[self.rows, self.heads, queries]
        return part.reshape(-1, *part.shape[2:]).contiguous()

    def shared(self, whole: torch.Tensor, block: Block) -> torch.Tensor:
        """A block's part of a broadcast tensor [batch or 1, heads or 1, length or 1, keys or 1]."""
        rows = whole[self.rows] if len(whole) > 1 else whole
        heads = rows[:, self.heads] if rows.shape[1] > 1 else rows
        queries = heads[:, :, block.queries] if heads.shape[2] > 1 else heads
        return queries[..., : block.keys]

    def put(self, whole: torch.Tensor, part: torch.Tensor, queries: slice | None = None) -> None:
        """Writes the group's part of a tensor; the inverse of `of`."""
        target = whole[self.rows, self.heads] if queries is None else whole[self.rows, self.heads, queries]
        target.copy_(part.view(target.shape))


@dataclass(frozen=True)
class Mask:
    """The mask of a call in the forms in which it is used.

    Args:
        bias: float[batch or 1, heads or 1, length or 1, keys or 1], added to the scores.
        hidden: bool[..., 1] with the other dimensions of `bias`, True for queries that attend to no key; None if there
            are no such queries.
        seen: bool[batch or 1, length or 1, keys], True for keys that any head attends to.
    """

    bias: torch.Tensor
    hidden: torch.Tensor | None
    seen: torch.Tensor

    def apply(self, scores: torch.Tensor, group: Group, block: Block) -> None:
        self._by_row(scores, group).add_(group.shared(self.bias, block))

    def zero_hidden(self, weights: torch.Tensor, group: Group, block: Block) -> None:
        """Zeroes the weights of queries that attend to no key, as torch's `_safe_softmax` does."""
        if self.hidden is not None:
            self._by_row(weights, group).masked_fill_(group.shared(self.hidden, block), 0)

    def _by_row(self, scores: torch.Tensor, group: Group) -> torch.Tensor:
        return scores.view(group.rows.stop - group.rows.start, -1, *scores.shape[1:])


def mask_of(mask: torch.Tensor | None, causal: bool, length: int, keys: int, dtype: torch.dtype) -> Mask | None:
    """The mask of a call, or None if no key is hidden.

    Args:
        mask: bool (True for keys that are attended to) or float (added to the scores), broadcastable to [batch, heads,
            length, keys].
        causal: hides the keys at later positions than the query; positions are counted from the first key.
        length: the number of queries.
        keys: the number of keys.
        dtype: the dtype of the scores.
    """
    if mask is None and not causal:
        return None
    bias = torch.zeros((), dtype=dtype) if mask is None else _bias(mask, dtype)
    if causal:
        later = torch.ones(length, keys, dtype=torch.bool).triu_(1)
        bias = bias.expand(*bias.shape[:-2], length, keys).masked_fill(later, float("-inf"))
    bias = bias.reshape(*(1,) * (4 - bias.dim()), *bias.shape)
    hidden_keys = torch.isneginf(bias).expand(-1, -1, -1, keys)
    rows = hidden_keys.all(-1, keepdim=True)
    # All heads compute the keys that any head attends to.
    return Mask(bias, rows if bool(rows.any()) else None, hidden_keys.all(1).logical_not_())


def groups_of(batch: int, heads: int, length: int, keys: int, mask: Mask | None) -> Iterator[Group]:
    """All groups of a call; those whose queries read the most keys are first."""
    if not batch * heads * length * keys:
        return
    common = None if mask is not None and len(mask.seen) > 1 else _blocks_of(mask, slice(0, 1), length, keys)
    for rows in _parts(batch, CHUNK_ELEMENTS // (heads * length * keys)):
        blocks = common or _blocks_of(mask, rows, length, keys)
        size = max(block.size * block.keys for block in blocks)
        # There are several rows only if all heads of a row fit into a piece.
        most = heads if rows.stop - rows.start > 1 else CHUNK_ELEMENTS // size
        for part in _parts(heads, most):
            yield Group(rows, part, blocks)


def piece_elements(batch: int, heads: int, length: int, keys: int) -> int:
    """The largest number of scores in any block of any group."""
    return min(batch * heads * length * keys, max(CHUNK_ELEMENTS, BLOCK * keys))


def group_heads(batch: int, heads: int, length: int, keys: int) -> int:
    """The largest number of heads in a group, over all its rows, unless a mask hides most of the keys."""
    return min(batch * heads, max(1, CHUNK_ELEMENTS // max(1, min(length, BLOCK) * keys)))


def blocks_of_seen(seen: torch.Tensor, length: int) -> tuple[Block, ...]:
    """Blocks of queries that read keys only up to the last one that any of the queries attends to.

    All blocks read the same number of keys if omitting keys saves little.

    Args:
        seen: bool[length or 1, keys], True for keys that are attended to.
        length: the number of queries.
    """
    if len(seen) == 1:
        return _even_blocks(length, _reach(seen))
    starts = range(0, length, BLOCK)
    blocks = [Block(slice(start, min(start + BLOCK, length)), _reach(seen[start : start + BLOCK])) for start in starts]
    most = max(block.keys for block in blocks)
    if sum(block.size * block.keys for block in blocks) > WORTH * length * most:
        return _even_blocks(length, most)
    return tuple(sorted(blocks, key=lambda block: -block.keys))


def _blocks_of(mask: Mask | None, rows: slice, length: int, keys: int) -> tuple[Block, ...]:
    if mask is None:
        return _even_blocks(length, keys)
    seen = mask.seen[rows] if len(mask.seen) > 1 else mask.seen
    return blocks_of_seen(seen.any(0), length)


def _even_blocks(length: int, keys: int) -> tuple[Block, ...]:
    return tuple(Block(part, keys) for part in _parts(length, max(BLOCK, CHUNK_ELEMENTS // keys)))


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _parts(whole: int, most: int) -> Iterator[slice]:
    size = max(1, most)
    return (slice(start, min(start + size, whole)) for start in range(0, whole, size))


def _reach(seen: torch.Tensor) -> int:
    """One more than the position of the last key that any query attends to; 1 if there is no such key."""
    positions = seen.any(0).nonzero()
    return int(positions[-1]) + 1 if len(positions) else 1
