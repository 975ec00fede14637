"""Operators of training that ONNX lacks, or that torch's ONNX exporter gets wrong, in terms of others.

What torch itself decomposes is taken from its tables. Each function computes an operator of ATen with its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import default_decompositions

from lit_ort._compat.torch_export import decompositions_for_onnx, decompositions_of_torch
from lit_ort._compat.torch_sizes import whole_number

aten = torch.ops.aten
Decompositions = Mapping[Any, Callable[..., Any]]

# Batch normalization of training is written by the exporter as that of inference.
_OF_TORCH = (
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit_functional.default",
    "_native_batch_norm_legit.no_stats",
    "native_batch_norm.default",
    "max_pool2d_with_indices_backward.default",
)
# ONNX has these, and torch decomposes them into operators that it doesn't have, or into `divide`.
_KEPT = (aten.prod.default, aten.prod.dim_int, aten.floor_divide.default)


def decompositions(exporters: bool = True) -> Decompositions:
    """torch's decompositions for export, more of torch's, and those of this file.

    Args:
        exporters: whether those that torch's ONNX exporter makes itself are among them.
    """
    first = decompositions_for_onnx() if exporters else {}
    table = {**first, **default_decompositions(), **decompositions_of_torch(_OF_TORCH), **_OWN}
    return {operator: form for operator, form in table.items() if operator not in _KEPT}


# Convolutions


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The input's gradient is the opposite convolution of `grad`; the weight's convolves the input with `grad`."""
    rank = weight.dim() - 2
    # torch writes one setting if those of all dimensions are equal.
    stride, padding, dilation = ([*values] * (rank // len(values)) for values in (stride, padding, dilation))
    of_x = of_weight = of_bias = None
    if mask[0]:
        rest = [0] * rank
        if not transposed:
            settings = zip(grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
            covered = [(n - 1) * step - 2 * pad + gap * (size - 1) + 1 for n, size, step, pad, gap in settings]
            rest = [n - other for n, other in zip(x.shape[2:], covered, strict=True)]
        of_x = aten.convolution(grad, weight, None, stride, padding, dilation, not transposed, rest, groups)
    if mask[1]:
        large, small = (grad, x) if transposed else (x, grad)
        of_weight = _gradient_of_weight(large, small, weight.shape[2:], stride, padding, dilation, groups)
    if mask[2]:
        of_bias = grad.sum([0, *range(2, grad.dim())])
    return of_x, of_weight, of_bias


def _gradient_of_weight(
    large: Tensor,
    small: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolves the larger image with the smaller one: sums over the batch, at a distance of `dilation`.

    Examples become channels. Channels of one group have to be neighbors, so those of the larger image are sorted.
    """
    batch, channels, *size = large.shape
    grouped = large.reshape(batch, groups, channels // groups, *size)
    axes = [2, 1, 0, *range(3, grouped.dim())]
    images = grouped.permute(axes).reshape(channels // groups, groups * batch, *size)
    zeros = [0] * len(size)
    found = aten.convolution(images, small.transpose(0, 1), None, dilation, padding, stride, False, zeros, groups)
    found = found.transpose(0, 1)
    for k, length in enumerate(kernel):
        # A rest of the image that a strided convolution leaves adds further positions here.
        found = found.narrow(k + 2, 0, length)
    return found


# Indexing


def embedding_dense_backward(
    grad: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_by_frequency: bool
) -> Tensor:
    width = grad.shape[-1]
    flat, index = grad.reshape(-1, width), indices.reshape(-1, 1).to(torch.int64)
    if scale_by_frequency:
        counts = flat.new_zeros(rows).scatter_add(0, index[:, 0], torch.ones_like(flat[:, 0]))
        flat = flat / counts.gather(0, index[:, 0]).unsqueeze(-1)
    if padding_idx >= 0:
        flat = flat.masked_fill(index == padding_idx, 0.0)
    return flat.new_zeros(rows, width).scatter_add(0, index.expand(-1, width), flat)


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    """The mean, for which the exporter overwrites values instead."""
    if reduce != "mean":
        return NotImplemented
    ones, zeros = torch.ones_like(source), torch.zeros_like(x)
    count = zeros.scatter_add(dim, index, ones)
    if include_self:
        return x.scatter_add(dim, index, source) / (count + 1)
    return torch.where(count > 0, zeros.scatter_add(dim, index, source) / count.clamp(min=1), x)


def max_of_dimension(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Of booleans, for which ONNX Runtime has no kernel."""
    if x.dtype is not torch.bool:
        return NotImplemented
    values, indices = x.to(torch.int32).max(dim, keepdim)
    return values.to(torch.bool), indices


def divide(x: Tensor, y: Tensor | float, rounding_mode: str | None = None) -> Tensor:
    """Of integers, which the exporter converts to float32."""
    if x.is_floating_point() or (isinstance(y, Tensor) and y.is_floating_point()) or rounding_mode is None:
        return NotImplemented
    floor = torch.floor_divide(x, y)
    if rounding_mode == "floor":
        return floor
    return floor + ((floor < 0) & (floor * y != x)).to(floor.dtype)


def select_scatter(x: Tensor, source: Tensor, dim: int, index: Any) -> Tensor:
    size = x.shape[dim]
    shape = [-1 if k == dim % x.dim() else 1 for k in range(x.dim())]
    if isinstance(index, int) and index >= 0:
        indices = torch.arange(size)
    else:
        # From the end, since the exporter can't compare with a number that is computed from a size.
        indices, index = torch.arange(-size, 0), index if isinstance(index, int) else whole_number(index - size)
    return torch.where(indices.eq(index).reshape(shape), source.unsqueeze(dim), x)


def diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """By a mask: each element of the diagonal in its row and its column."""
    matrices = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = torch.arange(matrices.shape[-2]).unsqueeze(-1), torch.arange(matrices.shape[-1])
    spread = source.unsqueeze(-1) if offset >= 0 else source.unsqueeze(-2)
    places = rows[:, 0] if offset >= 0 else columns
    spread = spread.index_select(-2 if offset >= 0 else -1, places.clamp(max=source.shape[-1] - 1))
    return torch.where(rows + offset == columns, spread, matrices).movedim((-2, -1), (dim1, dim2))


def unfold_backward(grad: Tensor, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Tensor:
    dim = dim % len(input_sizes)
    windows = grad.movedim(-1, dim + 1)
    places = torch.arange(windows.shape[dim]).unsqueeze(-1) * step + torch.arange(size)
    return grad.new_zeros(input_sizes).index_add(dim, places.reshape(-1), windows.flatten(dim, dim + 1))


def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """With the broadcast, which the exporter leaves out."""
    return source.to(x.dtype).expand(x.shape)


def _places(sizes: Sequence[int], strides: Sequence[int], offset: int | None) -> Tensor:
    """The positions in memory of a view's elements."""
    places = torch.full([1], offset or 0)
    for size, stride in zip(sizes, strides, strict=True):
        places = (places.unsqueeze(-1) + torch.arange(size) * stride).reshape(-1)
    return places


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    return x.reshape(-1).gather(0, _places(size, stride, offset)).reshape(size)


def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    return x.reshape(-1).scatter(0, _places(size, stride, offset), source.reshape(-1)).reshape(x.shape)


def empty_permuted(size: Sequence[int], order: Sequence[int], *, dtype: Any = None, **_: Any) -> Tensor:
    return torch.zeros(size, dtype=dtype)


# Special functions


def _shifted(x: Tensor) -> tuple[Tensor, Tensor]:
    """x, or 1 - x if that is larger, plus six, where Stirling's series is exact; and the six numbers before."""
    positive = torch.where(x < 0.5, 1 - x, x)
    return positive + 6, torch.stack([positive + k for k in range(6)])


def lgamma(x: Tensor) -> Tensor:
    """Stirling's series, its recurrence, and the reflection for small numbers."""
    z, between = _shifted(x)
    series = (1 / 12 - (1 / 360 - 1 / (1260 * z * z)) / (z * z)) / z
    found = (z - 0.5) * z.log() - z + 0.5 * math.log(2 * math.pi) + series - between.log().sum(0)
    return torch.where(x < 0.5, math.log(math.pi) - (math.pi * x).sin().abs().log() - found, found)


def digamma(x: Tensor) -> Tensor:
    """The derivative of `lgamma`, by the derivatives of its formulas."""
    z, between = _shifted(x)
    series = (1 / 12 - (1 / 120 - 1 / (252 * z * z)) / (z * z)) / (z * z)
    found = z.log() - 0.5 / z - series - (1 / between).sum(0)
    return torch.where(x < 0.5, found - math.pi / (math.pi * x).tan(), found)


def polygamma(n: int, x: Tensor) -> Tensor:
    """The derivative of `digamma`."""
    if n != 1:
        return NotImplemented
    z, between = _shifted(x)
    square = z * z
    series = (1 + (0.5 + (1 / 6 - (1 / 30 - 1 / (42 * square)) / square) / z) / z) / z
    found = series + (1 / between.square()).sum(0)
    return torch.where(x < 0.5, (math.pi / (math.pi * x).sin()).square() - found, found)


def erfinv(x: Tensor) -> Tensor:
    """Source: Giles 2010, Approximating the erfinv function."""
    w = -((1 - x) * (1 + x)).log()
    near, far = w - 2.5, w.clamp(min=5).sqrt() - 3
    polynomials = []
    for variable, coefficients in zip((near, far), _ERFINV, strict=True):
        value = torch.full_like(x, coefficients[0])
        for coefficient in coefficients[1:]:
            value = value * variable + coefficient
        polynomials.append(value)
    return torch.where(w < 5, *polynomials) * x


_ERFINV = (
    (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
    + (-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
    (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
    + (-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def onnx_forms() -> Decompositions:
    """ONNX operators of those that a trace has, and that the exporter doesn't know."""
    from onnxscript import opset18 as op

    def product(x: Any, dims: Sequence[int] | None, output_dtype: int | None = None) -> Any:
        axes: Any = None if dims is None else op.Constant(value_ints=list(dims))
        return op.ReduceProd(x, axes, keepdims=False)

    def elements(x: Any) -> Any:
        return op.Size(x)

    def same(x: Any) -> Any:
        return op.Identity(x)

    prims = torch.ops.prims
    return {prims.prod.default: product, prims.view_of.default: same, aten.sym_numel.default: elements}


_OWN: Decompositions = {
    aten.convolution_backward.default: convolution_backward,
    aten.embedding_dense_backward.default: embedding_dense_backward,
    aten.scatter_reduce.two: scatter_reduce,
    aten.max.dim: max_of_dimension,
    aten.div.Tensor_mode: divide,
    aten.div.Scalar_mode: divide,
    aten.select_scatter.default: select_scatter,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.unfold_backward.default: unfold_backward,
    aten.lgamma.default: lgamma,
    aten.digamma.default: digamma,
    aten.polygamma.default: polygamma,
    aten.erfinv.default: erfinv,
    aten.copy.default: copy,
    aten.as_strided.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.empty_permuted.default: empty_permuted,
}
