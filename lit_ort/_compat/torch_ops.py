"""Private interfaces of torch's operators: types and schemas, a oneDNN operator, names of functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._functorch.autograd_function import autograd_function_apply
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.fx.node import _get_qualified_name  # handles torch's irregular names

aten = torch.ops.aten
# A call of an autograd.Function, with the graphs of its forward and backward.
AUTOGRAD_FUNCTION: Any = autograd_function_apply
# Operators whose results depend on the strides of their first argument.
BY_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default})
# They write into a copy with the strides of their first argument, whose elements can share memory.
SCATTERS = frozenset({aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default})
# Kernels of GPUs that need an order of memory for some arguments: attention reads the rows of its mask.
BY_ROWS = frozenset(
    {
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    }
)
# Operators whose results share memory, which AOTAutograd ignores, and the same operators as views.
SAFE_SPLITS: Mapping[object, OpOverload] = MappingProxyType(
    {
        aten.unsafe_chunk.default: aten.chunk.default,
        aten.unsafe_split.Tensor: aten.split.Tensor,
        aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    }
)
# Kernels of the CPU that read arguments as if they were contiguous, and the positions of these arguments. Torch's
# functions copy others before, but passes remove copies. `python -m tests.operators.kernels` finds them.
CONTIGUOUS: Mapping[object, tuple[int, ...]] = MappingProxyType(
    {
        aten._ctc_loss.default: (0, 1),
        aten._ctc_loss.Tensor: (0, 1, 2, 3),
        aten._ctc_loss_backward.default: (0, 1, 2, 5, 6),
        aten._ctc_loss_backward.Tensor: (0, 1, 2, 3, 4, 5, 6),
        aten._embedding_bag.default: (1, 2),
        aten._embedding_bag_forward_only.default: (1, 2),
        aten._weight_norm_interface.default: (0, 1),
        aten._weight_norm_interface_backward.default: (0, 1, 2, 3),
        aten.adaptive_max_pool3d_backward.default: (2,),
        aten.fractional_max_pool2d_backward.default: (4,),
        aten.fractional_max_pool3d_backward.default: (4,),
        aten.mkldnn_rnn_layer.default: tuple(range(7)),
        aten.mkldnn_rnn_layer_backward.default: tuple(range(13)),
        aten.native_batch_norm_backward.default: (2, 3, 4, 5, 6),
        aten.native_group_norm.default: (1, 2),
        aten.native_group_norm_backward.default: (2, 3, 4),
        aten.native_layer_norm_backward.default: (3, 4),
        aten.view_as_complex.default: (0,),
    }
)
# The same for the last dimension only. Torch chooses another kernel if it isn't contiguous.
LAST_DIMENSION_CONTIGUOUS: Mapping[object, tuple[int, ...]] = MappingProxyType(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 2),
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (0, 1, 2, 3, 4, 5),
    }
)
# Kernels that read their first arguments in the memory format of the images, which are the last of them.
IMAGES_IN_ONE_FORMAT: Mapping[object, int] = MappingProxyType(
    {aten.native_group_norm.default: 1, aten.native_group_norm_backward.default: 2}
)
# Operators without a result, which raise an error for a value.
ASSERTIONS = frozenset({aten._assert_async.default, aten._assert_async.msg})
# The end of a slice up to the last element.
SLICE_END = 2**63 - 1
_NAMESPACES = frozenset({"aten", "prims", "lit_ort", "torchvision"})
_PLAIN_TYPES = re.compile(r"((Optional\[|List\[)*(Tensor|number|int|float|bool|complex|str|Device|Generator)\]*)")
# String arguments that select a method of computation, or are the region that lit_ort's operator computes.
_METHOD_ARGUMENTS = frozenset(
    {"activation", "approximate", "driver", "equation", "indexing", "interpolation", "mode", "norm", "ord", "p"}
    | {"pad_mode", "padding", "padding_side", "reduce", "region", "rounding_mode", "side", "UPLO"}
)
_FUNCTORCH = ("torch._functorch", "torch._C._functorch")


def is_mutable(target: object) -> bool:
    """Whether the target of a node is an operator that writes into an argument."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments of a node that its operator writes into."""
    if not is_mutable(node.target):
        return []
    assert isinstance(node.target, OpOverload)
    positions = {argument.name: k for k, argument in enumerate(node.target._schema.arguments) if _is_written(argument)}
    values = [node.args[k] if k < len(node.args) else node.kwargs.get(name) for name, k in positions.items()]
    parts = [part for value in values for part in (value if isinstance(value, (list, tuple)) else [value])]
    return [part for part in parts if isinstance(part, fx.Node)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def returns_alias(target: object) -> bool:
    """Whether the target is an operator whose result shares the memory of an argument."""
    return isinstance(target, OpOverload) and any(r.alias_info is not None for r in target._schema.returns)


def sets_hook(target: Any) -> bool:
    """Whether a call sets a hook on a tensor, whose body is a graph."""
    return isinstance(target, HigherOrderOperator) and target.name() == "register_hook"


def has_linear_gradient(target: OpOverload) -> bool:
    """Whether an operator's gradient is known to be linear in that of its result.

    It is if the operator is torch's, torchvision's or lit_ort's, or transformers' matmul of experts.
    """
    return target.namespace in {*_NAMESPACES, "transformers"} or target.namespace.startswith("_c10d")


def is_safe_in_cache(target: OpOverload) -> bool:
    """Whether an operator belongs to torch, torchvision or lit_ort, and accesses nothing but tensors.

    An operator with a string argument that does not select a method of computation can access the file that the string
    names, as `aten.from_file` does.
    """
    arguments, results = target._schema.arguments, target._schema.returns
    has_plain_types = all(_PLAIN_TYPES.fullmatch(str(part.type)) for part in (*arguments, *results))
    strings = {argument.name for argument in arguments if "str" in str(argument.type)}
    return target.namespace in _NAMESPACES and has_plain_types and strings <= _METHOD_ARGUMENTS


def result_count(target: OpOverload) -> int:
    """The number of results in an operator's schema; a list of tensors counts as one."""
    return len(target._schema.returns)


def returns_list(target: object) -> bool:
    """Whether the target is an operator whose only result is a list of tensors, possibly of length one."""
    return isinstance(target, OpOverload) and [str(r.type) for r in target._schema.returns] == ["List[Tensor]"]


def draws(node: fx.Node) -> bool:
    """Whether a node draws from torch's random generator. Attention draws only if its dropout probability is not 0."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            keyword = node.kwargs.get(argument.name, argument.default_value)
            return bool((node.args[position] if position < len(node.args) else keyword) != 0)
    return True


def is_pointwise(target: object) -> bool:
    """Whether the target is an operator that torch tags as pointwise."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def of_functorch(target: object) -> bool:
    """Whether the target is a function of functorch itself, such as those that open and close its levels."""
    return (getattr(target, "__module__", None) or "").startswith(_FUNCTORCH)


def out_overload(target: OpOverload) -> OpOverload | None:
    """The overload of an operator that writes its single result into an `out` argument, or None."""
    packet = target.overloadpacket
    inputs = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        overload_inputs = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if len(arguments) - len(overload_inputs) == 1 and overload_inputs == inputs:
            return overload
    return None


def in_place_overload(target: OpOverload) -> OpOverload:
    """The overload of an operator that writes into its first argument: `aten.index_put_.default` for `index_put`."""
    return getattr(getattr(aten, f"{target.overloadpacket.__name__}_"), overload_name(target))


def signature_of(target: OpOverload) -> str:
    """The arguments and results of an operator as they are written in schemas: `(Tensor self, int dim) -> Tensor`."""
    return f"({str(target._schema).partition('(')[2]}"


def overload_name(target: OpOverload) -> str:
    """The name of an overload, such as `dim_IntList` for `aten.sum.dim_IntList`."""
    return target._overloadname


def memory_argument(out: OpOverload) -> str:
    """The name of the argument of an `out_overload` that the result is written into."""
    return next(argument.name for argument in out._schema.arguments if argument.is_out)


def qualified_name(function: Any) -> str:
    """The qualified name of a function, also if the modules of torch have it under another name.

    Raises:
        RuntimeError: the function has no such name.
    """
    return _get_qualified_name(function)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias, computed by oneDNN. x: float32[M, K], weight: float32[N, K], bias: float32[N]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# Operators whose C++ code would make sizes constants, as torch's Python code that keeps them symbolic.
OF_SYMBOLS: Mapping[object, Callable[..., Any]] = MappingProxyType(
    {target: decomposition_table[target] for target in (torch.ops.aten.constant_pad_nd.default,)}
)
