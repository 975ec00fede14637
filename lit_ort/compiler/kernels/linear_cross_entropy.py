"""Output layer and cross entropy together, a chunk of rows at a time: loss and every gradient in one visit.

Only one chunk of logits exists at any time, rows whose label is ignored are never computed, and each logit is written
once by the product and once by the softmax. The gradients are those of a loss gradient of one.

Source: the idea of taking gradients in the forward, chunk by chunk, is that of Liger Kernel (Hsu et al. 2024).
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from lit_ort.compiler.kernels.bf16 import BF16
from lit_ort.compiler.kernels.product import product
from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool

NAME = "linear_cross_entropy"
# Positions of the node's inputs; a bias and class weights follow in this order, where there are any.
HIDDEN, WEIGHT, LABELS, SETTINGS, BIAS = range(5)
# Positions of the node's outputs.
LOSS, HIDDEN_GRADIENT, WEIGHT_GRADIENT, BIAS_GRADIENT = range(4)

# The weight's gradient is read and written once a chunk, which few and large chunks keep cheap.
CHUNK_BYTES = 80_000_000
# BLAS keeps a copy of a product's second factor, which parts of it keep small at no cost.
CLASSES_AT_A_TIME = 4096
# Probabilities below this have lost digits to underflow; their loss is computed from the logits again.
SMALLEST_PROBABILITY = 1e-30
# Above it, one less a probability in bfloat16 has lost digits; it is computed from the other classes.
SURE = 0.5


def kernel_name(bias: bool, weighted: bool, bf16: bool = False) -> str:
    """Name of the kernel for a layer and loss of this kind."""
    return f"{NAME}{'_bias' if bias else ''}{'_weighted' if weighted else ''}{BF16 if bf16 else ''}"


def settings(ignore_index: int, mean: bool, wanted: tuple[bool, bool, bool]) -> list[int]:
    """The kernel's input `SETTINGS`: the label that doesn't count, the reduction, and which gradients are read."""
    return [ignore_index, int(mean), *map(int, wanted)]


def linear_cross_entropy(
    pool: BufferPool,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    settings: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    products: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """cross_entropy(hidden @ weight.T + bias, labels) and its gradients.

    Args:
        hidden: float[N, H]. weight: float[C, H]. labels: int64[N]. bias, class_weight: float32[C].
        settings: as `settings` makes it, int64[5].
        products: the type that factors and results of products are rounded to, logits and their softmax among them;
            hidden and weight may come in it. Losses and sums over chunks are float32 in any case.

    Returns:
        loss float32[], and the gradients of hidden, weight and bias, empty where nobody reads them.

    Raises:
        IndexError: a label outside of 0..C-1 that is not ignored.
    """
    ignore_index, mean, *wanted = settings.tolist()
    counted = labels != ignore_index
    _require_classes(labels, counted, classes=len(weight))
    rows = None if bool(counted.all()) else counted.nonzero().squeeze(1)
    given = hidden if rows is None else hidden.index_select(0, rows)
    given, weight = given.to(products), weight.to(products)
    labels = labels if rows is None else labels.index_select(0, rows)
    share = torch.ones(len(labels)) if class_weight is None else class_weight.index_select(0, labels)
    total = share.sum() if mean else torch.ones(())
    gradients = _Gradients(pool, given, weight, *wanted)
    losses = torch.empty(len(labels))
    for chunk in _chunks(len(labels), len(weight), weight.itemsize):
        probabilities = _probabilities(pool, given[chunk], weight, bias)
        losses[chunk] = _losses(probabilities, given[chunk], weight, bias, labels[chunk])
        if any(wanted):
            _subtract_one(probabilities, labels[chunk, None])
            gradients.add(chunk, probabilities, share[chunk] / total)
        del probabilities
    gradients.settle()
    loss = torch.dot(losses, share) / total
    of_hidden = gradients.of_hidden
    if rows is not None and wanted[0]:
        of_hidden = pool.empty(*hidden.shape).zero_().index_copy_(0, rows, of_hidden)
    return loss, of_hidden, gradients.of_weight, gradients.of_bias


class _Gradients:
    """The gradients of a chunked pass, in memory of the pool; those not wanted stay empty."""

    def __init__(self, pool: BufferPool, hidden: torch.Tensor, weight: torch.Tensor, *wanted: int) -> None:
        self._pool, self._hidden, self._weight, self._wanted = pool, hidden, weight, wanted
        self._started = False
        nothing = torch.empty(0)
        self.of_hidden = pool.empty(*hidden.shape) if wanted[0] else nothing
        self.of_weight = pool.empty(*weight.shape) if wanted[1] else nothing
        self.of_bias = pool.empty(len(weight)) if wanted[2] else nothing

    def add(self, chunk: slice, difference: torch.Tensor, scale: torch.Tensor) -> None:
        """One chunk: `difference` is probabilities less one at the label, `scale` each row's part of the loss."""
        # The scale goes on the narrow factor of each product rather than on the wide difference.
        add = self._add_exact if difference.dtype == torch.float32 else self._add_rounded
        add(chunk, difference, scale)
        self._started = True

    def _add_exact(self, chunk: slice, difference: torch.Tensor, scale: torch.Tensor) -> None:
        of_hidden, of_weight, of_bias = self._wanted
        kept = float(self._started)
        if of_hidden:
            product(difference, self._weight, self.of_hidden[chunk]).mul_(scale[:, None])
        if of_weight:
            scaled = self._hidden[chunk] * scale[:, None]
            torch.addmm(self.of_weight, difference.t(), scaled, beta=kept, out=self.of_weight)
        if of_bias:
            torch.addmv(self.of_bias, difference.t(), scale, beta=kept, out=self.of_bias)

    def _add_rounded(self, chunk: slice, difference: torch.Tensor, scale: torch.Tensor) -> None:
        of_hidden, of_weight, of_bias = self._wanted
        if of_hidden:
            torch.mul(difference @ self._weight, scale[:, None], out=self.of_hidden[chunk])
        if of_weight:
            into = self._pool.empty(*self.of_weight.shape, dtype=difference.dtype)
            scaled = (self._hidden[chunk] * scale[:, None]).to(difference.dtype)
            self._accumulate(self.of_weight, torch.mm(difference.t(), scaled, out=into))
        if of_bias:
            # Equal scales, the usual ones, are one after this and round to nothing else.
            largest = scale.max().clamp_min(torch.finfo(scale.dtype).tiny)
            scaled = (scale / largest).to(difference.dtype)[:, None]
            self._accumulate(self.of_bias, (difference.t() @ scaled).squeeze(1).float().mul_(largest))

    def _accumulate(self, total: torch.Tensor, part: torch.Tensor) -> None:
        if self._started:
            # Two visits of one type each take half the time of one that mixes them.
            total.add_(self._pool.empty(*part.shape).copy_(part))
        else:
            total.copy_(part)

    def settle(self) -> None:
        """Without any row that counts the gradients are zero."""
        if not self._started:
            for gradient in (self.of_hidden, self.of_weight, self.of_bias):
                gradient.zero_()


