"""Private interfaces of torch's symbolic sizes: their expressions, hints, guards and ranges."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo

# Names of torch's functions in expressions of sizes.
FUNCTIONS: Mapping[Any, str] = MappingProxyType(
    {
        functions.FloorDiv: "quotient",
        functions.CleanDiv: "quotient",
        functions.Mod: "remainder",
        functions.PythonMod: "remainder",
        functions.Max: "largest",
        functions.Min: "smallest",
        functions.IntTrueDiv: "true quotient",
        functions.FloatTrueDiv: "true quotient",
        functions.ToFloat: "float",
        functions.TruncToInt: "truncated",
        functions.FloorToInt: "floor",
        functions.CeilToInt: "ceiling",
    }
)


def symbolic_sizes(
    environment: Any, tensor: torch.Tensor, name: str, changing: Mapping[int, str], known: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the sizes and strides of a tensor, with symbols for the dimensions in `changing`.

    The strides of a tensor that is not dense are those of a larger tensor, and stay fixed.

    Args:
        environment: the shape environment of the symbols.
        tensor: the tensor.
        name: its name.
        changing: the dimensions, with the names of their sizes.
        known: the symbols of all names so far. New ones are added.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    new = {size: k for k, size in changing.items() if size not in known}
    kinds = [DimDynamic.DYNAMIC if k in new.values() else DimDynamic.STATIC for k in range(tensor.dim())]
    created, _, _ = environment.create_symbolic_sizes_strides_storage_offset(
        tensor, ConstantSource(name), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)
    )
    known.update((size, created[k]) for size, k in new.items())
    sizes = tuple(known[changing[k]] if k in changing else size for k, size in enumerate(created))
    order = memory_order(tensor)
    if order is None:
        return sizes, tensor.stride()
    inner = itertools.accumulate((sizes[k] for k in order[:0:-1]), operator.mul, initial=1)
    strides = dict(zip(reversed(order), inner, strict=True)) if order else {}
    return sizes, tuple(strides[k] for k in range(len(sizes)))


def expression_of(size: torch.SymInt | torch.SymFloat) -> sympy.Expr:
    """The expression of a size in terms of symbols."""
    return size.node.expr


def without_elements(size: torch.SymInt) -> torch.Tensor:
    """An example of shape [size, 0]; no guard is added for sizes of 0 and 1."""
    with size.node.shape_env.suppress_guards():
        return torch.empty(size, 0, device="meta")


def whole_number(size: int | torch.SymInt) -> int | torch.SymInt:
    """A symbolic size as a number if it is the same for all sizes, as the difference of a size and itself."""
    return int(expression_of(size)) if isinstance(size, torch.SymInt) and expression_of(size).is_number else size


def hint_of(size: Any) -> Any:
    """The size in the call that a graph was traced with; None if the size depends on the values of tensors."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def symbolic_size(like: torch.SymInt, expression: sympy.Expr, hint: int) -> torch.SymInt:
    """An expression of the symbols of another size as a size."""
    return like.node.shape_env.create_symintnode(expression, hint=hint)


def memory_order(value: torch.Tensor) -> list[int] | None:
    """The dimensions from the largest stride to the smallest; None if elements share memory or have gaps."""
    if value.is_contiguous():
        return list(range(value.dim()))
    order = sorted(range(value.dim()), key=lambda k: (-hint_of(value.stride(k)), k))
    return order if value.permute(order).is_contiguous() else None


def is_in_order(value: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether a value is dense with its dimensions in an order of memory; comparing symbols would add guards."""
    expected: Any = 1
    for dim in reversed(order):
        if str(value.shape[dim]) != "1" and str(value.stride(dim)) != str(expected):
            return False
        expected = value.shape[dim] * expected
    return True


def inverse_order(order: Sequence[int]) -> list[int]:
    """The permutation that undoes a permutation of dimensions."""
    return [order.index(k) for k in range(len(order))]


def channels_last(rank: int) -> list[int]:
    """The order of memory of the dimensions of images with channels last."""
    return [0, *range(2, rank), 1]


def has_channels_last(value: torch.Tensor) -> bool:
    """Whether a value is images or volumes whose channels are last in memory, and not contiguous."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    return last is not None and not value.is_contiguous() and value.is_contiguous(memory_format=last)


def may_overlap(value: torch.Tensor) -> bool:
    """Whether elements of a value can share memory, as those of an expanded one do."""
    last = 0
    pairs = zip(map(hint_of, value.stride()), map(hint_of, value.shape), strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride <= last:
            return True
        last += stride * (size - 1)
    return False


def guards_of(environment: Any) -> list[sympy.Expr]:
    """The guards on symbols that tracing a graph has added."""
    return [environment.replace(guard.expr) for guard in environment.guards]


def range_of(environment: Any, symbol: sympy.Expr) -> tuple[int, int | None]:
    """The smallest and the largest value that a trace is valid for; None if the largest is unlimited."""
    value_range = environment.var_to_range[symbol]
    return int(value_range.lower), None if value_range.upper is int_oo else int(value_range.upper)
