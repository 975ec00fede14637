"""Makes Dynamo trace `F.ctc_loss` as an operator whose results have known sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """As torch's function; Dynamo traces this one."""
    is_batch = log_probs.dim() == 3
    rows = log_probs if is_batch else log_probs.unsqueeze(1)
    if rows.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(rows.device.type):
        # As autocast does for torch's function.
        rows = rows.float()
    lengths = [
        one.reshape(-1).to("cpu", torch.int64) if isinstance(one, Tensor) else torch.as_tensor(one, device="cpu")
        for one in (input_lengths, target_lengths)
    ]
    has_gradient = torch.is_grad_enabled() and rows.requires_grad
    loss, _ = torch.ops.lit_ort.ctc_loss(rows, targets, *lengths, blank, zero_infinity, has_gradient)
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0.0, loss)
    if reduction == "mean":
        return (loss / lengths[1].clamp(min=1).to(loss.dtype)).mean()
    if reduction == "sum":
        return loss.sum()
    if reduction != "none":
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return loss if is_batch else loss.squeeze(0)
