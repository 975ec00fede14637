"""Replaces equivalent operators by one form, and removes operators without effect.

In:  views that depend on strides; copies and `detach` in a graph without in-place operators; casts to the same dtype;
     squares; sums with zeros, products with ones; scalars in tensors as fill values; what is written after a shift of
     labels; sorts of elements that share memory; concatenations with empty tensors; lazily conjugated values
Out: reshapes, the values themselves, products, numbers, constants, stable sorts, concatenations of the others, values
     that are conjugated in memory, as regions need them
Saves the time of operators without effect. Sessions keep values contiguous, so a view can be a reshape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import is_of_backward
from lit_ort._compat.torch_fx import arguments_of, first_argument, is_read_by, recomputed_example, strides_of
from lit_ort._compat.torch_ops import BY_ROWS, BY_STRIDES, SCATTERS, SLICE_END
from lit_ort._compat.torch_sizes import may_overlap
from lit_ort.passes.node_builder import NodeBuilder, are_equal
from lit_ort.runtime.argument_codec import exact

aten = torch.ops.aten
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default})
_SAME = frozenset(
    {aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
    | {aten.contiguous.default}
)
_SORTS = frozenset({aten.sort.default, aten.sort.stable})
# The number that fills a tensor, or None if it is the second argument.
_FULL: dict[Any, float | None] = {
    aten.full.default: None,
    aten.full_like.default: None,
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
}
_CONSTANTS = frozenset({*_FULL, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default})


def canonicalize(module: fx.GraphModule) -> int:
    """Canonicalizes a graph in place. Returns the number of nodes that changed."""
    graph = module.graph
    # Before copies disappear, which have other strides.
    fired = sum(_keep_order(node) for node in graph.nodes if node.target in _SORTS)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        fired += _set_dtype(node)
        if node.target in _VIEWS:
            node.target, node.args = aten.reshape.default, (node.args[0], node.args[1])
            fired += 1
        replacement = _replacement(node)
        if replacement is not None and not _changes_strides(node, replacement):
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
            fired += 1
        elif node.target is aten.pow.Tensor_Scalar and node.args[1] == 2 and _is_float(node):
            node.target, node.args = aten.mul.Tensor, (node.args[0], node.args[0])
            fired += 1
        elif node.target is aten.fill.Tensor and (number := _number_of(module, node.args[1])) is not None:
            node.target, node.args = aten.fill.Scalar, (node.args[0], number)
            fired += 1 + _make_constant(node)
        elif node.target is aten.fill.Scalar:
            fired += _make_constant(node)
        elif node.target is aten._conj.default:
            node.target = aten._conj_physical.default
            node.meta["val"] = recomputed_example(node)
            fired += 1
        elif node.target is aten.cat.default and (parts := _parts_with_elements(node)) is not None:
            node.args = (parts, *node.args[1:])
            fired += 1
    graph.eliminate_dead_code()
    return fired


def _set_dtype(node: fx.Node) -> bool:
    """Sets the dtype of a tensor that no other one determines. Returns whether the node changed.

    A backward runs under another default dtype than a step of `precision="64-true"`.
    """
    schema = getattr(node.target, "_schema", None)
    value = node.meta.get("val")
    if schema is None or not isinstance(value, torch.Tensor) or node.kwargs.get("dtype") is not None:
        return False
    is_of_tensors = any(isinstance(argument.meta.get("val"), torch.Tensor) for argument in node.all_input_nodes)
    if is_of_tensors or not any(argument.name == "dtype" and argument.kwarg_only for argument in schema.arguments):
        return False
    node.kwargs = {**node.kwargs, "dtype": value.dtype}
    return True


def _make_constant(node: fx.Node) -> bool:
    """Makes a fill value a constant if it is written after a write into a constant. Returns whether the node changed.

    So encoder-decoders shift their labels. A region computes both writes, and nothing reads what the value replaces.
    """
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or user.target not in SCATTERS or user.args[1] is not node:
        return False
    written = first_argument(user)
    if written.target not in SCATTERS or first_argument(written).target not in _CONSTANTS:
        return False
    value = node.meta["val"]
    with node.graph.inserting_before(node):
        sizes = list(map(NodeBuilder(node.graph, node.meta).size, value.shape))
    node.target, node.args = aten.full.default, (sizes, node.args[1])
    node.kwargs = {"dtype": value.dtype, "device": value.device}
    return True


def _number_of(module: fx.GraphModule, value: Any) -> bool | int | float | None:
    """The number of a constant that is a real scalar, or None."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    constant = getattr(module, str(value.target))
    is_real = isinstance(constant, torch.Tensor) and not constant.dim() and not constant.is_complex()
    return constant.item() if is_real else None


