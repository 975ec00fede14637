"""Autocast around an FX graph and in it: which nodes compute in which precision.

Graphs are captured in float32 throughout. What autocast would compute in bfloat16 is marked, and passes over the ONNX
model round the factors of these products alone; everything between them stays in float32, which is closer to exact
arithmetic than autocast is. The types of a graph's outputs are those that eager gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch.amp import autocast_mode

from lit_ort.compiler.marks import PREFIX, mark
from lit_ort.compiler.numbers import copy_graph
from lit_ort.errors import CaptureError
from lit_ort.options import BF16_MIXED, FLOAT32

# Where a model, and a node of a model with several precisions, keeps its own.
_NAME = "precision"
PRECISION = PREFIX + _NAME
# In a model's place: every node says its own.
BY_NODE = "by node"

_REMEDY = "Use torch.autocast('cpu', torch.bfloat16), or run this part outside of the compiled step."
_ENTER, _EXIT = (getattr(autocast_mode, name) for name in ("_enter_autocast", "_exit_autocast"))


def ambient_precision(asked: str) -> str:
    """The precision of a graph outside of its own regions: bfloat16 under `torch.autocast`, else what the options ask.

    Raises:
        CaptureError: autocast to another type.
    """
    if not torch.is_autocast_enabled("cpu"):
        return asked
    return _precision_of(torch.get_autocast_dtype("cpu"), "autocast around this graph computes", None)


def settle_autocast(graph: fx.Graph, ambient: str) -> frozenset[str]:
    """Drops the switches of autocast, and where there are several precisions marks every node with its own.

    Args:
        graph: changed in place.
        ambient: the precision outside of the graph's regions.

    Returns:
        The precisions that its nodes compute in.

    Raises:
        CaptureError: autocast to another type than bfloat16.
    """
    current, outside, marks = ambient, dict[fx.Node, str](), dict[fx.Node, str]()
    for node in graph.nodes:
        if node.target is _ENTER:
            outside[node] = current
            current = _of_region(node, current)
        elif node.target is _EXIT:
            entered = node.args[0]
            assert isinstance(entered, fx.Node)
            current = outside[entered]
        elif node.op not in ("placeholder", "output", "get_attr"):
            marks[node] = current
    for node in reversed(list(graph.nodes)):
        if node.target in (_ENTER, _EXIT):
            graph.erase_node(node)
    precisions = frozenset(marks.values())
    if len(precisions) > 1:
        for node, precision in marks.items():
            mark(node, _NAME, precision)
    return precisions


def compute_in_float32(graph: fx.Graph) -> None:
    """Replaces bfloat16 by float32 wherever the graph names it, as the user's code or the type of another tensor did.

    Raises:
        CaptureError: bits of bfloat16 taken for those of another type.
    """
    for node in graph.nodes:
        named = [value for value in (*node.args[1:], *node.kwargs.values()) if isinstance(value, torch.dtype)]
        if named and node.target in ("view", torch.ops.aten.view.dtype, torch.Tensor.view):
            raise CaptureError(
                "the graph reads a tensor's bits as another type, and autocast decides what they are",
                remedy=_REMEDY,
                operator=str(node.target),
            )
        if node.op == "call_method" and node.target == "bfloat16":
            node.target = "float"
        elif node.op not in ("placeholder", "output"):
            node.args = fx.node.map_aggregate(node.args, _wide)  # type: ignore[assignment]
            node.kwargs = fx.node.map_aggregate(node.kwargs, _wide)  # type: ignore[assignment]


def float32_of(value: Any) -> Any:
    """A bfloat16 tensor as float32, in a way that gradients follow; anything else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def run_in_eager(graph_module: fx.GraphModule, arguments: Sequence[Any], precision: str) -> Any:
    """Runs a graph without a session, under autocast where the precision asks for it, with the types Dynamo expects."""
    if precision != BF16_MIXED or torch.is_autocast_enabled("cpu"):
        return graph_module(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = graph_module(*arguments)
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    examples = output.args[0]
    assert isinstance(examples, (tuple, list)), "Dynamo graphs return a tuple"
    return tuple(_as_example(value, example) for value, example in zip(outputs, examples, strict=True))


def in_float32(graph_module: fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """Runs a graph without any autocast, for comparison."""
    graph = copy_graph(graph_module)
    settle_autocast(graph, FLOAT32)
    compute_in_float32(graph)
    with torch.autocast("cpu", enabled=False):
        return fx.GraphModule(graph_module, graph)(*map(float32_of, arguments))


def mark_model(model: ir.Model, precisions: frozenset[str]) -> None:
    """Tells a freshly translated model its precision."""
    model.metadata_props[PRECISION] = BY_NODE if len(precisions) > 1 else next(iter(precisions), FLOAT32)


def precision_of(model: ir.Model, node: ir.Node) -> str | None:
    """The precision that a node computes in, or None where nobody can tell."""
    precision = model.metadata_props.get(PRECISION, FLOAT32)
    return node.metadata_props.get(PRECISION) if precision == BY_NODE else precision


def same_precision(*nodes: ir.Node | None) -> bool:
    """Whether nodes that shall become one were marked with one precision, or not at all."""
    return len({node.metadata_props.get(PRECISION) for node in nodes if node is not None}) <= 1


def _as_example(value: Any, example: Any) -> Any:
    wanted = example.meta.get("example_value") if isinstance(example, fx.Node) else None
    return value.to(wanted.dtype) if isinstance(value, torch.Tensor) and isinstance(wanted, torch.Tensor) else value


def _of_region(node: fx.Node, outside: str) -> str:
    device, dtype, enabled, _ = node.args
    if device != "cpu":
        return outside
    if not enabled:
        return FLOAT32
    chosen = torch.get_autocast_dtype("cpu") if dtype is None else dtype
    assert isinstance(chosen, torch.dtype)
    return _precision_of(chosen, "the graph has an autocast region", str(node.target))


def _precision_of(dtype: torch.dtype, what: str, operator: str | None) -> str:
    if dtype != torch.bfloat16:
        raise CaptureError(
            f"{what} in {dtype}, and sessions compute in float32 and bfloat16", remedy=_REMEDY, operator=operator
        )
    return BF16_MIXED


def _wide(value: Any) -> Any:
    return torch.float32 if value is torch.bfloat16 else value
