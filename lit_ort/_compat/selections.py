"""Makes Dynamo trace selections by values of inputs, such as `x[mask]` and `mask.nonzero()`, without a graph break.

The size of their result depends on values, which ends a graph by default. If those values are a function of inputs, the
indices of the selection are computed before the graph, and are an input of it whose size can change. The selection
itself, by indices, is in the graph. One that depends on weights still ends the graph.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType, MappingProxyType, NoneType
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.guards import _get_closure_vars, install_guard
from torch._dynamo.variables import TensorVariable, TupleVariable, builder
from torch._guards import GuardSource, Source, dataclass_with_cached_hash
from torch.fx.node import map_aggregate

from lit_ort._compat.input_functions import InputFunction, function_of_inputs, is_unchanged, name_of_call

# Of an output graph: the inputs that were made for it, by what they are computed from.
_ATTRIBUTE = "_lit_ort_selections"


@dataclass_with_cached_hash(frozen=True)
class _Computed(Source):
    """Where an input comes from that is computed before the graph.

    Args:
        guarded, taken: the global names of what computes it for guards and for the graph.
        inputs: the sources of its arguments.
    """

    guarded: str
    taken: str
    inputs: tuple[Source, ...]

    @functools.cached_property
    def guard_source(self) -> GuardSource:
        return GuardSource.LOCAL

    @property
    def _name_template(self) -> str:
        return f"G[{self.guarded!r}]({', '.join(source.name for source in self.inputs)})"

    def reconstruct(self, codegen: Any) -> None:
        codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_global(self.taken, add=True)))
        for source in self.inputs:
            codegen(source)
        codegen.extend_output(create_call_function(len(self.inputs), False))


class _Once:
    """A function of a graph's inputs that guards and then the graph need: computed once for each call.

    Args:
        compute: the function.
    """

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self._compute = compute
        self._kept: tuple[Sequence[Any], Tensor] | None = None

    def guarded(self, *inputs: Any) -> Tensor:
        value = self._compute(*inputs)
        self._kept = (_state(inputs, weakref.ref), value)
        return value

    def taken(self, *inputs: Any) -> Tensor:
        kept, self._kept = self._kept, None
        if kept is not None:
            states = [(value() if isinstance(value, weakref.ref) else value, version) for value, version in kept[0]]
            if all(a is b and v == w for (a, v), (b, w) in zip(states, _state(inputs), strict=True)):
                return kept[1]
        return self._compute(*inputs)


def _state(inputs: Sequence[Any], of: Callable[[Any], Any] = lambda value: value) -> list[tuple[Any, Any]]:
    """What changes with the values of inputs."""
    return [(of(i), _version(i)) if isinstance(i, Tensor) else (None, i) for i in inputs]


def _version(tensor: Tensor) -> object:
    # Tensors of inference mode don't count their versions.
    return object() if tensor.is_inference() else tensor._version


Select = Callable[[Any, fx.Node], Any]


def keep_selections(is_enabled: Callable[[], bool], *others: Mapping[Any, Select]) -> None:
    """Puts the hook into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether selections are part of the trace at hand.
        *others: by what a node calls, functions that return the result of a node as a variable, or None.
    """
    for function in (
        _indices_of,
        _flat_indices_of,
        _identity,
        _Once.guarded,
        _Once.taken,
        _state,
        _version,
        _Part.__call__,
    ):
        # Dynamo would compile it where it is called before a graph.
        skip_code(function.__code__)
    wrap: Any = builder._wrap_fx_proxy

    def wrap_selection(target_cls: Any, tx: Any, proxy: Any, *args: Any, **options: Any) -> Any:
        result = None
        if target_cls is TensorVariable and is_enabled():
            node = proxy.node
            found = (
                select(tx, node) for select in (*(other.get(node.target) for other in others), _selected) if select
            )
            result = next((made for made in found if made is not None), None)
        if result is None:
            return wrap(target_cls, tx, proxy, *args, **options)
        tx.output.remove_node(proxy.node)
        return result

    builder._wrap_fx_proxy = wrap_selection


def _selected(tx: Any, node: fx.Node) -> Any:
    """The result of a node as a variable.

    None if it is no selection, one by other values than those of inputs, or one that is written into a given tensor.
    """
    if node.kwargs.get("out") is not None:
        return None
    if node.target is operator.getitem:
        return _by_masks(tx, node)
    name = name_of_call(node)
    select = _SELECTIONS.get(name) if node.target is getattr(torch, name, name) or node.op == "call_method" else None
    return None if select is None else select(tx, node)


def _by_masks(tx: Any, node: fx.Node) -> Any:
    """Boolean indexing: one dimension and one vector of indices in place of each mask and its dimensions."""
    value, index = node.args
    parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask, parts)):
        return None
    sizes, new, position, merged = _example(value).shape, [], 0, 0
    taken = sum(_example(part).dim() if _is_mask(part) else part is not None and part is not ... for part in parts)
    computed = _computed_before(tx, node, 0, sizes[taken:]) if len(parts) == 1 else None
    if computed is not None:
        return computed
    for part in parts:
        if _is_mask(part):
            count = _example(part).dim()
            is_alike = sizes[position : position + count] == _example(part).shape
            indices = as_input(tx, part, _flat_indices_of) if is_alike else None
            if indices is None:
                return None
            if count > 1:
                value = call(tx, "flatten", value, position - merged, position - merged + count - 1)
            position, merged = position + count, merged + count - 1
            new.append(indices)
        elif isinstance(part, (fx.Node, slice, int, NoneType, EllipsisType)) and not isinstance(part, bool):
            position += len(sizes) - taken if part is ... else part is not None
            new.append(part)
        else:
            return None
    if len(new) == 1:
        # Without the check for negative indices.
        return call(tx, "index_select", value, 0, *new)
    return call(tx, operator.getitem, value, tuple(new))


def _by_mask(tx: Any, node: fx.Node) -> Any:
    """`masked_select`: elements by their indices, both tensors expanded to one shape."""
    value, mask = _named(node, "input", "mask")
    if not _is_mask(mask):
        return None
    shapes = _example(value).shape, _example(mask).shape
    if shapes[0] != shapes[1]:
        if any(isinstance(size, torch.SymInt) for shape in shapes for size in shape):
            return None
        shape = torch.broadcast_shapes(*shapes)
        value, mask = (node_of(call(tx, "expand", tensor, shape)) for tensor in (value, mask))
    indices = as_input(tx, mask, _flat_indices_of)
    return None if indices is None else call(tx, "index_select", call(tx, "flatten", value), 0, indices)


def _nonzero(tx: Any, node: fx.Node) -> Any:
    value, as_tuple = _named(node, "input", "as_tuple")
    if not _example(value).dim():
        return None
    rows = _rows(tx, value)
    if rows is None or as_tuple:
        return None if rows is None else TupleVariable(rows)
    # As in eager, each dimension's indices are contiguous.
    return call(tx, "t", call(tx, torch.stack, rows))


def _where(tx: Any, node: fx.Node) -> Any:
    if len(node.args) != 1 or node.kwargs:
        return None
    (mask,) = node.all_input_nodes
    rows = _rows(tx, mask) if _example(mask).dim() else None
    return None if rows is None else TupleVariable(rows)


def _repeated(tx: Any, node: fx.Node) -> Any:
    """`repeat_interleave`: rows by their indices."""
    value, repeats, dim, output_size = _named(node, "input", "repeats", "dim", "output_size")
    if value is None:
        value, repeats = repeats, None
    if repeats is None and isinstance(value, fx.Node):
        return _computed_before(tx, node, 0, ())
    if not _is_vector(repeats) or isinstance(dim, fx.Node) or output_size is not None:
        return None
    if dim is None:
        value, dim = node_of(call(tx, "flatten", value)), 0
    sizes = _example(value).shape
    if not -len(sizes) <= dim < len(sizes) or _example(repeats).shape[0] != sizes[dim]:
        return None
    dim %= len(sizes)
    computed = _computed_before(tx, node, dim, sizes[:dim] + sizes[dim + 1 :])
    if computed is not None:
        return computed
    indices = as_input(tx, repeats, torch.repeat_interleave)
    return None if indices is None else call(tx, "index_select", value, dim, indices)


def _computed_before(tx: Any, node: fx.Node, changing: int, others: Sequence[Any]) -> Any:
    """A result of inputs alone, of which one dimension changes; None if it depends on more, or if another one does."""
    if any(isinstance(size, torch.SymInt) for size in others):
        return None
    proxy = as_input(tx, node, _identity, (changing,))
    return None if proxy is None else variable_of(tx, proxy)


def _computed(tx: Any, node: fx.Node) -> Any:
    """A result of inputs alone: one tensor or several, of which each dimension can change."""
    found = function_of_inputs(tx, node, _identity)
    if found is None:
        return None
    if isinstance(found.value, Tensor):
        return variable_of(tx, as_input(tx, node, _identity, range(found.value.dim())))
    parts = [as_input(tx, node, _Part(k), range(part.dim())) for k, part in enumerate(found.value)]
    return TupleVariable([variable_of(tx, part) for part in parts])


_SELECTIONS: Mapping[str, Callable[[Any, fx.Node], Any]] = MappingProxyType(
    {
        "masked_select": _by_mask,
        "nonzero": _nonzero,
        "argwhere": _nonzero,
        "where": _where,
        "repeat_interleave": _repeated,
        "unique": _computed,
        "unique_consecutive": _computed,
        "bincount": _computed,
    }
)


def _named(node: fx.Node, *names: str) -> list[Any]:
    """The arguments of a node by their names, None for those that are not given."""
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    given.setdefault("input", given.get("self"))
    return [given.get(name) for name in names]


def _example(node: Any) -> Any:
    return node.meta["example_value"]


def _tensor_of(part: Any) -> Tensor | None:
    """The example of a node that is a tensor, as sizes are nodes too; None for others."""
    example = part.meta.get("example_value") if isinstance(part, fx.Node) else None
    return example if isinstance(example, Tensor) else None


def _is_vector(part: Any) -> TypeGuard[fx.Node]:
    tensor = _tensor_of(part)
    return tensor is not None and tensor.dim() == 1


def _is_mask(part: Any) -> bool:
    tensor = _tensor_of(part)
    return tensor is not None and tensor.dtype == torch.bool and tensor.dim() > 0


def _indices_of(values: Tensor) -> Tensor:
    """The indices of the elements that are not zero, a column for each dimension."""
    return values.nonzero().contiguous()


def _flat_indices_of(mask: Tensor) -> Tensor:
    """The indices of the elements of a mask in its order, as a tensor that is no view."""
    return mask.reshape(-1).nonzero().view(-1).clone()


def _identity(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class _Part:
    """Takes one of several results, as a tensor that is no view."""

    position: int

    def __call__(self, results: Sequence[Tensor]) -> Tensor:
        return results[self.position].clone()


def _rows(tx: Any, mask: fx.Node) -> list[Any] | None:
    """The indices that a mask selects in each dimension, as variables."""
    indices = as_input(tx, mask, _indices_of)
    count = _example(mask).dim()
    return None if indices is None else [call(tx, torch.select_copy, indices, 1, k) for k in range(count)]


def call(tx: Any, target: Any, *args: Any) -> Any:
    """The variable of a new node, whose arguments can be nodes, proxies and variables."""
    kind = "call_method" if isinstance(target, str) else "call_function"
    # Unlike tree_map, it looks into slices.
    proxies = map_aggregate(args, functools.partial(_proxy, tx))
    return builder.wrap_fx_proxy(tx, tx.output.create_proxy(kind, target, proxies, {}))


def _proxy(tx: Any, value: Any) -> Any:
    if isinstance(value, fx.Node):
        return fx.Proxy(value, tx.output.current_tracer)
    return value.as_proxy() if isinstance(value, TensorVariable) else value


def node_of(variable: Any) -> fx.Node:
    return variable.as_proxy().node


def variable_of(tx: Any, proxy: Any) -> Any:
    """The variable of an input. It has no source, as the program can write into it."""
    return builder.wrap_fx_proxy_cls(TensorVariable, tx, proxy, example_value=_example(proxy.node))


def as_input(
    tx: Any, node: fx.Node, kind: Callable[[Any], Any] = _identity, changing: Sequence[int] = (0,)
) -> fx.Proxy | None:
    """`kind` of a node's value as an input; None if it depends on more than inputs.

    Dimensions that are not in `changing` have the same size for all values.
    """
    known = tx.output.__dict__.setdefault(_ATTRIBUTE, {})
    proxy = known.get((node, kind))
    # The program may have written into what was made of it.
    if proxy is not None and is_unchanged(proxy.node):
        return proxy
    found = function_of_inputs(tx, node, kind)
    if found is None:
        return None
    name = f"{node.name}_{getattr(kind, '__name__', 'part')}".replace("__", "_")
    proxy = known[node, kind] = computed_input(tx, found, name, changing)
    return proxy


def computed_input(tx: Any, found: InputFunction, name: str, changing: Sequence[int]) -> fx.Proxy:
    """What is computed before the graph, as an input whose sizes in the dimensions `changing` can change."""
    value, once = found.value, _Once(found.compute)
    guarded, taken = (tx.output.install_global_by_id("__lit_ort_selection", f) for f in (once.guarded, once.taken))
    source = _Computed(guarded, taken, tuple(found.sources))
    for dimension in changing if found.sources else ():
        size = value.shape[dimension]
        torch._dynamo.maybe_mark_dynamic(value, dimension)
        if size < 2:
            # A constant of the trace.
            install_guard(found.sources[0].make_guard(functools.partial(_add_guard, source, dimension, size)))
    example = builder.wrap_to_fake_tensor_and_record(value, tx=tx, source=source, is_tensor=True)
    proxy = tx.output.root_tracer.create_graph_input(name, Tensor, example, source=source)
    argument = builder.GraphArg(source, value, False, example, example_strong_ref=value)
    proxy.node.meta.update(grapharg=argument, tensor_dict={})
    return proxy


def _add_guard(source: _Computed, dimension: int, size: int, guards: Any, guard: Any) -> None:
    code = f"{source.name}.size()[{dimension}] == {size}"
    guards.add_python_lambda_leaf_guard_to_root([code], [code], closure_vars=_get_closure_vars())