def _parts_with_elements(node: fx.Node) -> list[fx.Node] | None:
    """The tensors of a concatenation without empty ones, which no session has; None if nothing is to be left out."""
    parts = node.args[0]
    assert isinstance(parts, (list, tuple))
    filled = [part for part in parts if isinstance(part, fx.Node) and not _is_empty(part)]
    if len(filled) in (0, len(parts)):
        return None
    # Empty tensors count for the dtype and the order of memory.
    value = node.meta["val"]
    examples = [value, *(part.meta["val"] for part in filled)]
    is_alike = all(one.dtype == value.dtype and one.is_contiguous() for one in examples)
    return filled if is_alike else None


def _is_empty(node: fx.Node) -> bool:
    return any(are_equal([size], [0]) for size in node.meta["val"].shape)


def _keep_order(node: fx.Node) -> bool:
    """Makes a sort of elements that share memory stable. Returns whether the node changed.

    Torch's kernel keeps their order, but sessions copy them, and the order of equal elements of a copy is arbitrary.
    """
    value, *settings = arguments_of(node)
    settings = {**dict(zip(("dim", "descending"), settings, strict=False)), **node.kwargs, "stable": True}
    example = value.meta["val"]
    if example.dim() == 0 or not are_equal([example.stride(settings.get("dim", -1))], [0]) or settings == node.kwargs:
        return False
    node.target, node.args, node.kwargs = aten.sort.stable, (value,), settings
    return True


def _replacement(node: fx.Node) -> fx.Node | None:
    """The value that a node is equal to, or None."""
    rule = _RULES.get(node.target)
    return None if rule is None else rule(node)


def _changes_strides(node: fx.Node, replacement: fx.Node) -> bool:
    """Whether an operator that depends on a node's strides would read others."""
    value, other = node.meta["val"], replacement.meta["val"]
    if is_read_by(node, SCATTERS) and may_overlap(other) and not may_overlap(value):
        return True
    return is_read_by(node, BY_STRIDES | BY_ROWS) and strides_of(value) != strides_of(other)


def _first(node: fx.Node) -> fx.Node | None:
    argument = node.args[0]
    return argument if isinstance(argument, fx.Node) else None


def _same_value(node: fx.Node) -> fx.Node | None:
    return _first(node)


def _copied_value(node: fx.Node) -> fx.Node | None:
    copied = arguments_of(node)[1]
    return copied if _is_like(copied, node) else None


def _only_part(node: fx.Node) -> fx.Node | None:
    """The tensor whose elements are all those of a concatenation."""
    parts = _parts_with_elements(node) or list(node.args[0])  # type: ignore[arg-type]
    return parts[0] if len(parts) == 1 and _is_like(parts[0], node) else None


def _whole_slice(node: fx.Node) -> fx.Node | None:
    """The value that a node reads as a whole, as `x[:, 0]` does first if the size of x is dynamic."""
    return _first(node) if _is_whole(*arguments_of(node)[2:]) else None


def _whole_write(node: fx.Node) -> fx.Node | None:
    part = arguments_of(node)[1]
    return part if _is_whole(*arguments_of(node)[3:]) and _is_like(part, node) else None


