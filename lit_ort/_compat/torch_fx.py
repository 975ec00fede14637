"""Private interfaces of FX: traces, fake tensors, what nodes carry, trees of arguments; graphs with types to use."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils import _pytree

from lit_ort._compat.torch_ops import returns_alias

# Nested tuples, lists and dictionaries as leaves, and back.
tree_flatten: Any = _pytree.tree_flatten
tree_leaves: Any = _pytree.tree_leaves
tree_map: Any = _pytree.tree_map
tree_unflatten: Any = _pytree.tree_unflatten

_aten = torch.ops.aten
_NORMALISATIONS = frozenset(
    {_aten.native_layer_norm.default, _aten.native_group_norm.default, _aten.native_batch_norm.default}
    | {_aten._native_batch_norm_legit.default, _aten._native_batch_norm_legit.no_stats}
    | {_aten._native_batch_norm_legit_functional.default}
)
# Paths of modules as Dynamo writes them: the variable that holds the first one, then names, some of them as keys.
_ROOT = re.compile(r"[LG]\['[^']*'\](\[\d+\])*")
_BY_KEY = re.compile(r"(?:\._modules)?\['([^']*)'\]")

# Operators whose decomposition for tracing is wrong in torch 2.13: several labels of a row count as one.
WRONG_IN_A_TRACE = frozenset({torch.ops.aten.multilabel_margin_loss.default})


def aten_graph(graph_module: fx.GraphModule, examples: Sequence[Any], mode: Any) -> fx.GraphModule:
    """A graph of torch functions as one of ATen operators, composite ones whole, writes in place as they are.

    Args:
        examples: fake tensors and numbers, one for each input.
        mode: the fake mode that they belong to.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    def interpreted(*inputs: Any) -> Any:
        return fx.Interpreter(graph_module).run(*inputs)

    with mode, preserve_node_meta():
        return make_fx(interpreted, pre_dispatch=True, tracing_mode="real")(*examples)


def fake_mode(symbolic: bool) -> FakeTensorMode:
    """A mode for tensors without data.

    Args:
        symbolic: whether their sizes may be symbols.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_of(graph: fx.Graph) -> fx.Node:
    """The node that says what a graph returns."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def returned_by(graph: fx.Graph) -> list[Any]:
    """What a graph returns: nodes, and values that are no nodes, such as None."""
    return _as_list(output_of(graph).args[0])


def copy_nodes(source: fx.Graph, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> list[Any]:
    """Copies the nodes of a graph to the end of another; returns what it returns, in the copies.

    Args:
        copies: filled with the copy of each node; what is in it already is not copied.
    """
    return _as_list(graph.graph_copy(source, copies))


def _as_list(returned: Any) -> list[Any]:
    assert isinstance(returned, (tuple, list)), "graphs return a tuple"
    return list(returned)


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments by position, of any type: FX's own type for one is a union of all that there are."""
    return node.args


def first_argument(node: fx.Node) -> fx.Node:
    """The node that another one, such as a view, is of."""
    argument = node.args[0]
    assert isinstance(argument, fx.Node), f"{node.name} is of a value that no node computes"
    return argument


def example_of(node: fx.Node) -> Any:
    """What stands for a node's value: a fake tensor or a number of the last trace, else of Dynamo's."""
    return node.meta.get("val", node.meta.get("example_value"))


def ancestors_of(nodes: Iterable[fx.Node], beyond: fx.Node | None = None) -> set[fx.Node]:
    """What nodes are computed from, through whatever lies between; not what they are computed from through `beyond`."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        missing = [a for a in waiting.pop().all_input_nodes if a not in found and a is not beyond]
        found.update(missing)
        waiting.extend(missing)
    return found


def restrided(node: fx.Node) -> Any:
    """A node's example, computed anew from those of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    assert callable(node.target)
    with tensors[0].fake_mode, torch.no_grad():
        return node.target(*args, **kwargs)


def strides_of(value: Any) -> list[str]:
    """The strides of a value's tensors, as text: comparing symbols would add guards."""
    return [str(leaf.stride()) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_view(node: fx.Node) -> bool:
    """Whether a node's result lies in the memory of its first argument, where values are contiguous."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return node.target is torch.ops.aten.reshape.default or returns_alias(node.target)


def is_alias(node: fx.Node) -> bool:
    """Whether a node's result lies in the memory of its first argument, whatever that one's order in memory."""
    if is_element(node):
        node = first_argument(node)
    return returns_alias(node.target)


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number computed from sizes."""
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_element(node: fx.Node) -> bool:
    """Whether a node is one of several results of another one."""
    return node.target is operator.getitem


def correct_statistics(graph: fx.Graph) -> None:
    """Gives the statistics of normalisations the type that they have.

    Of a bfloat16 input and float32 parameters, as autocast leaves them, the CPU's kernels return a float32 mean and
    deviation, and torch 2.13's fake ones bfloat16.
    """
    for node in graph.nodes:
        if node.target in _NORMALISATIONS:
            others = [argument.meta["val"] for argument in node.all_input_nodes[1:]]
            types = {value.dtype for value in others if isinstance(value, torch.Tensor)}
            _set_statistics(node, types - {first_argument(node).meta["val"].dtype})


def _set_statistics(node: fx.Node, types: set[torch.dtype]) -> None:
    if not types:
        return
    result, mean, deviation, *rest = node.meta["val"]
    (dtype,) = types
    node.meta["val"] = (result, mean.to(dtype), deviation.to(dtype), *rest)
    for user in node.users:
        if is_element(user):
            user.meta["val"] = node.meta["val"][arguments_of(user)[1]]


def module_path(node: fx.Node) -> str | None:
    """The path of the module that a node came from, as Dynamo writes it."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else None


def module_name(node: fx.Node) -> str:
    """The name of the module that a node, or the one that it is the gradient of, came from: `layers.0.attention`.

    Empty for the module that was compiled and for what came from none.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = _ROOT.sub("", str(list(stack.values())[-1][0]))
    return _BY_KEY.sub(r".\1", path).lstrip(".")
