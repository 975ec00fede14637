"""Every operator of the table: its code against its reference in torch, for all dtypes that its rule allows."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pytest
import torch

from lit_ort.regions.pointwise_table import CHOOSE, COMPARE, FLOAT, INTEGER, OPERATORS, RANDOM, Pointwise
from tests.kernels.pointwise_kernels import cast_to, pointwise, ulps

if TYPE_CHECKING:
    from lit_ort.kernels.kernel_calls import KernelCache

FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DIVISIONS = ("floor_divide", "trunc_divide", "remainder", "fmod")
SHIFTS = ("lshift", "rshift")
# torch has none of these for booleans.
NOT_OF_BOOLS = {
    "sub",
    "rsub",
    "neg",
    "relu",
    "clamp",
    "addcmul",
    "sign",
    "abs",
    "square",
    "threshold",
    "threshold_backward",
}
NOT_OF_BOOLS |= {"floor", "ceil", "trunc", "round", *DIVISIONS}
# In float32 a composed operator is this far from its exact value, in units of the largest of 1, result and argument.
ABSOLUTE = 2e-6


def values(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([False, True] * 8 + [True])
    if dtype.is_floating_point:
        listed = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            -2.5,
            3.0,
            2.5,
            1e-30,
            -1e-3,
            7.0,
            -88.0,
            100.0,
            math.inf,
            -math.inf,
            math.nan,
            1e10,
        ]
        return torch.tensor(listed, dtype=dtype)
    info = torch.iinfo(dtype)
    listed = [0, 1, 2, 3, 5, 7, 63, 64, 100, info.max, info.max - 1, info.min, info.min + 1]
    return torch.tensor(listed + ([-1, -2, -3, -7] if info.min else [8, 9, 11, 17]), dtype=dtype)


def dtypes_of(operator: Pointwise) -> tuple[torch.dtype, ...]:
    if operator.name in SHIFTS:
        return INTEGERS
    bools = () if operator.name in NOT_OF_BOOLS else (torch.bool,)
    if operator.rule == FLOAT:
        # Values that are rounded to 16 bits are computed in float32.
        return FLOATS[: 1 if operator.name.startswith("round_to") else None]
    return (*INTEGERS, *bools) if operator.rule == INTEGER else (*FLOATS, *INTEGERS, *bools)


def arity(operator: Pointwise) -> int:
    return operator.formula.__code__.co_argcount


CASES = [
    pytest.param(operator, dtype, id=f"{operator.name}-{str(dtype)[6:]}")
    for operator in OPERATORS.values()
    if operator.rule != RANDOM
    for dtype in dtypes_of(operator)
]


def arguments(operator: Pointwise, dtype: torch.dtype) -> list[torch.Tensor]:
    count = arity(operator)
    first = 1 if operator.rule == CHOOSE else 0
    pool = values(dtype)
    if count - first >= 3:
        pool = pool[:9]
    combinations = list(itertools.product(*([range(2)] if first else []), *([range(len(pool))] * (count - first))))
    columns = [torch.tensor(column) for column in zip(*combinations, strict=True)]
    result = [columns[0].bool()] if first else []
    result += [pool[column] for column in columns[first:]]
    if operator.name == "require":
        return [argument[result[0]] for argument in result]
    if operator.name in DIVISIONS and not dtype.is_floating_point:
        # torch's own code ends the process for the smallest number by -1.
        allowed = (result[1] != 0) & ~((result[0] == torch.iinfo(dtype).min) & (result[1].long() == -1))
        return [argument[allowed] for argument in result]
    return result


@pytest.mark.parametrize(("operator", "dtype"), CASES)
def test_code_agrees_with_the_reference(operator: Pointwise, dtype: torch.dtype, kernels: KernelCache) -> None:
    given = arguments(operator, dtype)
    result, wanted = pointwise(kernels, operator.name, *given), operator.reference(*given)
    assert result.dtype == wanted.dtype
    if operator.rule == COMPARE or not wanted.dtype.is_floating_point:
        differs = result != wanted
    else:
        precise = operator.reference(*(x.double() if x.is_floating_point() else x for x in given))
        scale = torch.maximum(precise.abs(), given[0].double().abs()).clamp_min(1.0)
        near = (result.double() - precise).abs() <= ABSOLUTE * scale
        differs = ~((ulps(result, wanted) <= 4) | (ulps(result, precise) <= 4) | near)
    where = differs.nonzero().flatten().tolist()[:5]
    assert not where, [([x[at].item() for x in given], result[at].item(), wanted[at].item()) for at in where]


@pytest.mark.parametrize("source", [*FLOATS, *INTEGERS, torch.bool, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [*FLOATS, *INTEGERS, torch.bool, torch.bfloat16, torch.float16])
def test_casts_are_those_of_torch(source: torch.dtype, target: torch.dtype, kernels: KernelCache) -> None:
    x = values(torch.float64 if source.is_floating_point else source).to(source)
    if source.is_floating_point:
        x = torch.cat([x, torch.tensor([200.7, -200.7, 40000.0, 3e9, -3e9, 1e19, 6e-8, 65504.0, 1e-40]).to(source)])
    result, wanted = cast_to(kernels, x, target), x.to(target)
    if source.is_floating_point and not target.is_floating_point and target.itemsize < 4 and target != torch.bool:
        # What doesn't fit depends on torch's own path, of vectors or not.
        info = torch.iinfo(target)
        fits = (x >= info.min) & (x <= info.max)
        result, wanted = result[fits], wanted[fits]
    assert torch.equal(
        result.nan_to_num(17) if target.is_floating_point else result,
        wanted.nan_to_num(17) if target.is_floating_point else wanted,
    )


def test_every_bfloat16_is_loaded_and_stored(kernels: KernelCache) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(cast_to(kernels, x, torch.float32).nan_to_num(17), x.float().nan_to_num(17))
    wide = torch.arange(0, 1 << 32, 65_521 // 3).to(torch.int32).view(torch.float32)
    result, wanted = cast_to(kernels, wide, torch.bfloat16), wide.bfloat16()
    assert torch.equal(result.nan_to_num(17), wanted.nan_to_num(17))


@pytest.mark.parametrize("name", DIVISIONS)
def test_an_integer_divided_by_zero_is_an_error_as_in_torch(name: str, kernels: KernelCache) -> None:
    x, y = torch.arange(20), torch.arange(20)
    with pytest.raises(ZeroDivisionError, match="divided by zero"):
        pointwise(kernels, name, x, y)
    assert torch.equal(pointwise(kernels, name, x[1:], y[1:]), OPERATORS[name].reference(x[1:], y[1:]))
