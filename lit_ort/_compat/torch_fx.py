"""Private interfaces of FX: tracing, fake tensors, metadata of nodes, trees of arguments; typed access to graphs."""

from __future__ import annotations

import operator
import re
from collections.abc import Container, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import _refs, fx
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.nn import functional
from torch.utils import _pytree

from lit_ort._compat.interpolation import whole_interpolations
from lit_ort._compat.torch import enter_autocast, exit_autocast
from lit_ort._compat.torch_ops import returns_alias

# Nested tuples, lists and dictionaries to a list of leaves, and back.
tree_flatten: Any = _pytree.tree_flatten
tree_leaves: Any = _pytree.tree_leaves
tree_map: Any = _pytree.tree_map
tree_unflatten: Any = _pytree.tree_unflatten

_aten = torch.ops.aten
_NORMALIZATIONS = frozenset(
    {_aten.native_layer_norm.default, _aten.native_group_norm.default, _aten.native_batch_norm.default}
    | {_aten._native_batch_norm_legit.default, _aten._native_batch_norm_legit.no_stats}
    | {_aten._native_batch_norm_legit_functional.default}
)
_GROUP_NORM_BACKWARD = _aten.native_group_norm_backward.default
# Dynamo's paths of modules: the variable of the root module, then attribute names, some of them in the form of keys.
_ROOT = re.compile(r"[LG]\['[^']*'\](\[\d+\])*")
_BY_KEY = re.compile(r"(?:\._modules)?\['([^']*)'\]")

# Functions that make a tensor of a number, or of lists of numbers; Dynamo traces `torch.tensor` of a changing number as
# the last.
TENSORS_OF_NUMBERS = frozenset({torch.scalar_tensor, torch.tensor, _refs.tensor})

# Functions that raise an error for a value, and return nothing.
CHECKS: frozenset[Any] = frozenset({torch._assert_async})  # pyright: ignore[reportPrivateImportUsage]

# Operators whose decomposition in a trace is wrong in torch 2.13: several labels of a row count as one.
MISTRACED_OPERATORS = frozenset({torch.ops.aten.multilabel_margin_loss.default})


def graph_module_of(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph, whose Python code is written only if it is called: most are a stage's input alone."""
    return _LazyGraphModule(root, graph)


def lazy_graph_modules() -> AbstractContextManager[None]:
    """A context in which torch makes such modules too."""
    return _use_lazy_graph_module(True)


@whole_interpolations()
def aten_graph(graph_module: fx.GraphModule, examples: Sequence[Any], mode: Any) -> fx.GraphModule:
    """Trace a graph of torch functions to ATen operators; composite and in-place operators are kept.

    Args:
        graph_module: the graph.
        examples: fake tensors and numbers, one for each input.
        mode: the fake mode of these tensors.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    def interpreted(*inputs: Any) -> Any:
        return _Interpreter(graph_module).run(*inputs)

    # The graph can set the grad mode for the code after it.
    with mode, preserve_node_meta(), torch.set_grad_enabled(torch.is_grad_enabled()), lazy_graph_modules():
        return make_fx(interpreted, pre_dispatch=True, tracing_mode="real")(*examples)


class _Interpreter(fx.Interpreter):
    """Applies the autocast contexts of a graph too, which tracing before dispatch only records."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._outer: list[tuple[str, bool, torch.dtype, bool]] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run(*args, **kwargs)
        finally:
            while self._outer:
                _set_autocast(*self._outer.pop())

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if target is enter_autocast:
            device, dtype, enabled, cache = args
            usual, is_cached = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
            self._outer.append((device, torch.is_autocast_enabled(device), usual, is_cached))
            _set_autocast(device, enabled, dtype or usual, is_cached if cache is None else cache)
        elif target is exit_autocast:
            _set_autocast(*self._outer.pop())
        return result


def _set_autocast(device: str, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cache)


def fake_mode(symbolic: bool) -> FakeTensorMode:
    """A new fake tensor mode.

    Args:
        symbolic: whether the sizes of its tensors can be symbolic.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake tensor mode of a graph's examples; a new one if it has none."""
    leaves = (leaf for node in graph.nodes for leaf in tree_leaves(node.meta.get("val")))
    return next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None) or fake_mode(False)


