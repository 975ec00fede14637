"""Dropout, whose mask is determined by a seed, and its gradient.

Source: Srivastava et al. 2014.
"""

from __future__ import annotations

from typing import Any

import torch

from lit_ort.ops.masks import CHUNK_ELEMENTS, draw_mask, drop_probability, scale_of
from lit_ort.ops.operator import NAMESPACE, Allocator, Operator, define


def dropout(
    allocator: Allocator, x: torch.Tensor, seed: torch.Tensor, p: float, stream: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sets elements to zero with probability `p`, and scales the others so that the expected value is unchanged.

    Args:
        allocator: allocates the results.
        x: float[...].
        seed: int64[], the seed of the step; -1 disables dropout.
        p: dropout probability, from 0 to 1, rounded to 16 bits.
        stream: the number of the random stream.

    Returns:
        float[...] in the dtype of x, and the mask, bool[...], True for elements that were kept.

    Raises:
        ValueError: p is not between 0 and 1.
    """
    share = drop_probability(seed, p)
    mask = allocator.empty(*x.shape, dtype=torch.bool)
    draw_mask(mask.view(-1), share, int(seed), stream)
    return _masked(allocator, x, mask, share), mask


def dropout_backward(
    allocator: Allocator, grad: torch.Tensor, mask: torch.Tensor, seed: torch.Tensor, p: float
) -> torch.Tensor:
    """The gradient of x, float[...], from the gradient of the result and from the mask, the seed and p."""
    return _masked(allocator, grad, mask, drop_probability(seed, p))


def _masked(allocator: Allocator, data: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    # A product of two dtypes would allocate a copy of the mask.
    result = allocator.empty(*data.shape, dtype=data.dtype).copy_(mask).mul_(data)
    scale = scale_of(share)
    return result if scale == 1.0 else result.mul_(scale)


def _fake(x: torch.Tensor, seed: torch.Tensor, p: float, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


def _fake_backward(grad: torch.Tensor, mask: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    return grad.new_empty(grad.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, seed, ctx.p, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], seed)


def _gradient(ctx: Any, grad: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
    mask, seed = ctx.saved_tensors
    return torch.ops.lit_ort.dropout_backward(grad, mask, seed, ctx.p), None, None, None


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, mask, seed, ctx.p = inputs
    ctx.save_for_backward(mask, seed)


def _workspace_bytes(x: torch.Tensor, *_: object) -> int:
    # Random numbers of 2 bytes.
    return 2 * min(x.numel(), CHUNK_ELEMENTS)


_DROPOUT = define("dropout(Tensor x, Tensor seed, float p, int stream) -> (Tensor, Tensor)", dropout, _fake)
_BACKWARD = define(
    "dropout_backward(Tensor grad, Tensor mask, Tensor seed, float p) -> Tensor", dropout_backward, _fake_backward
)
torch.library.register_autograd(f"{NAMESPACE}::dropout", _gradient, setup_context=_setup)
# The operator is linear, with a diagonal matrix, so it is its own gradient.
torch.library.register_autograd(f"{NAMESPACE}::dropout_backward", _gradient, setup_context=_setup_backward)

OPERATORS = (
    Operator(_DROPOUT, dropout, workspace_bytes=_workspace_bytes),
    Operator(_BACKWARD, dropout_backward),
)
