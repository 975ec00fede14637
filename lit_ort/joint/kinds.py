"""Which form a graph takes: `fused` where one scalar is the loss, else `split`, or `forward` without gradients.

A graph that returns other differentiable values beside its loss is fused too: they are detached in the trace, and only
if a gradient for one of them does arrive is the two-run form compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from lit_ort._compat.torch import memory_of
from lit_ort._compat.torch_fx import ancestors_of, copy_nodes, example_of, returned_by


def loss_position(module: fx.GraphModule, differentiable: Sequence[int]) -> int | None:
    """The output whose gradient a fused run takes to be one: a scalar that enters no other scalar, or
    only such as are computed from it alone.

    Args:
        differentiable: positions of the outputs that autograd may send a gradient for.

    Returns:
        None where there is no such scalar, or where two of the outputs share memory.
    """
    values = returned_by(module.graph)
    chosen = [(k, values[k]) for k in differentiable]
    scalars = [(k, node) for k, node in chosen if _is_scalar(node)]
    if not scalars or _share_memory([node for _, node in chosen]):
        return None
    nodes = [node for _, node in scalars]
    return next((k for k, node in scalars if _is_last(node, nodes)), None)


def _is_last(node: fx.Node, scalars: Sequence[fx.Node]) -> bool:
    """Whether the scalars computed from a scalar are computed from it alone, as a perplexity is from its loss."""
    later = [other for other in scalars if other is not node and node in ancestors_of([other])]
    return not any(one.op == "placeholder" for other in later for one in ancestors_of([other], beyond=node))


def detach_others(module: fx.GraphModule, differentiable: Sequence[int], loss: int) -> fx.GraphModule:
    """A copy of a graph in which only the loss needs a gradient."""
    graph = fx.Graph()
    outputs = copy_nodes(module.graph, graph, {})
    for position in differentiable:
        if position != loss:
            node = outputs[position]
            outputs[position] = graph.call_method("detach", (node,))
            outputs[position].meta = dict(node.meta)
    graph.output(tuple(outputs))
    return fx.GraphModule(module, graph)


def _is_scalar(node: fx.Node) -> bool:
    value = example_of(node)
    return isinstance(value, torch.Tensor) and value.dim() == 0 and node.op != "placeholder"


def _share_memory(nodes: Sequence[fx.Node]) -> bool:
    storages = [memory_of(example_of(node)) for node in nodes if isinstance(example_of(node), torch.Tensor)]
    return len(set(storages)) < len(storages)
