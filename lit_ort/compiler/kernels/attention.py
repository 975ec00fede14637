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
from lit_ort.compiler.kernels.dropout import draw_mask, scale_of
from lit_ort.runtime.aten import Backward, Kernel
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.random import current_generator

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
_SEEDS = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class _Attention:
    """One call's constants.

    Args:
        scale: of the scores. causal: whether a place attends to itself and those before only.
        share: of the weights to drop. seed: of the masks.
        bias: float32[batch or 1, heads or 1, length or 1, keys], added to the scores, or None.
        hidden: bool[..., 1] like it, true in rows that attend to nothing, or None where there are none.
    """

    scale: float
    share: float
    seed: int
    bias: torch.Tensor | None
    hidden: torch.Tensor | None

    def weights(self, piece: _Piece, out: torch.Tensor) -> torch.Tensor:
        """softmax(query key^T scale + bias) of a piece, before dropout."""
        keys = piece.key.transpose(1, 2)
        if self.bias is None:
            _multiply(piece.query, keys, out, self.scale)
        elif keys.dtype == out.dtype:
            torch.baddbmm(piece.of(self.bias), piece.query, keys, alpha=self.scale, out=out)
        else:
            _multiply(piece.query, keys, out, self.scale).add_(piece.of(self.bias))
        torch.softmax(out, -1, out=out)
        return out if self.hidden is None else out.masked_fill_(piece.of(self.hidden), 0)

    def masks(self, pool: BufferPool) -> _Masks | None:
        return _Masks(pool, self.share, self.seed) if self.share > 0 else None


class _Masks:
    """The dropout masks of consecutive pieces, the same ones for the same seed."""

    def __init__(self, pool: BufferPool, share: float, seed: int) -> None:
        self._pool, self._share = pool, share
        self._generator = torch.Generator().manual_seed(seed)
        self.scale = scale_of(share)

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        mask = self._pool.empty(like.numel(), dtype=torch.bool)
        draw_mask(self._pool, mask, self._share, self._generator)
        return mask.view(like.shape)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Some heads of one batch row, or of several rows where no bias tells them apart: float[heads, length, width]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    row: int
    heads: slice

    def of(self, shared: torch.Tensor) -> torch.Tensor:
        """The part of a broadcast [batch or 1, heads or 1, ...] tensor that belongs to this piece."""
        row = shared[self.row if shared.shape[0] > 1 else 0]
        return row[self.heads] if row.shape[0] > 1 else row

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """The same heads of another tensor of the query's, key's or value's shape."""
        return whole[self.row, self.heads]


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
    seed = torch.zeros(1, dtype=torch.int64)
    if float(ratio) > 0:
        seed.random_(_SEEDS, generator=current_generator())
    shape = (*query.shape[:3], value.shape[3])
    query, key, value = (_rows(pool.cast(tensor, products), mask is None) for tensor in (query, key, value))
    call = _call(query, key, ratio, settings, mask, int(seed))
    result = pool.empty(*query.shape[:3], value.shape[3], dtype=results)
    masks = call.masks(pool)
    space = _workspace(pool, query, key)
    for piece in _pieces(query, key, value):
        weights = call.weights(piece, space[: len(piece.query)])
        if masks is not None:
            weights.mul_(masks.draw(weights))
        _multiply(pool.cast(weights, products), piece.value, piece.part(result), masks.scale if masks else 1.0)
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
    gradient, query, key, value = (
        _rows(pool.cast(tensor, products), mask is None) for tensor in (gradient, query, key, value)
    )
    call = _call(query, key, ratio, settings, mask, int(seed))
    gradients = [pool.empty(*tensor.shape, dtype=results) for tensor in (query, key, value)]
    masks = call.masks(pool)
    dropped = masks.scale if masks else 1.0
    space, second = (_workspace(pool, query, key) for _ in range(2))
    for piece in _pieces(query, key, value):
        of_query, of_key, of_value = (piece.part(result) for result in gradients)
        given = piece.part(gradient)
        weights = call.weights(piece, space[: len(piece.query)])
        of_weights = _multiply(given, piece.value.transpose(1, 2), second[: len(piece.query)], dropped)
        kept = weights
        if masks is not None:
            drawn = masks.draw(weights)
            of_weights.mul_(drawn)
            kept = torch.mul(weights, drawn, out=pool.empty(*weights.shape))
        _multiply(pool.cast(kept, products).transpose(1, 2), given, of_value, dropped)
        aten._softmax_backward_data.out(of_weights, weights, -1, torch.float32, grad_input=of_weights)
        of_scores = pool.cast(of_weights, products)
        _multiply(of_scores, piece.key, of_query, call.scale)
        _multiply(of_scores.transpose(1, 2), piece.query, of_key, call.scale)
    of_query, of_key, of_value = (result.view(shape) for result, shape in zip(gradients, shapes, strict=True))
    return of_query, of_key, of_value


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """a b scale of stacked matrices, into `out` of whatever type."""
    into = out if a.dtype == out.dtype else a.new_empty(out.shape)
    torch.baddbmm(into, a, b, beta=0, alpha=scale, out=into)
    return out if into is out else out.copy_(into)


def _rows(tensor: torch.Tensor, joined: bool) -> torch.Tensor:
    """[batch, heads, ...] as one row of all heads where nothing tells the batch's rows apart."""
    return tensor.reshape(1, -1, *tensor.shape[2:]) if joined else tensor


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
    hidden = None
    if causal:
        mask = torch.ones(length, keys, dtype=torch.bool).tril_()
    bias = mask
    if mask is not None:
        if not mask.is_floating_point():
            bias = torch.zeros(mask.shape).masked_fill_(mask.logical_not(), float("-inf"))
        assert bias is not None
        bias = bias.reshape(*(1,) * (4 - bias.dim()), *bias.shape)
        rows = torch.isneginf(bias).all(-1, keepdim=True)
        hidden = rows if bool(rows.any()) else None
    return _Attention(scale, float(ratio), seed, bias, hidden)


def _heads_of_a_piece(query: torch.Tensor, key: torch.Tensor) -> int:
    return max(1, min(query.shape[1], CHUNK_ELEMENTS // (query.shape[2] * key.shape[2])))


def _workspace(pool: BufferPool, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return pool.empty(_heads_of_a_piece(query, key), query.shape[2], key.shape[2])


def _pieces(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[_Piece]:
    heads, most = query.shape[1], _heads_of_a_piece(query, key)
    for row in range(len(query)):
        for start in range(0, heads, most):
            part = slice(start, min(start + most, heads))
            yield _Piece(query[row, part], key[row, part], value[row, part], row, part)


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
