"""Writes the matmuls of experts, and their gradients, as operators that write each value once.

In:  `grouped_mm_fallback(input, weight, ends)` and its `grouped_mm_fallback_backward` of transformers
Out: `grouped_matmul(input, weight, ends, transposed)`, which reads transposed weights as they are stored, and
     `grouped_matmul_gradient`
Saves zeros that are overwritten, and gradients that nothing reads; native sessions compute these operators. A step of
     the benchmark's Mixtral takes 214 ms for 250 (eager 268; AMD EPYC, family 25, model 1)
"""

from __future__ import annotations

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, untransposed
from lit_ort.passes.node_builder import NodeBuilder, replace_elements, replace_nodes

aten = torch.ops.aten
# By their names: there are none before transformers is imported.
_FORWARD = "transformers.grouped_mm_fallback.default"
_BACKWARD = "transformers.grouped_mm_fallback_backward.default"
_MATMUL, _GRADIENT = torch.ops.lit_ort.grouped_matmul.default, torch.ops.lit_ort.grouped_matmul_gradient.default


def multiply_groups(module: fx.GraphModule) -> int:
    """Rewrites matmuls of groups in a graph, in place. Returns their number."""
    fired = replace_nodes(module, lambda node: str(node.target) == _FORWARD, _forward)
    return fired + replace_elements(module, lambda node: str(node.target) == _BACKWARD, _gradient)


def _forward(builder: NodeBuilder, node: fx.Node) -> fx.Node:
    rows, weight, ends = arguments_of(node)
    stored, is_transposed = untransposed(weight)
    return builder(_MATMUL, rows, stored, ends, is_transposed)


def _gradient(builder: NodeBuilder, node: fx.Node, number: int, value: torch.Tensor) -> fx.Node:
    """A gradient that a node returns: of the rows or of the weight."""
    rows, weight, ends, grad = arguments_of(node)
    stored, is_transposed = untransposed(weight)
    if number == 0:
        return builder(_MATMUL, grad, stored, ends, not is_transposed)
    if not is_transposed:
        return builder(_GRADIENT, rows, grad, ends)
    return builder(aten.transpose.int, builder(_GRADIENT, grad, rows, ends), 1, 2)
