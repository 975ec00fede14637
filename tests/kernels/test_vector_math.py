"""Functions of one argument: their distance from the exact value, and their special values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import mpmath
import numpy as np
import pytest
import torch

from tests.kernels.pointwise_kernels import pointwise, steps, ulps

if TYPE_CHECKING:
    from lit_ort.kernels.kernel_calls import KernelCache

# Computed in float64 for float32; in float64 they are the C library's.
BY_FLOAT64 = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erfc", "sinh")
FUNCTIONS = (
    *("exp", "expm1", "log", "log1p", "log2", "log10", "tanh", "sigmoid", "erf", "sin", "cos", "rsqrt", "sqrt"),
    *("reciprocal", "exp2", "tan", "lgamma", "digamma", *BY_FLOAT64),
)
LARGEST = 4.0
CHUNK = 1 << 22


def exact(name: str, x: torch.Tensor) -> torch.Tensor:
    """The function in float64 of float32 elements; torch's own float64 is good to 2^-50."""
    return getattr(torch, name)(x.double())


def special(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    values = [0.0, 1.0, 0.5, 2.0, 88.0, 88.8, 89.0, 103.0, 104.0, 709.0, 710.0, 746.0, 1e-20, 3.0, 10.0, 1e10, 1e30]
    values += [info.smallest_normal, info.smallest_normal * info.eps, info.smallest_normal * 0.6, info.max, info.eps]
    values += [float("inf"), float("nan"), 1 - info.eps, 1 + info.eps, np.pi / 2, np.pi, 1e5, 2.0**31, 2.0**33]
    return torch.tensor([*values, *(-value for value in values)], dtype=dtype)


def float32_of_bits(start: int, count: int, step: int = 1) -> torch.Tensor:
    bits = torch.arange(start, start + count * step, step)
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_within_four_units_of_a_sample_of_float32(name: str, kernels: KernelCache) -> None:
    x = torch.cat([float32_of_bits(0, 80_000, 53_687), special(torch.float32), torch.linspace(-20, 20, 20_001)])
    worst = ulps(pointwise(kernels, name, x), exact(name, x))
    at = worst.argmax()
    assert worst[at] <= LARGEST, (name, x[at].item(), worst[at].item())


@pytest.mark.sweep
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_within_four_units_of_every_float32(name: str, kernels: KernelCache) -> None:
    for start in range(0, 1 << 32, CHUNK):
        x = float32_of_bits(start, CHUNK)
        worst = steps(pointwise(kernels, name, x), exact(name, x))
        at = worst.argmax()
        assert worst[at] <= LARGEST, (name, x[at].item(), worst[at].item())


NOT_OF_NUMPY = ("erf", "sigmoid", "rsqrt", "lgamma", "digamma", *BY_FLOAT64)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NOT_OF_NUMPY])
def test_function_is_within_four_units_of_a_sample_of_float64(name: str, kernels: KernelCache) -> None:
    near = np.linspace(-30, 30, 40_001)
    spread = np.ldexp(np.linspace(-1, 1, 20_001), np.arange(20_001) % 2000 - 1000)
    x = np.concatenate([near, spread, special(torch.float64).numpy()])
    with np.errstate(all="ignore"):
        wide = x.astype(np.longdouble)
        wanted = getattr(np, name)(wide) if name != "reciprocal" else 1 / wide
        result = pointwise(kernels, name, torch.from_numpy(x)).numpy()
        unit = np.spacing(np.clip(np.abs(wanted).astype(np.float64), np.finfo(np.float64).tiny, 1e308))
        same = (result == wanted.astype(np.float64)) | (np.isnan(result) & np.isnan(wanted))
        distance = np.where(same, 0, np.abs(result.astype(np.longdouble) - wanted) / unit)
    at = np.nan_to_num(distance, nan=np.inf).argmax()
    assert distance[at] <= LARGEST, (name, x[at], result[at], wanted[at], distance[at])


@pytest.mark.parametrize("name", ["erf", "sigmoid", "rsqrt", *BY_FLOAT64])
def test_function_agrees_with_torch_in_float64(name: str, kernels: KernelCache) -> None:
    x = torch.cat([torch.linspace(-30, 30, 40_001, dtype=torch.float64), special(torch.float64)])
    result, wanted = pointwise(kernels, name, x), getattr(torch, name)(x)
    # Below -700 torch's sigmoid is 0, where this one has the denormals of the exact value; at 710, torch's hyperbolic
    # functions are infinite.
    inside = x > -700 if name == "sigmoid" else ~((name in ("cosh", "sinh")) & (x.abs() == 710))
    worst = ulps(result, wanted).where(inside | x.isnan(), 0.0)
    assert worst.max() <= LARGEST, (name, x[worst.argmax()].item(), worst.max().item())


def test_digamma_of_float64_is_as_exact_as_torchs(kernels: KernelCache) -> None:
    spread = np.ldexp(np.linspace(1, 2, 300), np.arange(300) % 60 - 30)
    x = np.concatenate([spread, -spread, np.linspace(-9, 20, 300), special(torch.float64).numpy()])
    x = x[np.isfinite(x) & ((x > 0) | (np.floor(x) != x))]
    wanted = np.array([float(mpmath.digamma(value)) for value in x])
    result, eager = (f(torch.from_numpy(x)).numpy() for f in (partial(pointwise, kernels, "digamma"), torch.digamma))
    with np.errstate(invalid="ignore"):
        distance, of_eager = (np.where(y == wanted, 0, np.abs(y - wanted)) for y in (result, eager))
        allowed = np.maximum(4e-15 * np.maximum(np.abs(wanted), 1), 2 * of_eager)
    assert (distance <= allowed).all(), x[~(distance <= allowed)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", ["expm1", "log1p", "tanh", "erf", "sin", "sqrt", "tan", "asin", "asinh", "atan", "atanh", "sinh"]
)
def test_zeros_keep_their_sign(name: str, dtype: torch.dtype, kernels: KernelCache) -> None:
    x = torch.tensor([0.0, -0.0], dtype=dtype)
    assert torch.signbit(pointwise(kernels, name, x)).tolist() == [False, True]


def test_denormals_are_exact_where_functions_are_near_the_identity(kernels: KernelCache) -> None:
    x = float32_of_bits(1, 4096, 2047)
    for name in ("expm1", "log1p", "tanh", "sin"):
        assert ulps(pointwise(kernels, name, x), exact(name, x)).max() == 0, name


@pytest.mark.parametrize("name", ["atan2", "hypot"])
def test_functions_of_two_arguments(name: str, kernels: KernelCache) -> None:
    some = torch.cat([special(torch.float32), torch.linspace(-3, 3, 301)])
    x, y = (part.flatten().contiguous() for part in torch.meshgrid(some, some, indexing="ij"))
    result, wanted = pointwise(kernels, name, x, y), getattr(torch, name)(x.double(), y.double())
    worst = ulps(result, wanted)
    at = worst.argmax()
    assert worst[at] <= LARGEST, (name, x[at].item(), y[at].item(), result[at].item(), wanted[at].item())
    assert torch.equal(torch.signbit(result)[wanted == 0], torch.signbit(wanted)[wanted == 0])
