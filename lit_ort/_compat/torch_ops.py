"""Private interfaces of torch's operators: their types and schemas, one of oneDNN's, names of functions."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.fx.node import _get_qualified_name  # knows torch's odd names

aten = torch.ops.aten
# Operators that read their first argument by its strides; AOTAutograd traced them with contiguous ones.
BY_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default})
_NAMESPACES = frozenset({"aten", "prims", "lit_ort", "torchvision"})
_PLAIN_TYPES = re.compile(r"((Optional\[|List\[)*(Tensor|number|int|float|bool|complex|str|Device|Generator)\]*)")
# Arguments that name a way to compute.
_WAYS = frozenset(
    {"activation", "approximate", "driver", "equation", "indexing", "interpolation", "mode", "norm", "ord", "p"}
    | {"pad_mode", "padding", "padding_side", "reduce", "rounding_mode", "side", "UPLO"}
)
_FUNCTORCH = ("torch._functorch", "torch._C._functorch")


def is_mutable(target: object) -> bool:
    """Whether what a node calls is an operator that writes into an argument."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that what a node calls writes into."""
    if not is_mutable(node.target):
        return []
    assert isinstance(node.target, OpOverload)
    places = {argument.name: k for k, argument in enumerate(node.target._schema.arguments) if _is_written(argument)}
    given = [node.args[k] if k < len(node.args) else node.kwargs.get(name) for name, k in places.items()]
    parts = [part for value in given for part in (value if isinstance(value, (list, tuple)) else [value])]
    return [part for part in parts if isinstance(part, fx.Node)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def returns_alias(target: object) -> bool:
    """Whether it is an operator whose result lies in the memory of an argument."""
    return isinstance(target, OpOverload) and any(r.alias_info is not None for r in target._schema.returns)


def is_of_tensors(target: OpOverload) -> bool:
    """Whether an operator is one of torch's own, or of this project's, that reads and writes tensors alone.

    One that takes a text which isn't the name of one of its ways to compute may open what the text names, as
    `aten.from_file` does.
    """
    arguments, results = target._schema.arguments, target._schema.returns
    plain = all(_PLAIN_TYPES.fullmatch(str(part.type)) for part in (*arguments, *results))
    texts = {argument.name for argument in arguments if "str" in str(argument.type)}
    return target.namespace in _NAMESPACES and plain and texts <= _WAYS


def result_count(target: OpOverload) -> int:
    """How many results an operator has by its schema, a list of tensors counted as one."""
    return len(target._schema.returns)


def returns_list(target: object) -> bool:
    """Whether it is an operator whose one result is a list of tensors, which may have one part."""
    return isinstance(target, OpOverload) and [str(r.type) for r in target._schema.returns] == ["List[Tensor]"]


def draws(node: fx.Node) -> bool:
    """Whether a node draws from torch's random generator; attention does with a dropout probability alone."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = (
                node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            )
            return bool(value != 0)
    return True


def is_pointwise(target: object) -> bool:
    """Whether it is an operator that torch marks as computing each element by itself."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def of_functorch(target: object) -> bool:
    """Whether it is one of functorch's own functions, which open and close its levels."""
    return (getattr(target, "__module__", None) or "").startswith(_FUNCTORCH)


def out_overload(target: OpOverload) -> OpOverload | None:
    """The overload of an operator that writes its one result into given memory."""
    packet = target.overloadpacket
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        plain = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if len(arguments) - len(plain) == 1 and plain == wanted:
            return overload
    return None


def overload_name(target: OpOverload) -> str:
    """`dim_IntList` of `aten.sum.dim_IntList`."""
    return target._overloadname


def memory_argument(out: OpOverload) -> str:
    """The name of the argument that an `out_overload` takes its memory by."""
    return next(argument.name for argument in out._schema.arguments if argument.is_out)


def qualified_name(function: Any) -> str:
    """A function's name with its module, also of those that torch's modules have under another name.

    Raises:
        RuntimeError: it has none.
    """
    return _get_qualified_name(function)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias by oneDNN. x: float32[M, K], weight: float32[N, K], bias: float32[N]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
