"""Output layer and cross entropy in one operator, which computes the loss and all gradients chunk by chunk.

Only one chunk of logits exists at any time, rows with an ignored label are not computed, and each logit is written once
by the matmul and once by the softmax. The gradients are those for a loss gradient of one.

Source: Liger Kernel (Hsu et al. 2024) for computing gradients in the forward, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from lit_ort.kernels.loss_arguments import chunk_rows
from lit_ort.ops.matmul import matmul, workspace_bytes
from lit_ort.ops.operator import NAMESPACE, Allocator, Operator, accumulation_dtype, cast, define
from lit_ort.ops.row_losses import compute_logits, losses_of, subtract_one

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def linear_cross_entropy(
    allocator: Allocator,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    mean: bool,
    low_precision: bool,
    wanted: Sequence[bool],
) -> Results:
    """Computes cross_entropy(hidden @ weight.T + bias, labels) and its gradients.

    Args:
        allocator: allocates the gradients and the workspace.
        hidden: float[N, H]. weight: float[C, H]. bias, class_weight: float[C]. labels: int64[N].
        ignore_index: the label of rows that are ignored.
        mean: whether the loss is the mean over rows, weighted by class, instead of the sum.
        low_precision: whether factors and results of matmuls, and the softmax, are rounded to bfloat16, as autocast
            does. Otherwise they have the dtype of hidden. Losses and sums are always float32, or float64 for float64.
        wanted: flags for the gradients to compute: of hidden, weight and bias.

    Returns:
        The loss, float[] in the dtype of hidden, or float32 with low_precision; and the gradients of hidden, weight and
        bias in their dtypes. Gradients that are not computed are empty tensors.

    Raises:
        IndexError: a label is not in 0..C-1 and is not ignored.
    """
    matmul_dtype = torch.bfloat16 if low_precision else hidden.dtype
    exact = accumulation_dtype(matmul_dtype)
    counted = labels != ignore_index
    _require_classes(labels, counted, classes=len(weight))
    rows = None if bool(counted.all()) else counted.nonzero().squeeze(1)
    factors = _Factors(
        cast(allocator, _selected(hidden, rows), matmul_dtype), cast(allocator, weight, matmul_dtype), bias
    )
    labels = _selected(labels, rows)
    share = _share(labels, class_weight, exact)
    total = share.sum() if mean else torch.ones((), dtype=exact)
    gradients = _Gradients(allocator, factors, wanted, of_hidden=hidden.dtype)
    losses = _compute(allocator, factors, labels, share / total, gradients if any(wanted) else None)
    loss = torch.dot(losses, share) / total
    results = gradients.results(hidden, weight, bias, rows)
    return (loss.to(torch.float32 if low_precision else hidden.dtype), *results)


class _Factors:
    """The factors of the layer, in the dtype of matmuls.

    Args:
        hidden: float[N, H]. weight: float[C, H]. bias: float[C] or None.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias

    def logits(self, chunk: slice, out: torch.Tensor) -> torch.Tensor:
        return compute_logits(self.hidden[chunk], self.weight, self.bias, out)


