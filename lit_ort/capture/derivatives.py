"""Derivatives that a compiled graph does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_dynamo import DIFFERENTIABLE, INPUT, NODE, PART_IN_GRADIENT, WATCHED
from lit_ort._compat.torch_fx import ancestors_of, returned_by
from lit_ort.capture.locations import source_line
from lit_ort.errors import CaptureError

_REASONS = {
    INPUT: "torch.autograd.grad or backward(inputs=...) differentiates with respect to {}, which the graph computes, "
    "but a session has gradients of its inputs only",
    DIFFERENTIABLE: "the gradient of {} is differentiated again (create_graph=True), which that of a session can't be",
    WATCHED: "a hook or retain_grad() is set on {}, from which the graph computes other results, but a session has "
    "gradients of its inputs only",
    NODE: "the step reads the grad_fn of {}, and the operators of a session have no nodes in autograd's graph",
}


def refuse_derivatives(graph: fx.Graph) -> None:
    """Refuses a graph from which the program asks for derivatives that only eager has.

    Raises:
        CaptureError: the program wants the gradient of a value inside of the graph, or differentiates the graph's
            gradient again.
    """
    for node in graph.nodes:
        part = node.meta.get(PART_IN_GRADIENT)
        if part is not None and (part != WATCHED or node in inner_results(graph)):
            raise CaptureError(
                _REASONS[part].format(node.name),
                remedy="The rest of the step stays in ONNX Runtime.",
                module=source_line(node),
            )


def inner_results(graph: fx.Graph) -> set[fx.Node]:
    """The results with a gradient from which other results with one are computed."""
    tracked = {node for node in returned_by(graph) if _requires_grad(node) and node.op != "placeholder"}
    return tracked & ancestors_of(tracked)


def _requires_grad(node: Any) -> bool:
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(example, torch.Tensor) and example.requires_grad
