"""Functions of torch whose backward has no form in ONNX, as other functions: autograd then derives their backward.

They are used while a step is traced; eager PyTorch, with which the step is compared, runs the functions themselves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lit_ort._compat.torch_export import decompositions_of_torch
from lit_ort.export.recurrent_scans import recurrent_layer

aten = torch.ops.aten
_DROPOUTS = frozenset({"dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


class DifferentiableForms(TorchFunctionMode):
    """Replaces functions by forms, and leaves out dropout if it isn't wanted.

    Args:
        dropout: whether there is dropout.
    """

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self._dropout = dropout

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _RECURRENT and isinstance(args[3], bool):  # not of packed sequences
            return _recurrent(self._dropout, func, *args)
        if not self._dropout and name in _DROPOUTS and args:
            return args[0]
        if not self._dropout and name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ())), {**kwargs, "dropout_p": 0.0}
            kwargs = kwargs if len(args) <= 4 else {k: v for k, v in kwargs.items() if k != "dropout_p"}
        # The operator of this name returns indices too.
        is_operator = name.startswith("adaptive_max_pool") and not isinstance(func, FunctionType)
        form = FORMS.get(name) if torch.compiler.is_exporting() and not is_operator else None
        if form is not None:
            found = form(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*args, **kwargs)


def _recurrent(dropout: bool, func: Any, x: Tensor, *args: Any) -> Any:
    """A recurrent layer by layer, since torch's decompositions leave out the dropout between them."""
    state, weights, has_biases, layers, p, train, bidirectional, batch_first = args
    directions, per_layer = 2 if bidirectional else 1, len(weights) // layers
    states = state if isinstance(state, (tuple, list)) else (state,)
    has_projection = per_layer // directions > (4 if has_biases else 2)
    is_loop = torch.compiler.is_exporting() and not has_projection
    p = p if dropout and train else 0.0
    if not is_loop and (not p or layers == 1):
        return func(x, state, weights, has_biases, layers, 0.0, train, bidirectional, batch_first)
    ends = []
    for k in range(layers):
        own = [part[k * directions : (k + 1) * directions] for part in states]
        given = own if isinstance(state, (tuple, list)) else own[0]
        x = torch.dropout(x, p, True) if k and p else x
        of_layer = weights[k * per_layer : (k + 1) * per_layer]
        if is_loop:
            x, *end = recurrent_layer(func.__name__, x, own, of_layer, has_biases, bidirectional, batch_first)
        else:
            x, *end = func(x, given, of_layer, has_biases, 1, 0.0, train, bidirectional, batch_first)
        ends.append(end)
    return (x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))


# Pooling: a dimension after the other, since windows are products of intervals.