class _Gradients:
    """The gradients while they are accumulated over chunks; those that are not wanted are empty.

    Args:
        allocator: allocates the gradients.
        factors: the factors of the layer.
        wanted: flags for the gradients of hidden, weight and bias.
        of_hidden: the dtype of hidden's gradient; sums over chunks are in float32, or in float64 for float64.
    """

    def __init__(self, allocator: Allocator, factors: _Factors, wanted: Sequence[bool], of_hidden: torch.dtype) -> None:
        self._allocator, self._factors, self._wanted = allocator, factors, wanted
        self._started = False
        rows, width = factors.hidden.shape
        classes = len(factors.weight)
        sums = accumulation_dtype(factors.weight.dtype)
        self._of_hidden = allocator.empty(rows if wanted[0] else 0, width, dtype=of_hidden)
        self._of_weight = allocator.empty(classes if wanted[1] else 0, width, dtype=sums)
        self._of_bias = allocator.empty(classes if wanted[2] else 0, dtype=sums)

    def add(self, chunk: slice, difference: torch.Tensor, scale: torch.Tensor) -> None:
        """Adds the gradients of one chunk.

        Args:
            chunk: its rows.
            difference: float[rows, C], the probabilities minus one at the label.
            scale: float[rows], the factor of each row in the loss.
        """
        # The scale is applied to the smaller factor of each matmul instead of the difference.
        add = self._add_rounded if difference.dtype == torch.bfloat16 else self._add_exact
        add(chunk, difference, scale)
        self._started = True

    def results(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients in the dtypes of their inputs; zero if all rows are ignored."""
        if not self._started:
            for gradient in (self._of_hidden, self._of_weight, self._of_bias):
                gradient.zero_()
        of_hidden = self._of_hidden
        if rows is not None and self._wanted[0]:
            of_hidden = self._allocator.empty(*hidden.shape, dtype=hidden.dtype).zero_().index_copy_(0, rows, of_hidden)
        dtypes = (hidden.dtype, weight.dtype, hidden.dtype if bias is None else bias.dtype)
        gradients = (of_hidden, self._of_weight, self._of_bias)
        first, second, third = (
            cast(self._allocator, gradient, dtype) if is_wanted else torch.empty(0, dtype=dtype)
            for gradient, dtype, is_wanted in zip(gradients, dtypes, self._wanted, strict=True)
        )
        return first, second, third

    def _add_exact(self, chunk: slice, difference: torch.Tensor, scale: torch.Tensor) -> None:
        of_hidden, of_weight, of_bias = self._wanted
        if of_hidden:
            matmul(difference, self._factors.weight, self._of_hidden[chunk]).mul_(scale[:, None])
        if of_weight:
            scaled = self._factors.hidden[chunk] * scale[:, None]
            matmul(difference.t(), scaled, self._of_weight, accumulate=self._started)
        if of_bias:
            beta = float(self._started)
            torch.addmv(self._of_bias, difference.t(), scale, beta=beta, out=self._of_bias)

    def _add_rounded(self, chunk: slice, difference: torch.Tensor, scale: torch.Tensor) -> None:
        of_hidden, of_weight, of_bias = self._wanted
        dtype = difference.dtype
        if of_hidden:
            of_rows = self._allocator.empty(len(difference), self._of_hidden.shape[1], dtype=dtype)
            torch.mm(difference, self._factors.weight, out=of_rows)
            torch.mul(of_rows, scale[:, None], out=self._of_hidden[chunk])
        if of_weight:
            out = self._allocator.empty(*self._of_weight.shape, dtype=dtype)
            scaled = (self._factors.hidden[chunk] * scale[:, None]).to(dtype)
            self._accumulate(self._of_weight, torch.mm(difference.t(), scaled, out=out))
        if of_bias:
            # Usually all scales are equal; they become one and have no rounding error.
            largest = scale.max().clamp_min(torch.finfo(scale.dtype).tiny)
            scaled = (scale / largest).to(dtype)[:, None]
            self._accumulate(self._of_bias, (difference.t() @ scaled).squeeze(1).float().mul_(largest))

    def _accumulate(self, total: torch.Tensor, part: torch.Tensor) -> None:
        if self._started:
            # A cast and a sum of one dtype take half the time of a sum of two dtypes.
            total.add_(cast(self._allocator, part, total.dtype))
        else:
            total.copy_(part)


def _compute(
    allocator: Allocator, factors: _Factors, labels: torch.Tensor, scale: torch.Tensor, gradients: _Gradients | None
) -> torch.Tensor:
    """Computes each row's loss, float[rows], and adds to the gradients.

    Args:
        allocator: allocates the logits.
        factors: the factors of the layer.
        labels: int64[rows].
        scale: float[rows], the factor of each row in the loss.
        gradients: receives the gradients, or None.
    """
    classes, dtype = len(factors.weight), factors.weight.dtype
    losses = torch.empty_like(scale)
    chunks = _chunks(len(labels), classes, dtype.itemsize)
    logits = allocator.empty(chunks[0].stop if chunks else 0, classes, dtype=dtype)
    for chunk in chunks:
        probabilities = factors.logits(chunk, out=logits[: chunk.stop - chunk.start])
        torch.softmax(probabilities, 1, out=probabilities)
        rows = factors.hidden[chunk]
        losses[chunk] = losses_of(probabilities, rows, factors.weight, factors.bias, labels[chunk])
        if gradients is not None:
            subtract_one(probabilities, labels[chunk, None])
            gradients.add(chunk, probabilities, scale[chunk])
    return losses


def _chunks(rows: int, classes: int, itemsize: int) -> list[slice]:
    size = chunk_rows(rows, classes, itemsize)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _selected(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _share(labels: torch.Tensor, class_weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The weight of each row in the loss, float[rows]."""
    if class_weight is None:
        return torch.ones(len(labels), dtype=dtype)
    return class_weight.index_select(0, labels).to(dtype)


def _require_classes(labels: torch.Tensor, counted: torch.Tensor, classes: int) -> None:
    outside = counted & ((labels < 0) | (labels >= classes))
    if bool(outside.any()):
        raise IndexError(
            f"label {int(labels[outside][0])} is out of range: the loss has {classes} classes, so labels must be 0 to "
            f"{classes - 1}, or the ignore_index of cross_entropy"
        )


def fake_results(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    mean: bool,
    low_precision: bool,
    wanted: Sequence[bool],
) -> Results:
    """Results without contents, from the arguments of `linear_cross_entropy` but the allocator."""
    loss = hidden.new_empty((), dtype=torch.float32 if low_precision else hidden.dtype)
    inputs = (hidden, weight, hidden if bias is None else bias)
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    first, second, third = (
        leaf.new_empty(shape if is_wanted else (0,))
        for leaf, shape, is_wanted in zip(inputs, shapes, wanted, strict=True)
    )
    return loss, first, second, third


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.wanted = inputs[-1]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _gradient(ctx: Any, grad: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
    first, second, third = (
        gradient * grad if is_wanted else None
        for gradient, is_wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return first, second, third, None, None, None, None, None, None


def _workspace_bytes(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    mean: bool,
    low_precision: bool,
    wanted: Sequence[bool],
) -> int:
    matmul_dtype = torch.bfloat16 if low_precision else hidden.dtype
    (rows, width), classes = hidden.shape, len(weight)
    size = chunk_rows(rows, classes, matmul_dtype.itemsize)
    # A chunk of logits, its scaled rows, and, with ignored labels, the other rows and their gradient.
    chunk_bytes = size * (classes + width) * matmul_dtype.itemsize + 2 * hidden.numel() * hidden.element_size()
    if matmul_dtype == torch.bfloat16:
        rounded = sum(factor.numel() for factor in (hidden, weight) if factor.dtype != matmul_dtype)
        # The weight's gradient of one chunk in both dtypes, and the sum if the weight is rounded.
        sum_bytes = (matmul_dtype.itemsize + 8) * weight.numel() if wanted[1] else 0
        return chunk_bytes + rounded * matmul_dtype.itemsize + sum_bytes
    logits = hidden.new_empty(size, classes)
    return chunk_bytes + workspace_bytes(logits.t(), hidden[:size]) if wanted[1] else chunk_bytes


_SCHEMA = (
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight, "
    "int ignore_index, bool mean, bool low_precision, bool[] wanted) -> "
    "(Tensor loss, Tensor hidden_gradient, Tensor weight_gradient, Tensor bias_gradient)"
)
_OPERATOR = define(_SCHEMA, linear_cross_entropy, fake_results)
torch.library.register_autograd(f"{NAMESPACE}::linear_cross_entropy", _gradient, setup_context=_setup)


@register_flop_formula(torch.ops.lit_ort.linear_cross_entropy)
def _operations(hidden: Sequence[int], weight: Sequence[int], *rest: Any, **_: Any) -> int:
    """The FLOPs of the matmuls, from shapes: logits, and the gradients that are computed."""
    wanted = rest[-1]
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + sum(wanted[:2]))


OPERATORS = (Operator(_OPERATOR, linear_cross_entropy, workspace_bytes=_workspace_bytes, recomputable=False),)
