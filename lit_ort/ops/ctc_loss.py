"""Connectionist temporal classification: the loss of each sequence and its gradient in one operator.

torch's operator returns a table whose size is that of the longest target, which only a run tells.

Source: Graves et al. 2006.
"""

from __future__ import annotations

from typing import Any

import torch

from lit_ort.ops.operator import NAMESPACE, Allocator, Operator, define

aten = torch.ops.aten


def ctc_loss(
    allocator: Allocator,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
    has_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sequence, and its gradient.

    Args:
        allocator: not used, since torch's operator allocates its results.
        log_probs: float[steps, batch, classes].
        targets: int64[batch, longest] or int64[sum of target_lengths].
        input_lengths, target_lengths: int64[batch], of each sequence.
        blank: the class that is no label.
        zero_infinity: whether the gradient of an infinite loss is zero.
        has_gradient: whether the gradient is computed.

    Returns:
        float[batch], and float[steps, batch, classes], or float[0] without a gradient.

    Raises:
        RuntimeError: a length is out of range, or torch has no kernel for a dtype.
    """
    # The kernels read others as if they were contiguous.
    given = [value.contiguous() for value in (log_probs, targets, input_lengths, target_lengths)]
    losses, alpha = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    if not has_gradient:
        return losses, log_probs.new_empty(0)
    ones = torch.ones_like(losses)
    gradient = aten._ctc_loss_backward.Tensor(ones, *given, losses, alpha.contiguous(), blank, zero_infinity)
    return losses, gradient.contiguous()


def _fake(log_probs: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = log_probs.shape if rest[-1] else (0,)
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _gradient(ctx: Any, grad: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return gradient * grad[:, None], *(None,) * 6


_SCHEMA = (
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity, bool has_gradient) -> (Tensor, Tensor)"
)
OPERATORS = (Operator(define(_SCHEMA, ctc_loss, _fake), ctc_loss, recomputable=False),)
torch.library.register_autograd(f"{NAMESPACE}::ctc_loss", _gradient, setup_context=_setup)
