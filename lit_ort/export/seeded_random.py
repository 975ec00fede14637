"""Random numbers as a function of a seed: the same in eager PyTorch and in every ONNX Runtime.

ONNX's own random operators have no seed that changes from run to run. These numbers are a hash of the seed, of the
draw's place in the step and of the element's position, in int64 arithmetic that has one result everywhere.

Source: Chris Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/); Box and Muller 1958 for normal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_ort._compat.torch import TorchDispatchMode

aten = torch.ops.aten
_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def _hashed(value: Tensor) -> Tensor:
    """A hash of numbers below 2**32."""
    for bits, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        value = torch.bitwise_xor(value, _shifted(value, bits))
        if factor > 1:  # in two halves, so that no product exceeds 63 bits
            high, low = divmod(factor, 2**16)
            value = torch.bitwise_and(value * low + torch.bitwise_and(value * high, 0xFFFF) * 2**16, _MASK)
    return value


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Numbers below 2**53, shifted to the right. ONNX has shifts of unsigned integers alone, with few kernels."""
    return (value.double() * 2.0**-bits).long()


class SeededRandom(TorchDispatchMode):
    """Computes the random operators of a step from a seed.

    Args:
        seed: an int64 scalar.
    """

    # Loops of recurrent layers, which draw nothing.
    supports_higher_order_operators = True

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.seed, self.draws = seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        form = _FORMS.get(func)
        return func(*args, **(kwargs or {})) if form is None else form(self, *args, **(kwargs or {}))

    def uniform(self, size: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Multiples of 2**-24 in [0, 1)."""
        self.draws += 1
        key = _hashed(torch.bitwise_and(self.seed + self.draws * _GOLDEN, _MASK))
        bits = _hashed(torch.bitwise_xor(torch.arange(math.prod(size)), key))
        numbers = _shifted(bits, 8).to(torch.float32) * 2.0**-24
        return numbers.reshape(size).to(dtype or torch.get_default_dtype())

    def normal(self, size: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        radius = (-2 * torch.log(1 - self.uniform(size, torch.float32))).sqrt()
        return (radius * torch.cos(2 * math.pi * self.uniform(size, torch.float32))).to(
            dtype or torch.get_default_dtype()
        )

    def integers(self, low: int, high: int, size: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        return (self.uniform(size, torch.float32) * (high - low)).floor().to(dtype or torch.int64) + low


def _dropout(random: SeededRandom, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = random.uniform(x.shape) < 1 - p
    # A probability of one leaves zeros.
    return torch.where(kept, x * (1 / (1 - p) if p < 1 else 0.0), torch.zeros_like(x)), kept


def _permutation(random: SeededRandom, count: int, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return random.uniform([count]).argsort().to(dtype or torch.int64)


def _multinomial(random: SeededRandom, weights: Tensor, count: int, replacement: bool = False, **_: Any) -> Tensor:
    """The largest of logarithms of weights with Gumbel noise, which are samples without replacement."""
    size = [*weights.shape[:-1], count, weights.shape[-1]] if replacement else list(weights.shape)
    noise = -torch.log(-torch.log(random.uniform(size, torch.float32).clamp(2.0**-25)))
    scores = weights.log()
    return (scores.unsqueeze(-2) + noise).argmax(-1) if replacement else (scores + noise).topk(count)[1]


def _in_place(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(random: SeededRandom, x: Tensor, *args: Any, generator: Any = None) -> Tensor:
        return x.copy_(form(random, x, *args))

    return write


def _of_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return x.dtype if dtype is None else dtype


# Each takes the generator, and then the operator's own arguments.
_FORMS: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _dropout,
    aten.rand.default: lambda random, size, *, dtype=None, **_: random.uniform(size, dtype),
    aten.rand_like.default: lambda random, x, *, dtype=None, **_: random.uniform(x.shape, _of_dtype(x, dtype)),
    aten.randn.default: lambda random, size, *, dtype=None, **_: random.normal(size, dtype),
    aten.randn_like.default: lambda random, x, *, dtype=None, **_: random.normal(x.shape, _of_dtype(x, dtype)),
    aten.randint.default: lambda random, high, size, *, dtype=None, **_: random.integers(0, high, size, dtype),
    aten.randint.low: lambda random, low, high, size, *, dtype=None, **_: random.integers(low, high, size, dtype),
    aten.randint_like.default: lambda random, x, high, *, dtype=None, **_: random.integers(
        0, high, x.shape, _of_dtype(x, dtype)
    ),
    aten.randint_like.low_dtype: lambda random, x, low, high, *, dtype=None, **_: random.integers(
        low, high, x.shape, _of_dtype(x, dtype)
    ),
    aten.randperm.default: _permutation,
    aten.multinomial.default: _multinomial,
    aten.bernoulli.default: lambda random, p, **_: (random.uniform(p.shape) < p).to(p.dtype),
    aten.bernoulli.p: lambda random, x, p, **_: (random.uniform(x.shape) < p).to(x.dtype),
    aten.bernoulli_.float: _in_place(lambda random, x, p=0.5: (random.uniform(x.shape) < p).to(x.dtype)),
    aten.bernoulli_.Tensor: _in_place(lambda random, x, p: (random.uniform(x.shape) < p).to(x.dtype)),
    aten.uniform_.default: _in_place(
        lambda random, x, low=0.0, high=1.0: random.uniform(x.shape, x.dtype) * (high - low) + low
    ),
    aten.normal_.default: _in_place(lambda random, x, mean=0.0, std=1.0: random.normal(x.shape, x.dtype) * std + mean),
    aten.exponential_.default: _in_place(
        lambda random, x, rate=1.0: -torch.log(1 - random.uniform(x.shape, x.dtype)) / rate
    ),
    aten.normal.Tensor_Tensor: lambda random, mean, std, **_: random.normal(mean.shape, mean.dtype) * std + mean,
    aten.normal.Tensor_float: lambda random, mean, std=1.0, **_: random.normal(mean.shape, mean.dtype) * std + mean,
    aten.normal.float_Tensor: lambda random, mean, std, **_: random.normal(std.shape, std.dtype) * std + mean,
}
