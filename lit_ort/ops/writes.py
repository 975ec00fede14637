"""In-place forms of operators that copy a value to change a part of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from lit_ort._compat.torch_ops import OpOverload, in_place_overload, signature_of
from lit_ort.ops.operator import Allocator, Operator, define
from lit_ort.ops.slices import ADD_SLICES, add_slices_onto

aten = torch.ops.aten
# Writes of a part into a slice, and the view of the slice.
_INTO_VIEWS: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {
        aten.select_scatter.default: aten.select.int,
        aten.slice_scatter.default: aten.slice.Tensor,
        aten.diagonal_scatter.default: aten.diagonal.default,
    }
)
_AT_INDICES = (
    *(aten.index_put.default, aten.index_add.default, aten.index_copy.default, aten.index_reduce.default),
    *(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.put.default, aten.masked_scatter.default),
    *(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce),
    *(aten.scatter_add.default, aten.scatter_reduce.two),
)
# Operators that write every element. As parts of a larger value, these are computed in its memory too.
WHOLE = (
    *(aten.copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.masked_fill.Scalar, aten.masked_fill.Tensor),
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
)


def _into_view(
    view: OpOverload, allocator: Allocator, self: torch.Tensor, src: torch.Tensor, *bounds: Any
) -> torch.Tensor:
    view(self, *bounds).copy_(src)
    return self


def _at_indices(write: OpOverload, allocator: Allocator, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return write(self, *args, **kwargs)


def written(allocator: Allocator, self: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A value after a write into a part of its memory, which is `part`."""
    return self


def _copy_of(self: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return self.clone()


def _fake(self: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(self)


def _define(target: OpOverload, kernel: Callable[..., torch.Tensor]) -> OpOverload:
    """The in-place form of an operator, of the same arguments. In eager, and on other devices, it makes a copy."""
    name = target.name().partition("::")[2].replace(".", "_")
    return define(f"{name}_onto{signature_of(target)}", kernel, target, eager=target)


_KERNELS: Mapping[OpOverload, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        **{target: functools.partial(_into_view, view) for target, view in _INTO_VIEWS.items()},
        **{target: functools.partial(_at_indices, in_place_overload(target)) for target in (*_AT_INDICES, *WHOLE)},
        ADD_SLICES: add_slices_onto,
    }
)
# The in-place form of each operator. It writes into its first argument, and returns it.
IN_PLACE: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {target: _define(target, kernel) for target, kernel in _KERNELS.items()}
)
WRITTEN = define("written(Tensor self, Tensor part) -> Tensor", written, _fake, eager=_copy_of)

OPERATORS = (
    *(Operator(IN_PLACE[target], kernel, recomputable=False, writes_into=0) for target, kernel in _KERNELS.items()),
    Operator(WRITTEN, written, recomputable=False, writes_into=0),
)