def forget_real_tensors(graph: fx.Graph) -> None:
    """Drops the weak references to inputs in the fake modes of a graph, which prevent `torch.utils.swap_tensors`."""
    examples = [node.meta.get("example_value") for node in inputs_of(graph)]
    for mode in {example.fake_mode for example in examples if isinstance(example, FakeTensor)}:
        describer = mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_of(graph: fx.Graph) -> fx.Node:
    """The output node of a graph."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def returned_by(graph: fx.Graph) -> list[Any]:
    """The outputs of a graph: nodes, and values that are not nodes, such as None."""
    return _as_list(output_of(graph).args[0])


def copy_nodes(source: fx.Graph, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> list[Any]:
    """Copies the nodes of a graph to the insertion point of another graph. Returns the outputs as nodes of the latter.

    Args:
        source: the graph to copy.
        graph: the graph that receives the copies.
        copies: receives the copy of each node; nodes that it contains already are not copied.
    """
    return _as_list(graph.graph_copy(source, copies))


def _as_list(returned: Any) -> list[Any]:
    assert isinstance(returned, (tuple, list)), "graphs return a tuple"
    return list(returned)


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a node, typed as `Any`; FX types them as a large union."""
    return node.args


def first_argument(node: fx.Node) -> fx.Node:
    """The first argument of a node, such as the tensor that a view is of."""
    argument = node.args[0]
    assert isinstance(argument, fx.Node), f"the first argument of {node.name} is not a node"
    return argument


def example_of(node: fx.Node) -> Any:
    """A node's example value: the fake tensor or number of the last trace, or else of Dynamo's trace."""
    return node.meta.get("val", node.meta.get("example_value"))


def ancestors_of(nodes: Iterable[fx.Node], beyond: fx.Node | None = None) -> set[fx.Node]:
    """All nodes that these nodes are computed from, except `beyond` and ancestors that are reached only through it."""
    ancestors: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        added = [a for a in pending.pop().all_input_nodes if a not in ancestors and a is not beyond]
        ancestors.update(added)
        pending.extend(added)
    return ancestors


