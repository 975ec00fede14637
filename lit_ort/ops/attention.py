"""Scaled dot-product attention with dropout, computed piece by piece, and its gradient, which recomputes the scores.

No tensor of the size of all scores exists: each piece of scores is freed before the next. The gradient recomputes
scores and dropout masks, the latter from the same seed. Results have the memory layout [batch, length, heads, width],
like torch's, so that a model can join its heads without a copy.

Without dropout and mask, the forward uses torch's flash kernel, which is faster in float32: 0.63 ms instead of 1.4 ms
for 4 x 128 tokens and 4 heads of 64, and 28 ms instead of 35 ms for 2 x 1024 tokens and 8 heads. Its backward, which
first needs its forward, is slower: 1.9 ms instead of 1.7 ms, and 100 ms instead of 88 ms. In bfloat16, both are slower:
29 ms instead of 15 ms for the forward at 1024 tokens, and 3.2 ms instead of 0.9 ms for the backward at 128.

Source: Vaswani et al. 2017; FlashAttention (Dao et al. 2022) for recomputation in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from lit_ort.ops.attention_scores import Block, Group, Mask, group_heads, groups_of, mask_of, piece_elements
from lit_ort.ops.masks import Draws, drop_probability, scale_of, smallest_kept
from lit_ort.ops.operator import NAMESPACE, Allocator, Operator, accumulation_dtype, define

aten = torch.ops.aten
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention(
    allocator: Allocator,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    stream: int,
) -> torch.Tensor:
    """Computes dropout(softmax(q @ k.T * scale + mask)) @ v.

    Args:
        allocator: allocates the result and the workspace.
        q: float[batch, heads, length, width]. k: float[batch, heads, keys, width].
        v: float[batch, heads, keys, value width].
        mask: bool (True for keys that are attended to) or float (added to the scores), broadcastable to [batch, heads,
            length, keys]; it has no gradient.
        seed: int64[], the seed of the step; -1 and None disable dropout.
        p: dropout probability, from 0 to 1.
        causal: hides the keys at later positions than the query; positions are counted from the first key.
        scale: the factor of the scores.
        stream: the number of the random stream.

    Returns:
        float[batch, heads, length, value width] in the dtype of q. The softmax is computed in float32, or in float64
        for float64.

    Raises:
        ValueError: p is not between 0 and 1.
    """
    share = drop_probability(seed, p)
    result = _empty(allocator, q, v.shape[3])
    if not k.shape[2]:
        return result.zero_()
    if share == 0 and mask is None and _flash_is_faster(q, v):
        return result.copy_(aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)[0])
    pieces = _Pieces(allocator, q, k, mask, causal, scale, pieces=1 + (share > 0))
    dropout = _Dropout(share, seed, stream)
    for group in pieces.groups():
        keys, values = group.of(k), group.of(v)
        for block in group.blocks:
            weights = pieces.weights(group, block, group.of(q, block.queries), keys)
            if share > 0:
                weights.mul_(dropout.draw(pieces.like(weights, 1)))
            part = _matmul(allocator, pieces.rounded(weights), values[:, : block.keys], dropout.scale)
            group.put(result, part, block.queries)
    return result


def attention_backward(
    allocator: Allocator,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    stream: int,
) -> Gradients:
    """The gradients of q, k and v in their dtypes, from the gradient of the result and the arguments of `attention`."""
    share = drop_probability(seed, p)
    of_q, of_k, of_v = (_empty(allocator, tensor, tensor.shape[3]) for tensor in (q, k, v))
    if not (q.shape[2] and k.shape[2]):
        return of_q.zero_(), of_k.zero_(), of_v.zero_()
    pieces = _Pieces(allocator, q, k, mask, causal, scale, pieces=2 + (share > 0))
    dropout = _Dropout(share, seed, stream)
    for group in pieces.groups():
        keys, values = group.of(k), group.of(v)
        key_sum, value_sum = (_Sum(allocator, tensor, len(group.blocks) > 1) for tensor in (keys, values))
        for block in group.blocks:
            of_result, queries = group.of(grad, block.queries), group.of(q, block.queries)
            weights = pieces.weights(group, block, queries, keys)
            of_weights = pieces.like(weights, 1)
            pieces.multiply(of_result, values[:, : block.keys].mT, of_weights, dropout.scale)
            dropped = weights
            if share > 0:
                dropout_mask = dropout.draw(pieces.like(weights, 2))
                of_weights.mul_(dropout_mask)
                dropped = dropout_mask.mul_(weights)
            value_sum.add(_matmul(allocator, pieces.rounded(dropped).mT, of_result, dropout.scale))
            aten._softmax_backward_data.out(of_weights, weights, -1, weights.dtype, grad_input=of_weights)
            of_scores = pieces.rounded(of_weights)
            group.put(of_q, _matmul(allocator, of_scores, keys[:, : block.keys], scale), block.queries)
            key_sum.add(_matmul(allocator, of_scores.mT, queries, scale))
        group.put(of_k, key_sum.total)
        group.put(of_v, value_sum.total)
    return of_q, of_k, of_v


class _Pieces:
    """The memory of a call's pieces, which is reused from piece to piece, and the computation of their weights.

    Args:
        pieces: the number of buffers of the size of a piece in the dtype of the softmax.
    """

    def __init__(
        self,
        allocator: Allocator,
        q: torch.Tensor,
        k: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        pieces: int,
    ) -> None:
        self._scale = scale
        exact = accumulation_dtype(q.dtype)
        self.mask: Mask | None = mask_of(mask, causal, q.shape[2], k.shape[2], exact)
        self._sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        elements = piece_elements(*self._sizes)
        self._exact = [allocator.empty(elements, dtype=exact) for _ in range(pieces)]
        self._narrow = None if q.dtype == exact else allocator.empty(elements, dtype=q.dtype)

    def groups(self) -> Iterator[Group]:
        return groups_of(*self._sizes, self.mask)

    def weights(self, group: Group, block: Block, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """softmax(queries @ keys.T * scale + mask) before dropout, float[rows * heads, queries, keys]."""
        size = queries.shape[0] * queries.shape[1] * block.keys
        weights = self._exact[0][:size].view(*queries.shape[:2], block.keys)
        self.multiply(queries, keys[:, : block.keys].mT, weights, self._scale)
        if self.mask is not None:
            self.mask.apply(weights, group, block)
        torch.softmax(weights, -1, out=weights)
        if self.mask is not None:
            self.mask.zero_hidden(weights, group, block)
        return weights

    def like(self, weights: torch.Tensor, number: int) -> torch.Tensor:
        """Another buffer, with the shape and dtype of the weights."""
        return self._exact[number][: weights.numel()].view(weights.shape)

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """Computes scale * a @ b for batches of matrices in the dtype of a, and stores it in `out`."""
        result = out if self._narrow is None else self._narrow[: out.numel()].view(out.shape)
        torch.baddbmm(result, a, b, beta=0, alpha=scale, out=result)
        if result is not out:
            out.copy_(result)

    def rounded(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights in the dtype of the matmuls."""
        return weights if self._narrow is None else self._narrow[: weights.numel()].view(weights.shape).copy_(weights)


