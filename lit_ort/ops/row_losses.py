"""The loss of each row from its probabilities, without loss of precision for very small or large probabilities."""

from __future__ import annotations

import torch
from torch.nn import functional

from lit_ort.ops.matmul import matmul
from lit_ort.ops.operator import accumulation_dtype

# BLAS copies the second factor of a matmul. Matmuls with parts of it need a smaller copy and are as fast.
CLASSES_AT_A_TIME = 4096
# Smaller probabilities have lost precision by underflow; their loss is computed from the logits again.
SMALLEST_PROBABILITY = 1e-30
# For larger probabilities p in bfloat16, 1 - p has lost precision; it is computed as the sum of the other classes.
SURE = 0.5


def compute_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """hidden @ weight.T + bias. hidden: float[N, H], weight: float[C, H], bias: float[C], out: float[N, C]."""
    added = None if bias is None else bias.to(out.dtype)
    for start in range(0, len(weight), CLASSES_AT_A_TIME):
        classes = slice(start, start + CLASSES_AT_A_TIME)
        matmul(hidden, weight[classes].t(), out[:, classes], None if added is None else added[classes])
    return out


def losses_of(
    probabilities: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
) -> torch.Tensor:
    """-log of each row's probability at its label.

    Args:
        probabilities: float[N, C], the softmax of the logits of hidden, weight and bias. labels: int64[N].

    Returns:
        float32[N], float64 for float64.
    """
    exact = accumulation_dtype(probabilities.dtype)
    label_probabilities = probabilities.gather(1, labels[:, None]).squeeze(1).to(exact)
    losses = label_probabilities.clamp(max=1).log_().neg_()
    if probabilities.dtype != exact:
        sure = (label_probabilities > SURE).nonzero().squeeze(1)
        losses[sure] = torch.log1p(-_others(probabilities, labels[:, None], sure)).neg_()
    tiny = label_probabilities < SMALLEST_PROBABILITY
    if bool(tiny.any()):
        logits = compute_logits(hidden[tiny], weight, bias, out=hidden.new_empty(int(tiny.sum()), len(weight)))
        losses[tiny] = functional.cross_entropy(logits.to(exact), labels[tiny], reduction="none")
    return losses


def subtract_one(probabilities: torch.Tensor, labels: torch.Tensor) -> None:
    """Subtracts one from each row's probability at its label, in place. labels: int64[N, 1]."""
    exact = accumulation_dtype(probabilities.dtype)
    differences = probabilities.gather(1, labels).to(exact).sub_(1)
    if probabilities.dtype != exact:
        sure = (differences.squeeze(1) > SURE - 1).nonzero().squeeze(1)
        differences[sure, 0] = _others(probabilities, labels, sure).neg_()
    _put(probabilities, labels, differences.to(probabilities.dtype))


def _put(matrix: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """Writes one value into each row. In bfloat16, `scatter_` would copy the matrix twice."""
    matrix.index_put_((torch.arange(len(matrix)), columns.squeeze(1)), values.squeeze(1))


def _others(probabilities: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """One minus the probability of the label, for some rows, as the sum of the other classes.

    The sum has the precision that one minus a rounded probability has lost.
    """
    if not len(rows):
        return torch.zeros(0, dtype=torch.float32)
    selected = probabilities.index_select(0, rows)
    _put(selected, labels.index_select(0, rows), selected.new_zeros(len(rows), 1))
    return selected.sum(1, dtype=torch.float32).clamp_(max=1 - SURE)