def _each(value: int | Sequence[int], rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else [*value] * (rank // len(value))


def _windows(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> tuple[Tensor, Tensor]:
    """First and last positions, plus one, of each window; padding included."""
    count = (size + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1  # each window begins in the image or in the padding before it
    first = torch.arange(count) * stride - padding
    return first, (first + kernel).clamp(max=size + padding)


def _adaptive_windows(size: int, count: int) -> tuple[Tensor, Tensor]:
    steps = torch.arange(count)
    return steps * size // count, ((steps + 1) * size + count - 1) // count


def _averaged(x: Tensor, dim: int, first: Tensor, last: Tensor, divisor: Tensor | int) -> Tensor:
    """Sums of windows of a dimension, divided, as a matmul."""
    places = torch.arange(x.shape[dim])
    inside = (places >= first.unsqueeze(-1)) & (places < last.unsqueeze(-1))
    weights = inside.to(x.dtype) / (divisor if isinstance(divisor, int) else divisor.unsqueeze(-1))
    return (x.transpose(dim, -1) @ weights.T).transpose(dim, -1)


def _largest(x: Tensor, dim: int, first: Tensor, last: Tensor, longest: int) -> Tensor:
    """The largest value of windows of a dimension; of equal ones the first receives the gradient."""
    low, high = first.clamp(min=0).unsqueeze(-1), last.clamp(max=x.shape[dim]).unsqueeze(-1) - 1
    places = torch.minimum(torch.maximum(first.unsqueeze(-1) + torch.arange(longest), low), high)
    shape = [*x.shape[:dim], *places.shape, *x.shape[dim:][1:]]
    return x.index_select(dim, places.reshape(-1)).reshape(shape).max(dim % x.dim() + 1)[0]


def _avg_pool(
    rank: int,
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    kernel, paddings = _each(kernel_size, rank), _each(padding, rank)
    strides = _each(stride, rank) if stride else kernel
    for k in range(rank):
        dim, size = k - rank, x.shape[k - rank]
        first, last = _windows(size, kernel[k], strides[k], paddings[k], ceil_mode)
        inside = last - first if count_include_pad else last.clamp(max=size) - first.clamp(min=0)
        x = _averaged(x, dim, first, last, inside if divisor_override is None else 1)
    return x if divisor_override is None else x / divisor_override


def _adaptive_avg_pool(rank: int, x: Tensor, output_size: Any) -> Tensor:
    for k, count in enumerate(_each(output_size, rank)):
        if count == 1:
            x = x.mean(k - rank, keepdim=True)
        elif count is not None:
            first, last = _adaptive_windows(x.shape[k - rank], count)
            x = _averaged(x, k - rank, first, last, last - first)
    return x


def _adaptive_max_pool(rank: int, x: Tensor, output_size: Any, return_indices: bool = False) -> Tensor:
    if return_indices:
        return NotImplemented
    # The last dimension first, as the order in which torch looks for the first of equal values.
    for k, count in reversed([*enumerate(_each(output_size, rank))]):
        size = x.shape[k - rank]
        if count is not None:
            first, last = _adaptive_windows(size, count)
            x = _largest(x, k - rank, first, last, -(-size // count) + 1)
    return x


def _max_pool3d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    if return_indices or {*_each(dilation, 3)} != {1}:
        return NotImplemented
    kernel, paddings = _each(kernel_size, 3), _each(padding, 3)
    strides = _each(stride, 3) if stride else kernel
    for k in (2, 1, 0):
        first, last = _windows(x.shape[k - 3], kernel[k], strides[k], paddings[k], ceil_mode)
        x = _largest(x, k - 3, first, last, kernel[k])
    return x


# Others


def _pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """By copies of the border."""
    if mode != "replicate":
        return NotImplemented
    for k, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        size = x.shape[-1 - k]
        x = x.index_select(-1 - k, torch.arange(-before, size + after).clamp(0, size - 1))
    return x


def _grid_sampler(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    if x.dim() != 4:
        return NotImplemented
    form = decompositions_of_torch(["grid_sampler_2d.default"])[aten.grid_sampler_2d.default]
    return form(x, grid, mode, padding, align_corners)


def _embedding_bag(input: Tensor, weight: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    names = ("max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights")
    settings = {**dict(zip(names, args, strict=False)), **kwargs}
    # A padding index of 0 is one.
    others = [value for name, value in settings.items() if name not in ("mode", "norm_type")]
    if input.dim() != 2 or any(value is not None and value is not False for value in others):
        return NotImplemented
    rows = torch.nn.functional.embedding(input, weight)
    mode = settings.get("mode", "mean")
    return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.max(1)[0]


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    found: Any = [part.select(dim, k - 1) for part in x.sort(dim)]
    found = [part.unsqueeze(dim) for part in found] if keepdim else found
    return torch.return_types.kthvalue(found)


def _median(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None:
        return x.reshape(-1).sort()[0][(x.numel() - 1) // 2]
    return torch.return_types.median(_kthvalue(x, (x.shape[dim] - 1) // 2 + 1, dim, keepdim))


def _bilinear(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = torch.einsum("...i,oij,...j->...o", x1, weight, x2)
    return found if bias is None else found + bias


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    norms = [torch.linalg.vector_norm(x, 2, dim).clamp(min=eps) for x in (x1, x2)]
    return (x1 * x2).sum(dim) / (norms[0] * norms[1])


def _rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Any:
    slope = torch.rand_like(x) * (upper - lower) + lower if training else (lower + upper) / 2
    return torch.where(x >= 0, x, x * slope)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Without reading the variance to refuse negative ones."""
    var = torch.as_tensor(var)
    var = var if var.dim() in (0, input.dim()) else var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0.0)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """transformers' matmul of experts, by which rows are sorted: that of each expert with zeros for other rows."""
    places = torch.arange(x.shape[0]).unsqueeze(-1)
    ends = [0, *(offs[k] for k in range(weight.shape[0]))]
    return sum(
        (torch.where((places >= ends[k]) & (places < ends[k + 1]), x, 0.0) @ weight[k] for k in range(weight.shape[0])),
        start=x.new_zeros(()),
    )


FORMS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **{f"avg_pool{k}d": functools.partial(_avg_pool, k) for k in (1, 2, 3)},
        **{f"adaptive_avg_pool{k}d": functools.partial(_adaptive_avg_pool, k) for k in (1, 2, 3)},
        **{f"adaptive_max_pool{k}d": functools.partial(_adaptive_max_pool, k) for k in (1, 2, 3)},
        "max_pool3d": _max_pool3d,
        "pad": _pad,
        "grid_sampler": _grid_sampler,
        "embedding_bag": _embedding_bag,
        "cdist": _cdist,
        "grouped_mm_fallback": _grouped_mm,
        "_weight_norm": _weight_norm,
        "kthvalue": _kthvalue,
        "median": _median,
        "bilinear": _bilinear,
        "cosine_similarity": _cosine_similarity,
        "rrelu": _rrelu,
        "gaussian_nll_loss": _gaussian_nll_loss,
    }
)