class _Dropout:
    """The dropout masks of consecutive pieces, the same in the forward and the backward."""

    def __init__(self, share: float, seed: torch.Tensor | None, stream: int) -> None:
        self.scale = scale_of(share)
        self._smallest = float(smallest_kept(share))
        self._draws = None if seed is None else Draws(int(seed), stream)

    def draw(self, out: torch.Tensor) -> torch.Tensor:
        """Fills `out` with 1 for weights that are kept and 0 for those that are dropped."""
        assert self._draws is not None
        return out.copy_(self._draws.take(out.numel()).view(out.shape)).ge_(self._smallest)


class _Sum:
    """The gradient of the keys or values of some heads, summed over blocks of queries that read the first keys.

    Args:
        allocator: allocates the sum.
        tensor: float[rows * heads, keys, width], the keys or values.
        several: whether there are several blocks; their sum is in float32, or in float64 for float64.
    """

    def __init__(self, allocator: Allocator, tensor: torch.Tensor, several: bool) -> None:
        dtype = accumulation_dtype(tensor.dtype) if several else tensor.dtype
        self.total = allocator.empty(*tensor.shape, dtype=dtype).zero_()

    def add(self, part: torch.Tensor) -> None:
        self.total[:, : part.shape[1]].add_(part)


def _matmul(allocator: Allocator, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    out = allocator.empty(len(a), a.shape[1], b.shape[2], dtype=a.dtype)
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _empty(allocator: Allocator, tensor: torch.Tensor, width: int) -> torch.Tensor:
    """An uninitialized tensor [batch, heads, length, width] with the memory layout [batch, length, heads, width]."""
    batch, heads, length, _ = tensor.shape
    return allocator.empty(batch, length, heads, width, dtype=tensor.dtype).transpose(1, 2)


def _flash_is_faster(q: torch.Tensor, v: torch.Tensor) -> bool:
    return q.dtype in (torch.float32, torch.float64) and q.shape[3] == v.shape[3] and q.numel() > 0 and v.numel() > 0


def _fake_empty(tensor: torch.Tensor, width: int | torch.SymInt) -> torch.Tensor:
    batch, heads, length, _ = tensor.shape
    return tensor.new_empty(batch, length, heads, width).transpose(1, 2)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return _fake_empty(q, v.shape[3])


def _fake_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> Gradients:
    return _fake_empty(q, q.shape[3]), _fake_empty(k, k.shape[3]), _fake_empty(v, v.shape[3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    q, k, v, mask, seed, *ctx.constants = inputs
    ctx.save_for_backward(q, k, v, mask, seed)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradients = torch.ops.lit_ort.attention_backward(grad, *ctx.saved_tensors, *ctx.constants)
    return (*gradients, None, None, None, None, None, None)


def _pieces_bytes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, pieces: int
) -> int:
    batch, heads, length, width = q.shape
    keys = k.shape[2]
    exact = accumulation_dtype(q.dtype).itemsize
    elements = piece_elements(batch, heads, length, keys)
    hidden = (length * keys if causal else 0) + (0 if mask is None else mask.numel())
    narrow = 0 if q.dtype.itemsize == exact else q.dtype.itemsize
    # The keys, values, queries and results of a group, and twice as much in the gradient.
    group = group_heads(batch, heads, length, keys) * (length + keys) * (width + v.shape[3]) * exact
    return elements * (pieces * exact + narrow) + hidden * (exact + 2) + group * (1 if pieces < 2 else 2)


def _bytes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *rest: Any) -> int:
    _, p, causal, *_ = rest
    if p == 0 and mask is None and _flash_is_faster(q, v):
        return q.shape[0] * q.shape[1] * q.shape[2] * (v.shape[3] + 1) * q.element_size()
    return _pieces_bytes(q, k, v, mask, causal, 1 + (p > 0))


def _backward_bytes(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *rest: Any
) -> int:
    _, p, causal, *_ = rest
    return _pieces_bytes(q, k, v, mask, causal, 2 + (p > 0))


_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, float p, bool causal, float scale, int stream"
_ATTENTION = define(f"attention({_ARGUMENTS}) -> Tensor", attention, _fake)
_BACKWARD = define(
    f"attention_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", attention_backward, _fake_backward
)
torch.library.register_autograd(f"{NAMESPACE}::attention", _gradient, setup_context=_setup)


@register_flop_formula(torch.ops.lit_ort.attention)
def _operations(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """The FLOPs of the matmuls, from shapes."""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


@register_flop_formula(torch.ops.lit_ort.attention_backward)
def _backward_operations(
    grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])


OPERATORS = (
    Operator(_ATTENTION, attention, workspace_bytes=_bytes, recomputable=False),
    Operator(_BACKWARD, attention_backward, workspace_bytes=_backward_bytes, recomputable=False),
)