def recomputed_example(node: fx.Node) -> Any:
    """A node's example value, computed again from the examples of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    # A view for the strides of the trace can be a copy for others.
    target = _aten.reshape.default if node.target in (_aten.view.default, _aten._unsafe_view.default) else node.target
    assert callable(target)
    with tensors[0].fake_mode if tensors else fake_mode_of(node.graph), torch.no_grad():
        return _with_statistics(node, target(*args, **kwargs))


def strides_of(value: Any) -> list[str]:
    """The strides of a value's tensors, as text, since comparing symbols would add guards."""
    return [str(leaf.stride()) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_view(node: fx.Node) -> bool:
    """Whether a node's result is a view of its first argument if that is contiguous."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or not _reads_node_first(node):
        return False
    return node.target is torch.ops.aten.reshape.default or returns_alias(node.target)


def is_alias(node: fx.Node) -> bool:
    """Whether a node's result is a view of its first argument for all strides of that argument."""
    if is_element(node):
        node = first_argument(node)
    return returns_alias(node.target) and _reads_node_first(node)


def _reads_node_first(node: fx.Node) -> bool:
    """Whether the first argument is a node. That of the conjugate of a complex literal is a number."""
    return bool(node.args) and isinstance(node.args[0], fx.Node)


def base_of(node: fx.Node) -> fx.Node:
    """The node that a value is a view of if that is contiguous, through all views in between."""
    while is_view(node):
        node = first_argument(node)
    return node


def is_read_by(node: fx.Node, targets: Container[Any]) -> bool:
    """Whether one of some operators reads a node, or a view of it."""
    return any(user.target in targets or (is_view(user) and is_read_by(user, targets)) for user in node.users)


def viewed_base(node: fx.Node) -> fx.Node:
    """The node that a value is a view of for all strides, through all views in between."""
    while is_alias(node):
        node = first_argument(node)
    return node


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number computed from sizes."""
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def size_node(graph: fx.Graph, size: torch.SymInt | torch.SymFloat | torch.SymBool) -> fx.Node:
    """Appends a node that is a number computed from sizes; graphs have no other form of sums and products."""
    node = graph.call_function(_size, (str(size),))
    node.meta["val"] = size
    return node


def _size(expression: str) -> int:
    raise AssertionError(f"{expression} is read from the node's example, never computed by a call")


def is_element(node: fx.Node) -> bool:
    """Whether a node is one of the results of another node."""
    return node.target is operator.getitem


def correct_statistics(graph: fx.Graph) -> None:
    """Corrects the dtypes of normalization layers' statistics, and of the gradient of group normalization's input.

    For a bfloat16 input and float32 parameters, which are usual in autocast, the CPU kernels return the mean and
    deviation in float32, but the fake implementations of torch 2.13 return them in bfloat16.
    """
    for node in graph.nodes:
        if node.target in _NORMALIZATIONS or node.target is _GROUP_NORM_BACKWARD:
            node.meta["val"] = _with_statistics(node, node.meta["val"])
            for user in filter(is_element, node.users):
                user.meta["val"] = node.meta["val"][arguments_of(user)[1]]


def _with_statistics(node: fx.Node, value: Any) -> Any:
    """The example of a node, with the dtypes of a normalization's results corrected."""
    if node.target is _GROUP_NORM_BACKWARD and value[0] is not None:
        # The kernel returns it in the dtype of the input, the fake implementation in that of the weight.
        return value[0].to(arguments_of(node)[1].meta["val"].dtype), *value[1:]
    if node.target not in _NORMALIZATIONS:
        return value
    others = [argument.meta["val"] for argument in node.all_input_nodes[1:]]
    dtypes = {other.dtype for other in others if isinstance(other, torch.Tensor)}
    dtypes -= {first_argument(node).meta["val"].dtype}
    if not dtypes:
        return value
    result, mean, deviation, *rest = value
    (dtype,) = dtypes
    return result, mean.to(dtype), deviation.to(dtype), *rest


@whole_interpolations()
def correct_strides(graph: fx.Graph) -> set[fx.Node]:
    """Corrects the strides of values for which torch's fake operators return others than the kernels.

    Returns:
        The values with other strides than before.
    """
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not (
            node.target in _LAYOUTS or any(a in changed for a in node.all_input_nodes)
        ):
            continue
        before = strides_of(node.meta["val"])
        if any(argument in changed for argument in node.all_input_nodes):
            node.meta["val"] = recomputed_example(node)
        if node.target in _LAYOUTS:
            _set_layout(node)
        if strides_of(node.meta["val"]) != before:
            changed.add(node)
    return changed


def _set_layout(node: fx.Node) -> None:
    arguments = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    tensors = [argument for argument in arguments if isinstance(argument, FakeTensor)]
    if all(tensor.is_contiguous() for tensor in tensors):
        return
    value = node.meta["val"]
    first, *rest = value if isinstance(value, (tuple, list)) else [value]
    with tensors[0].fake_mode, torch.no_grad():
        like = _LAYOUTS[node.target](*arguments)
        if like.shape == first.shape:
            first = torch.empty_strided(first.shape, like.stride(), dtype=first.dtype, device=first.device)
    node.meta["val"] = (first, *rest) if isinstance(value, (tuple, list)) else first


def _contiguous(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rolled(x: torch.Tensor, shifts: Any, dims: Any = ()) -> torch.Tensor:
    return _images(x) if dims else _contiguous(x)


def _padded_volume(x: torch.Tensor, padding: Any) -> torch.Tensor:
    return functional.pad(x, padding).contiguous(memory_format=suggest_memory_format(x))


def _padded(x: torch.Tensor, padding: Any, mode: str = "constant", value: Any = None) -> torch.Tensor:
    if mode in ("reflect", "replicate") and len(padding) == 6:
        return _padded_volume(x, padding)
    return functional.pad(x, padding, mode, value)


def _unpooled(x: torch.Tensor, indices: torch.Tensor, output_size: Sequence[Any], *_: Any) -> torch.Tensor:
    shape = (*x.shape[: x.dim() - len(output_size)], *output_size)
    return x.new_empty(shape).contiguous(memory_format=suggest_memory_format(x))


def _images(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=suggest_memory_format(x))


def _pointwise(x: Any, other: Any, *_: Any) -> torch.Tensor:
    parts = [value.float() if isinstance(value, torch.Tensor) else value for value in (x, other)]
    return torch.maximum(*parts) if all(isinstance(part, torch.Tensor) for part in parts) else torch.add(*parts)


# Functions of an operator's arguments whose result has the shape and strides of the operator's real (first) result.
_LAYOUTS: dict[Any, Any] = {
    _aten.roll.default: _rolled,
    _aten.pad.default: _padded,
    **dict.fromkeys((_aten.reflection_pad3d.default, _aten.replication_pad3d.default), _padded_volume),
    **dict.fromkeys((_aten.channel_shuffle.default, _aten.batch_norm.default), _images),
    _aten._batch_norm_with_update.default: _images,
    _aten.max_unpool2d.default: _unpooled,
    **dict.fromkeys({_aten.group_norm.default, *_NORMALIZATIONS} - {_aten.native_layer_norm.default}, _images),
    **dict.fromkeys((_aten.isin.Tensor_Tensor, _aten.isin.Tensor_Scalar, _aten.log_sigmoid.default), _contiguous),
    **dict.fromkeys((_aten.log_sigmoid_forward.default, _aten.rrelu.default), _contiguous),
    **dict.fromkeys((_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_functional.default), _contiguous),
    **dict.fromkeys((_aten.normal.Tensor_Tensor, _aten.normal.Tensor_float), _contiguous),
    **dict.fromkeys((_aten.copysign.Tensor, _aten.copysign.Scalar, _aten.ldexp.Tensor), _pointwise),
    **dict.fromkeys((_aten.floor_divide.default, _aten.floor_divide.Scalar), _pointwise),
    **dict.fromkeys((_aten.div.Tensor_mode, _aten.div.Scalar_mode, _aten.logaddexp.default), _pointwise),
    **dict.fromkeys((_aten.logical_and.default, _aten.logical_or.default, _aten.logical_xor.default), _pointwise),
    **dict.fromkeys((_aten.heaviside.default, _aten.native_dropout_backward.default), _pointwise),
}


def module_path(node: fx.Node) -> str | None:
    """Dynamo's path of the module that a node comes from."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else None


def module_name(node: fx.Node) -> str:
    """The name of the module that a node comes from, such as `layers.0.attention`.

    A node of the backward has the name of its forward node's module. The name is empty for the compiled module itself
    and for a node that comes from no module.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = _ROOT.sub("", str(list(stack.values())[-1][0]))
    return _BY_KEY.sub(r".\1", path).lstrip(".")


def untransposed(factor: fx.Node) -> tuple[fx.Node, bool]:
    """The value of which a matmul reads the elements in order, and whether it transposes it."""
    is_transposed = False
    while _transposes(factor):
        factor, is_transposed = first_argument(factor), not is_transposed
    return factor, is_transposed


def _transposes(node: fx.Node) -> bool:
    """Whether a node is a view that exchanges the last two dimensions."""
    if not is_view(node):
        return False
    value, base = node.meta["val"], first_argument(node).meta["val"]
    rank = value.dim()
    if node.target is _aten.t.default:
        return rank == 2
    if node.target is _aten.transpose.int:
        return {d % rank for d in node.args[1:]} == {rank - 2, rank - 1}  # type: ignore[operator]
    if node.target is _aten.permute.default:
        order = [d % rank for d in node.args[1]]  # type: ignore[operator, union-attr]
        return order == [*range(rank - 2), rank - 1, rank - 2] and base.dim() == rank
    return False
