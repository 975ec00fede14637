"""The lowering table: the ATen operators that can run as ONNX Runtime kernels, and how each is written.

Every other operator runs in a torch node. An operator is in the table if its kernel computes the same results as torch
and takes no longer. Kernels that differ at the edges of their range are not (Sigmoid below -18, Erf of NaN, Pow).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lit_ort.lower.emitter import Emitter

aten = torch.ops.aten
_FLOATS = frozenset({torch.float32, torch.float64})
_NUMBERS = _FLOATS | {torch.int64, torch.int32}


@dataclasses.dataclass(frozen=True)
class Lowering:
    """How an operator is written in ONNX.

    Args:
        emit: adds the ONNX nodes and returns the name of the result.
        types: the supported dtypes of arguments and results.
        accepts: returns whether a node meets further conditions.
        view: whether the operator is a view of its argument.
    """

    emit: Callable[[Emitter], str]
    types: frozenset[torch.dtype] = _NUMBERS
    accepts: Callable[[fx.Node], bool] = lambda node: True
    view: bool = False


def lowering_of(node: fx.Node, table: Mapping[Any, Lowering] | None = None) -> Lowering | None:
    """The lowering of a node, in this table or another, or None if there is none for it."""
    lowering = (LOWERINGS if table is None else table).get(node.target)
    value = node.meta.get("val")
    if lowering is None or not isinstance(value, torch.Tensor):
        return None
    tensors = [value, *(argument.meta["val"] for argument in node.all_input_nodes)]
    dtypes = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return lowering if dtypes <= lowering.types and lowering.accepts(node) else None


def _binary(operator: str) -> Callable[[Emitter], str]:
    def emit(e: Emitter) -> str:
        return e.op(operator, e.value(e.argument(0, "self"), e.dtype), e.value(e.argument(1, "other"), e.dtype))

    return emit


def _unary(operator: str) -> Callable[[Emitter], str]:
    return lambda e: e.op(operator, e.value(e.argument(0, "self"), e.dtype))


def _without_alpha(node: fx.Node) -> bool:
    return bool(node.kwargs.get("alpha", 1) == 1)


def _reshape(e: Emitter) -> str:
    value = e.node.meta["val"]
    return e.op("Reshape", e.value(e.argument(0, "self")), e.sizes(value.shape), allowzero=1)


def _permute(e: Emitter) -> str:
    rank = e.node.meta["val"].dim()
    target = e.node.target
    if target is aten.permute.default:
        order = [d % rank for d in e.argument(1, "dims")]
    else:
        order = list(range(rank))
        dimensions = (0, 1) if target is aten.t.default else (e.argument(1, "dim0"), e.argument(2, "dim1"))
        first, second = (d % rank for d in dimensions)
        order[first], order[second] = order[second], order[first]
    return e.op("Transpose", e.value(e.argument(0, "self")), perm=order)


def _is_matrix(node: fx.Node) -> bool:
    return node.meta["val"].dim() >= 2


def _expand(e: Emitter) -> str:
    return e.op("Expand", e.value(e.argument(0, "self")), e.sizes(e.node.meta["val"].shape))


_BROADCAST = _NUMBERS | {torch.bool}
# ONNX Runtime's kernels that copy have 16-bit floats, but for Expand.
ANY = _BROADCAST | {torch.bfloat16, torch.float16}

LOWERINGS: Mapping[Any, Lowering] = MappingProxyType(
    {
        aten.add.Tensor: Lowering(_binary("Add"), accepts=_without_alpha),
        aten.sub.Tensor: Lowering(_binary("Sub"), accepts=_without_alpha),
        aten.mul.Tensor: Lowering(_binary("Mul")),
        aten.div.Tensor: Lowering(_binary("Div"), _FLOATS),
        aten.neg.default: Lowering(_unary("Neg")),
        aten.exp.default: Lowering(_unary("Exp"), _FLOATS),
        aten.sqrt.default: Lowering(_unary("Sqrt"), _FLOATS),
        aten.reshape.default: Lowering(_reshape, ANY, view=True),
        aten.unsqueeze.default: Lowering(_reshape, ANY, view=True),
        aten.squeeze.dim: Lowering(_reshape, ANY, view=True),
        aten.squeeze.dims: Lowering(_reshape, ANY, view=True),
        aten.permute.default: Lowering(_permute, ANY, view=True),
        aten.transpose.int: Lowering(_permute, ANY, view=True),
        aten.t.default: Lowering(_permute, ANY, _is_matrix, view=True),
        aten.expand.default: Lowering(_expand, _BROADCAST, view=True),
    }
)
