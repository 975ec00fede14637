"""Derivatives that a compiled graph does not have."""

from __future__ import annotations

from torch import fx

from lit_ort._compat.torch_dynamo import INPUT, PART_IN_GRAD
from lit_ort.capture.locations import source_line
from lit_ort.errors import CaptureError


def refuse_derivatives(graph: fx.Graph) -> None:
    """Refuses a graph from which the program asks for derivatives that only eager has.

    Raises:
        CaptureError: the program differentiates with respect to a value that the graph computes, or differentiates the
            graph's gradient again.
    """
    for node in graph.nodes:
        if PART_IN_GRAD in node.meta:
            is_input = node.meta[PART_IN_GRAD] == INPUT
            raise CaptureError(
                f"torch.autograd.grad differentiates with respect to {node.name}, which the graph computes, but a "
                "session has gradients of its inputs only"
                if is_input
                else "its gradient is differentiated again (create_graph=True), which a session's gradient can't be",
                remedy="The rest of the step stays in ONNX Runtime.",
                module=source_line(node) if is_input else None,
            )
