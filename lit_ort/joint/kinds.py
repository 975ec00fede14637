"""The kind of a graph: `fused` if one scalar output is the loss, `forward` without gradients, otherwise `split`.

A graph that returns other differentiable values besides its loss is also fused. These values are detached in the trace;
another form is compiled only if a gradient for one of them arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from lit_ort._compat.torch import memory_of
from lit_ort._compat.torch_fx import ancestors_of, copy_nodes, example_of, graph_module_of, inputs_of, returned_by
from lit_ort._compat.torch_ops import AUTOGRAD_FUNCTION, OpOverload, has_linear_gradient, sets_hook


def loss_position(module: fx.GraphModule, differentiable: Sequence[int]) -> int | None:
    """The position of the loss, for which a fused run assumes a gradient of one.

    The loss is a scalar from which no other scalar output is computed, except for outputs that need only the loss.

    Args:
        module: the captured graph.
        differentiable: positions of the outputs that can receive a gradient.

    Returns:
        None if there is no such scalar, if two of these outputs share memory, if gradients in float16 have to be
        computed from a loss that is scaled, or if a backward of the program's own need not be linear, as one that
        clips gradients: the loss can be divided behind the graph, by `accumulate_grad_batches` for example.
    """
    values = returned_by(module.graph)
    if any(_is_float16(node) or _has_own_backward(node) for node in module.graph.nodes):
        return None
    candidates = [(k, values[k]) for k in differentiable]
    # The gradient of an input that the graph changes in place, and returns, is that of its new value.
    inputs = {memory_of(value) for value in map(example_of, inputs_of(module.graph)) if isinstance(value, torch.Tensor)}
    scalars = [(k, n) for k, n in candidates if _is_scalar(n) and memory_of(example_of(n)) not in inputs]
    if not scalars or _share_memory([node for _, node in candidates]):
        return None
    nodes = [node for _, node in scalars]
    return next((k for k, node in scalars if _is_last(node, nodes)), None)


def _is_float16(node: fx.Node) -> bool:
    value = example_of(node)
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16


def _has_own_backward(node: fx.Node) -> bool:
    """Whether a node is an `autograd.Function`, sets a hook on a gradient, or is an operator of another library."""
    if node.target is AUTOGRAD_FUNCTION or sets_hook(node.target):
        return True
    return isinstance(node.target, OpOverload) and not has_linear_gradient(node.target)


def _is_last(node: fx.Node, scalars: Sequence[fx.Node]) -> bool:
    """Whether the scalars that are computed from a scalar need nothing else, as a perplexity needs only the loss."""
    dependents = [other for other in scalars if other is not node and node in ancestors_of([other])]
    return not any(a.op == "placeholder" for other in dependents for a in ancestors_of([other], beyond=node))


def detach_others(module: fx.GraphModule, differentiable: Sequence[int], loss: int) -> fx.GraphModule:
    """Return a copy of a graph in which every differentiable output except the loss is detached."""
    graph = fx.Graph()
    outputs = copy_nodes(module.graph, graph, {})
    for position in differentiable:
        if position != loss:
            node = outputs[position]
            outputs[position] = graph.call_method("detach", (node,))
            outputs[position].meta = dict(node.meta)
    graph.output(tuple(outputs))
    return graph_module_of(module, graph)


def _is_scalar(node: fx.Node) -> bool:
    value = example_of(node)
    return isinstance(value, torch.Tensor) and value.dim() == 0 and node.op != "placeholder"


def _share_memory(nodes: Sequence[fx.Node]) -> bool:
    storages = [memory_of(example_of(node)) for node in nodes if isinstance(example_of(node), torch.Tensor)]
    return len(set(storages)) < len(storages)
