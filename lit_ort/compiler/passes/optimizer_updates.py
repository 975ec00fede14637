"""Hands each parameter's gradient to the optimizer inside the run.

In:  an output `w_grad` of an input `w`
Out: `ATen(gradient, w, awaited.., operator="lit_ort::hand_over") -> w_grad`, `awaited` what else is computed from `w`
Saves the memory of gradients, which else are all held at the end of a run.
"""

from __future__ import annotations

import onnx_ir as ir

from lit_ort.compiler.kernel_nodes import kernel_node
from lit_ort.compiler.passes.base import GraphPass
from lit_ort.inspect import PassReport
from lit_ort.runtime.updates import HAND_OVER

GRADIENT = "_grad"


class OptimizerUpdates(GraphPass):
    name = "optimizer_updates"
    # The option that asks for it turns it off.
    required = True

    def apply(self, model: ir.Model) -> PassReport:
        inputs = {f"{value.name}{GRADIENT}": value for value in model.graph.inputs}
        ancestors = _Ancestors(model.graph)
        fired, declined = 0, []
        for position, output in enumerate(model.graph.outputs):
            parameter, producer = inputs.get(str(output.name)), output.producer()
            if parameter is not None and producer is not None:
                awaited = [value for node, value in _readers(parameter) if not ancestors.among(node, producer)]
                _hand_over(model.graph, position, parameter, awaited)
                fired += 1
            elif parameter is not None:
                declined.append(f"{output.name} is not computed")
        return PassReport(self.name, fired, tuple(declined))


def _hand_over(graph: ir.Graph, position: int, parameter: ir.Value, awaited: list[ir.Value]) -> None:
    gradient = graph.outputs[position]
    # Its result is the gradient or nothing, so it has no shape to state.
    result = ((gradient.dtype or ir.DataType.FLOAT, None),)
    node = kernel_node(HAND_OVER, [gradient, parameter, *awaited], result, f"{gradient.name}/{HAND_OVER}")
    graph.outputs[position] = node.outputs[0]
    node.outputs[0].name, gradient.name = gradient.name, f"{gradient.name}__made"
    graph.append(node)


def _readers(parameter: ir.Value) -> list[tuple[ir.Node, ir.Value]]:
    """The nodes that read a value, each with a result that says that it has been read.

    ONNX Runtime may join a node that only rearranges or scales a value with those behind it, which then read the value
    itself, so they are readers too.
    """
    found = []
    for node in {use.node: None for use in parameter.uses()}:
        found.append((node, node.outputs[0]))
        if all(value is parameter or value is None or _is_constant(value) for value in node.inputs):
            for value in node.outputs:
                found.extend(_readers(value))
    return found


def _is_constant(value: ir.Value) -> bool:
    return ir.convenience.get_const_tensor(value) is not None


class _Ancestors:
    """What each node of a graph needs, as one bit a node."""

    def __init__(self, graph: ir.Graph) -> None:
        graph.sort()
        self._bits: dict[ir.Node, int] = {}
        for k, node in enumerate(graph):
            bits = 1 << k
            for value in node.inputs:
                producer = None if value is None else value.producer()
                bits |= 0 if producer is None else self._bits[producer]
            self._bits[node] = bits

    def among(self, node: ir.Node, later: ir.Node) -> bool:
        """Whether `later` is or needs `node`."""
        own = self._bits[node]
        return self._bits[later] | own == self._bits[later]