def chunk_rows(rows: int, classes: int, itemsize: int) -> int:
    """Rows of a chunk: as few chunks as hold at most `CHUNK_BYTES` of logits each, all but the last one of a size."""
    chunks = max(1, math.ceil(rows * classes * itemsize / CHUNK_BYTES))
    return max(1, math.ceil(rows / chunks))


def _chunks(rows: int, classes: int, itemsize: int) -> list[slice]:
    size = chunk_rows(rows, classes, itemsize)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    added = None if bias is None else bias.to(out.dtype)
    for start in range(0, len(weight), CLASSES_AT_A_TIME):
        classes = slice(start, start + CLASSES_AT_A_TIME)
        product(hidden, weight[classes].t(), out[:, classes], None if added is None else added[classes])
    return out


def _probabilities(
    pool: BufferPool, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    logits = _logits(hidden, weight, bias, out=pool.empty(len(hidden), len(weight), dtype=hidden.dtype))
    return torch.softmax(logits, 1, out=logits)


def _losses(
    probabilities: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
) -> torch.Tensor:
    picked = probabilities.gather(1, labels[:, None]).squeeze(1).float()
    losses = picked.clamp(max=1).log_().neg_()
    if probabilities.dtype != torch.float32:
        sure = (picked > SURE).nonzero().squeeze(1)
        losses[sure] = torch.log1p(-_others(probabilities, labels[:, None], sure)).neg_()
    tiny = picked < SMALLEST_PROBABILITY
    if bool(tiny.any()):
        logits = _logits(hidden[tiny], weight, bias, out=hidden.new_empty(int(tiny.sum()), len(weight)))
        losses[tiny] = functional.cross_entropy(logits.float(), labels[tiny], reduction="none")
    return losses


def _subtract_one(probabilities: torch.Tensor, labels: torch.Tensor) -> None:
    """Takes one from each row's probability at its label, labels: int64[rows, 1], in place."""
    differences = probabilities.gather(1, labels).float().sub_(1)
    if probabilities.dtype != torch.float32:
        sure = (differences.squeeze(1) > SURE - 1).nonzero().squeeze(1)
        differences[sure, 0] = _others(probabilities, labels, sure).neg_()
    _put(probabilities, labels, differences.to(probabilities.dtype))


def _put(matrix: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """One value a row; in bfloat16 scatter_ would copy the matrix twice."""
    matrix.index_put_((torch.arange(len(matrix)), columns.squeeze(1)), values.squeeze(1))


def _others(probabilities: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Of some rows, one less the label's probability: the sum of the others keeps the digits that rounding takes."""
    if not len(rows):
        return torch.zeros(0)
    chosen = probabilities.index_select(0, rows)
    _put(chosen, labels.index_select(0, rows), chosen.new_zeros(len(rows), 1))
    return chosen.sum(1, dtype=torch.float32).clamp_(max=1 - SURE)


def _require_classes(labels: torch.Tensor, counted: torch.Tensor, classes: int) -> None:
    outside = counted & ((labels < 0) | (labels >= classes))
    if bool(outside.any()):
        raise IndexError(
            f"label {int(labels[outside][0])} is out of range: the loss has {classes} classes, so labels are 0 to "
            f"{classes - 1}, or the ignore_index of cross_entropy"
        )


def _kernel(bias: bool, weighted: bool, bf16: bool) -> Kernel:
    products = torch.bfloat16 if bf16 else torch.float32

    def run(pool: BufferPool, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, weight, labels, settings = given[:BIAS]
        optional = list(given[BIAS:])
        added = optional.pop(0) if bias else None
        class_weight = optional.pop(0) if weighted else None
        return linear_cross_entropy(pool, hidden, weight, labels, settings, added, class_weight, products)

    gradients = {HIDDEN: HIDDEN_GRADIENT, WEIGHT: WEIGHT_GRADIENT}
    return Kernel(kernel_name(bias, weighted, bf16), run, {**gradients, BIAS: BIAS_GRADIENT} if bias else gradients)


LINEAR_CROSS_ENTROPY_KERNELS: tuple[Kernel, ...] = tuple(
    _kernel(bias, weighted, bf16) for bias in (False, True) for weighted in (False, True) for bf16 in (False, True)
)
