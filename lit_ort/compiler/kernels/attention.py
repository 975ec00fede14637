"""Scaled dot-product attention with dropout, a chunk of heads at a time, and its gradient by recomputing the scores.

Nothing of the size of the scores lives longer than its chunk: the gradient computes scores and masks again, the masks
from the seed that the forward drew.

Source: Vaswani et al. 2017; recomputing in the backward, FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from lit_ort.compiler.kernels.bf16 import BF16, ROUNDED
from lit_ort.compiler.kernels.masks import SEEDS, Draws, scale_of, smallest_kept
from lit_ort.runtime.aten import Backward, Kernel
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.random import draw_seed

NAME, MASKED, GRADIENT, MASKED_GRADIENT = (
    "attention",
    "attention_masked",
    "attention_gradient",
    "attention_masked_gradient",
)
# Positions of the nodes' inputs; a mask follows where there is one, and in the gradient the seed comes last.
QUERY, KEY, VALUE, RATIO, SETTINGS, MASK = range(6)
_RATIOS = {NAME: RATIO, MASKED: RATIO, GRADIENT: 1 + RATIO, MASKED_GRADIENT: 1 + RATIO}
RATIO_POSITIONS = {name + end: position for name, position in _RATIOS.items() for end in ("", BF16, BF16 + ROUNDED)}

aten = torch.ops.aten
# Scores of a chunk: 2 MB, which stay in a core's cache from the product to the next one.
CHUNK_ELEMENTS = 2**19
# Queries of a block that leaves out keys which none of them sees, and the share of all scores below which this pays.
BLOCK = 128
WORTH = 0.8


@dataclasses.dataclass(frozen=True)
class _Attention:
    """One call's constants.

    Args:
        scale: of the scores.
        share: of the weights to drop. seed: of the masks.
        bias: float32[batch or 1, heads or 1, length or 1, keys], added to the scores, or None.
        hidden: bool[..., 1] like it, true in rows that attend to nothing, or None where there are none.
        seen: bool[batch or 1, length or 1, keys], true where any head attends, or None where all do.
    """

    scale: float
    share: float
    seed: int
    bias: torch.Tensor | None
    hidden: torch.Tensor | None
    seen: torch.Tensor | None

    def weights(self, piece: _Piece, out: torch.Tensor) -> torch.Tensor:
        """softmax(query key^T scale + bias) of a piece, before dropout."""
        _multiply(piece.query, piece.key.transpose(1, 2), out, self.scale)
        by_row = out.view(piece.rows.stop - piece.rows.start, -1, *out.shape[1:])
        if self.bias is not None:
            by_row.add_(piece.of(self.bias))
        torch.softmax(out, -1, out=out)
        if self.hidden is not None:
            by_row.masked_fill_(piece.of(self.hidden), 0)
        return out

    def masks(self, pool: BufferPool) -> _Masks | None:
        return _Masks(pool, self.share, self.seed) if self.share > 0 else None

    def pieces(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[_Piece]:
        """All of the work, the queries that attend to most keys first."""
        batch, heads, length, keys = *query.shape[:3], key.shape[2]
        for rows in _parts(batch, CHUNK_ELEMENTS // (heads * length * keys)):
            blocks = self._blocks(rows, length, keys)
            size = max(block.size * block.keys for block in blocks)
            # Heads of several rows are next to each other only where they are all there.
            most = heads if rows.stop - rows.start > 1 else CHUNK_ELEMENTS // size
            for part in _parts(heads, most):
                for number, block in enumerate(blocks):
                    given = (tensor[rows, part] for tensor in (key, value))
                    read = (_joined(tensor[:, :, : block.keys]) for tensor in given)
                    asking = _joined(query[rows, part, block.queries])
                    yield _Piece(asking, *read, rows=rows, heads=part, block=block, first=number == 0)

    def _blocks(self, rows: slice, length: int, keys: int) -> tuple[_Block, ...]:
        if self.seen is None:
            return (_Block(slice(0, length), keys),)
        seen = self.seen[rows] if len(self.seen) > 1 else self.seen
        return _blocks(seen.any(0).expand(-1, keys), length)


@dataclasses.dataclass(frozen=True)
class _Block:
    """Consecutive queries, and how many of the first keys they read."""

    queries: slice
    keys: int

    @property
    def size(self) -> int:
        return self.queries.stop - self.queries.start


class _Masks:
    """The dropout masks of consecutive pieces, the same ones for the same seed."""

    def __init__(self, pool: BufferPool, share: float, seed: int) -> None:
        self._pool, self._smallest = pool, float(smallest_kept(share))
        self._draws = Draws(seed)
        self.scale = scale_of(share)

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        """1 where a weight is kept and 0 elsewhere, float32 like it."""
        mask = self._pool.empty(like.numel()).copy_(self._draws.take(like.numel())).ge_(self._smallest)
        return mask.view(like.shape)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Some queries of some heads of one batch row, or of all heads of several.

    query: float[rows heads, queries, width]. key, value: float[rows heads, keys, width].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rows: slice
    heads: slice
    block: _Block
    first: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of its scores."""
        return len(self.query), self.query.shape[1], self.key.shape[1]

    def of(self, shared: torch.Tensor) -> torch.Tensor:
        """The part of a broadcast [batch or 1, heads or 1, length or 1, keys or 1] tensor that belongs here."""
        rows = shared[self.rows] if len(shared) > 1 else shared
        heads = rows[:, self.heads] if rows.shape[1] > 1 else rows
        queries = heads[:, :, self.block.queries] if heads.shape[2] > 1 else heads
        return queries[..., : self.block.keys]

    def of_queries(self, whole: torch.Tensor) -> torch.Tensor:
        """The same part of another tensor of the query's shape."""
        return _joined(whole[self.rows, self.heads, self.block.queries])

    def add(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Adds to the gradient of all keys or values that of those read here; the first piece of some heads sets it."""
        target = _joined(whole[self.rows, self.heads])
        if self.first:
            target[:, : self.block.keys].copy_(part)
            target[:, self.block.keys :].zero_()
        else:
            target[:, : self.block.keys].add_(part)


def attention(
    pool: BufferPool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ratio: torch.Tensor,
    settings: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    products: torch.dtype = torch.float32,
    results: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(query key^T scale + mask), dropout, times value.

    Args:
        query: float32[batch, heads, length, width]. key: float32[batch, heads, keys, width].
        value: float32[batch, heads, keys, value width].
        ratio: float32[], share of the weights to drop, from 0 to 1.
        settings: float32[2], the scale, and 1 for causal attention.
        mask: bool or uint8 (true takes part), or float32 (added), broadcastable to [batch, heads, length, keys].
        products: the type that factors of products are rounded to; the softmax is float32 in any case.
        results: the type of the result.

    Returns:
        float[batch, heads, length, value width], and the seed of the masks, int64[1].
    """
    seed = torch.tensor([draw_seed(SEEDS) if float(ratio) > 0 else 0])
    shape = (*query.shape[:3], value.shape[3])
    query, key, value = (_rows(pool.cast(tensor, products), mask) for tensor in (query, key, value))
    call = _call(query, key, ratio, settings, mask, int(seed))
    result = pool.empty(*query.shape[:3], value.shape[3], dtype=results)
    masks = call.masks(pool)
    dropped = masks.scale if masks else 1.0
    for piece in call.pieces(query, key, value):
        weights = call.weights(piece, pool.empty(*piece.shape))
        if masks is not None:
            weights.mul_(masks.draw(weights))
        _multiply(pool.cast(weights, products), piece.value, piece.of_queries(result), dropped)
    return result.view(shape), seed


def attention_gradient(
    pool: BufferPool,
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ratio: torch.Tensor,
    settings: torch.Tensor,
    *mask_and_seed: torch.Tensor,
    products: torch.dtype = torch.float32,
    results: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, from that of the result and what `attention` was given and drew."""
    *masked, seed = mask_and_seed
    shapes = [tensor.shape for tensor in (query, key, value)]
    mask = masked[0] if masked else None
    gradient, query, key, value = (_rows(pool.cast(t, products), mask) for t in (gradient, query, key, value))
    call = _call(query, key, ratio, settings, mask, int(seed))
    of_query = pool.empty(*query.shape, dtype=results)
    # Blocks of queries add up in float32.
    sums = results if call.seen is None else torch.float32
    of_key, of_value = (pool.empty(*tensor.shape, dtype=sums) for tensor in (key, value))
    masks = call.masks(pool)
    dropped = masks.scale if masks else 1.0
    for piece in call.pieces(query, key, value):
        given = piece.of_queries(gradient)
        weights = call.weights(piece, pool.empty(*piece.shape))
        of_weights = _multiply(given, piece.value.transpose(1, 2), pool.empty(*piece.shape), dropped)
        kept = weights
        if masks is not None:
            drawn = masks.draw(weights)
            of_weights.mul_(drawn)
            kept = drawn.mul_(weights)
        rounded = pool.cast(kept, products)
        piece.add(of_value, _product(pool, rounded.transpose(1, 2), given, dropped))
        aten._softmax_backward_data.out(of_weights, weights, -1, torch.float32, grad_input=of_weights)
        of_scores = pool.cast(of_weights, products)
        _multiply(of_scores, piece.key, piece.of_queries(of_query), call.scale)
        piece.add(of_key, _product(pool, of_scores.transpose(1, 2), piece.query, call.scale))
    gradients = (of_query, pool.cast(of_key, results), pool.cast(of_value, results))
    of_query, of_key, of_value = (result.view(shape) for result, shape in zip(gradients, shapes, strict=True))
    return of_query, of_key, of_value


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """a b scale of stacked matrices, into `out` of whatever type and strides."""
    into = out if a.dtype == out.dtype and out.is_contiguous() else a.new_empty(out.shape)
    torch.baddbmm(into, a, b, beta=0, alpha=scale, out=into)
    return out if into is out else out.copy_(into)


def _product(pool: BufferPool, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    return _multiply(a, b, pool.empty(len(a), a.shape[1], b.shape[2], dtype=a.dtype), scale)


def _rows(tensor: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[batch, heads, ...] as one row of all heads where nothing tells rows or heads apart."""
    shared = mask is None or all(size == 1 for size in mask.shape[:-2])
    return tensor.reshape(1, -1, *tensor.shape[2:]) if shared else tensor


def _joined(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, heads, ...] as [rows heads, ...] in the same memory."""
    return tensor.view(-1, *tensor.shape[2:])


def _parts(whole: int, most: int) -> Iterator[slice]:
    size = max(1, most)
    return (slice(start, min(start + size, whole)) for start in range(0, whole, size))


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    ratio: torch.Tensor,
    settings: torch.Tensor,
    mask: torch.Tensor | None,
    seed: int,
) -> _Attention:
    scale, causal = settings.tolist()
    length, keys = query.shape[2], key.shape[2]
    hidden, seen = None, None
    if causal:
        mask = torch.ones(length, keys, dtype=torch.bool).tril_()
    bias = mask
    if mask is not None:
        if not mask.is_floating_point():
            bias = torch.zeros(mask.shape).masked_fill_(mask.logical_not(), float("-inf"))
        assert bias is not None
        bias = bias.reshape(*(1,) * (4 - bias.dim()), *bias.shape)
        unseen = torch.isneginf(bias)
        rows = unseen.all(-1, keepdim=True)
        hidden = rows if bool(rows.any()) else None
        # Where any head sees a key, all compute it.
        seen = unseen.all(1).logical_not_()
    return _Attention(scale, float(ratio), seed, bias, hidden, seen)


def _blocks(seen: torch.Tensor, length: int) -> tuple[_Block, ...]:
    """Blocks of queries that leave out the keys behind the last one any of them sees, where that saves much.

    seen: bool[length or 1, keys].
    """
    if len(seen) == 1:
        return (_Block(slice(0, length), _reach(seen)),)
    starts = range(0, length, BLOCK)
    blocks = [_Block(slice(start, min(start + BLOCK, length)), _reach(seen[start : start + BLOCK])) for start in starts]
    most = max(block.keys for block in blocks)
    if sum(block.size * block.keys for block in blocks) > WORTH * length * most:
        return (_Block(slice(0, length), most),)
    return tuple(sorted(blocks, key=lambda block: -block.keys))


def _reach(seen: torch.Tensor) -> int:
    """One more than the place of the last key that any query sees; 1 where none sees any."""
    places = seen.any(0).nonzero()
    return int(places[-1]) + 1 if len(places) else 1


def _kernels(masked: bool) -> tuple[Kernel, ...]:
    name, gradient = (MASKED, MASKED_GRADIENT) if masked else (NAME, GRADIENT)
    made = []
    for end, products, results in _KINDS:
        types = {"products": products, "results": results}
        backward = Backward(
            gradient + end, ("GO(0)", *(f"I({k})" for k in range(MASK + masked)), "O(1)"), (QUERY, KEY, VALUE)
        )
        made += [
            Kernel(name + end, functools.partial(attention, **types), backward=backward),
            Kernel(gradient + end, functools.partial(attention_gradient, **types)),
        ]
    return tuple(made)


_KINDS = (
    ("", torch.float32, torch.float32),
    (BF16, torch.bfloat16, torch.float32),
    (BF16 + ROUNDED, torch.bfloat16, torch.bfloat16),
)
ATTENTION_KERNELS = (*_kernels(masked=False), *_kernels(masked=True))
