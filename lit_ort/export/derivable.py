"""Replaces functions by forms for which ONNX Runtime's gradient builder computes the same gradients as torch.

The builder has no gradients for some operators (softplus, hardswish, hardsigmoid, instance and group normalization).
For two others its gradients differ from torch's: it differentiates batch normalization with running statistics as if it
used the batch's statistics, and it computes a gradient for an embedding's padding row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def derivable_forms(module: nn.Module) -> Iterator[None]:
    """Replaces the functions of a module while it is traced. Padding rows become constants."""
    padded = [part for part in module.modules() if isinstance(part, nn.Embedding) and part.padding_idx is not None]
    handles = [part.register_forward_hook(_ConstantPadding(part)) for part in padded]
    try:
        with _Forms():
            yield
    finally:
        for handle in handles:
            handle.remove()


class _ConstantPadding:
    """A forward hook that replaces an embedding's rows of padding by a constant."""

    def __init__(self, embedding: nn.Embedding) -> None:
        assert embedding.padding_idx is not None
        self._index = embedding.padding_idx
        self._row = embedding.weight[self._index].detach().clone()

    def __call__(self, _module: nn.Module, inputs: tuple[Tensor], result: Tensor) -> Tensor:
        is_word = (inputs[0] != self._index).unsqueeze(-1)
        return torch.where(is_word, result, self._row)


class _Forms(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        form: Any = _FORMS.get(func, func)
        return form(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = torch.rsqrt(running_var + eps)
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale
    shift = shift if bias is None else shift + bias
    shape = [1, -1, *[1] * (input.dim() - 2)]
    return input * scale.reshape(shape) + shift.reshape(shape)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    result = _normalized(input, list(range(2, input.dim())), eps)
    shape = [1, -1, *[1] * (input.dim() - 2)]
    result = result if weight is None else result * weight.reshape(shape)
    return result if bias is None else result + bias.reshape(shape)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    grouped = input.reshape(input.shape[0], num_groups, -1)
    result = _normalized(grouped, [2], eps).reshape(input.shape)
    shape = [1, -1, *[1] * (input.dim() - 2)]
    result = result if weight is None else result * weight.reshape(shape)
    return result if bias is None else result + bias.reshape(shape)


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    # The gradient builder needs both weight and bias.
    if weight is not None and bias is not None:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    dimensions = list(range(-len(normalized_shape), 0))
    result = _normalized(input, dimensions, eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _normalized(input: Tensor, dimensions: list[int], eps: float) -> Tensor:
    centered = input - input.mean(dimensions, keepdim=True)
    return centered * torch.rsqrt((centered * centered).mean(dimensions, keepdim=True) + eps)


def _softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = input * beta
    return (torch.relu(scaled) + torch.log(1 + torch.exp(-torch.abs(scaled)))) / beta


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return torch.clamp(input + 3, 0, 6) / 6


def _hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    return input * _hardsigmoid(input)


_FORMS: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
    F.layer_norm: _layer_norm,
    F.softplus: _softplus,
    F.hardsigmoid: _hardsigmoid,
    F.hardswish: _hardswish,
}