def _is_whole(start: Any = None, end: Any = None, step: Any = 1) -> bool:
    return start in (None, 0) and end in (None, SLICE_END) and step == 1


def _same_type_and_shape(node: fx.Node) -> fx.Node | None:
    argument = _first(node)
    return argument if argument is not None and _is_like(argument, node) else None


def _sum_with_zero(node: fx.Node) -> fx.Node | None:
    if node.kwargs.get("alpha", 1) != 1:
        return None
    # -0.0 + 0.0 is 0.0. Zeros in a backward are gradients of unused values, which eager doesn't add.
    return _with_neutral(node, -0.0, *((0.0,) if is_of_backward(node) or not _is_float(node) else ()))


def _product_with_one(node: fx.Node) -> fx.Node | None:
    return _with_neutral(node, 1.0)


def _quotient_by_one(node: fx.Node) -> fx.Node | None:
    first, second = node.args[:2]
    return _without(node, first, second, 1.0)


def _with_neutral(node: fx.Node, *neutral: float) -> fx.Node | None:
    first, second = node.args[:2]
    return _without(node, first, second, *neutral) or _without(node, second, first, *neutral)


def _without(node: fx.Node, argument: Any, other: Any, *neutral: float) -> fx.Node | None:
    """The argument of a node if the other one is a neutral number, or None. Complex arithmetic has no neutral numbers:
    the product of an infinite value with 1 is nan.
    """
    is_neutral = exact(fill_of(other)) in map(exact, neutral)
    if not isinstance(argument, fx.Node) or not is_neutral or not _is_like(argument, node):
        return None
    return None if argument.meta["val"].is_complex() else argument


def fill_of(value: Any) -> float | None:
    """The number that fills a value, or None if it is not known."""
    while isinstance(value, fx.Node) and value.target in (aten.expand.default, aten.reshape.default):
        value = value.args[0]
    if isinstance(value, fx.Node) and value.target in _FULL:
        number = _FULL[value.target]
        value = value.args[1] if number is None else number
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_like(value: fx.Node, node: fx.Node) -> bool:
    """Whether a value has the dtype and shape of a node."""
    example, other = value.meta.get("val"), node.meta.get("val")
    if not isinstance(example, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return example.dtype == other.dtype and are_equal(example.shape, other.shape)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _transposed_back(node: fx.Node) -> fx.Node | None:
    """The value that a node transposes twice, or None."""
    inner = _first(node)
    if inner is None or inner.target is not node.target or not isinstance(inner.args[0], fx.Node):
        return None
    if node.target is aten.permute.default:
        order, inner_order = (list(arguments_of(n)[1]) for n in (node, inner))
        rank = len(order)
        is_inverse = [inner_order[k % rank] % rank for k in order] == list(range(rank))
    else:
        # A scalar is transposed as a vector is.
        rank = max(node.meta["val"].dim(), 1)
        dimensions, inner_dimensions = ({d % rank for d in arguments_of(n)[1:]} for n in (node, inner))
        is_inverse = dimensions == inner_dimensions
    return inner.args[0] if is_inverse else None


_RULES: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    **dict.fromkeys(_SAME, _same_value),
    aten._to_copy.default: _same_type_and_shape,
    aten.copy.default: _copied_value,
    aten.cat.default: _only_part,
    aten.slice.Tensor: _whole_slice,
    aten.slice_scatter.default: _whole_write,
    aten.slice_backward.default: lambda node: _first(node) if _is_whole(*arguments_of(node)[3:]) else None,
    aten.t.default: _transposed_back,
    aten.transpose.int: _transposed_back,
    aten.permute.default: _transposed_back,
    aten.expand.default: _same_type_and_shape,
    aten.reshape.default: _same_type_and_shape,
    aten.add.Tensor: _sum_with_zero,
    aten.mul.Tensor: _product_with_one,
    aten.div.Tensor: _quotient_by_one,
}
