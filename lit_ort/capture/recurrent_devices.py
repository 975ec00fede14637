"""Recurrent layers on other devices than the CPU, for which lit_ort has no kernels."""

from __future__ import annotations

import torch
from torch import fx

from lit_ort.capture.locations import source_line
from lit_ort.errors import CaptureError

aten = torch.ops.aten
_LAYERS = frozenset({aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu})


def refuse_recurrent_layers(graph: fx.Graph, device: torch.device) -> None:
    """Refuses a graph with recurrent layers. Torch's kernels for them need buffers that a trace doesn't have.

    Raises:
        CaptureError: the graph has a recurrent layer.
    """
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _LAYERS:
            raise CaptureError(
                f"recurrent layers on {device} are not supported yet",
                remedy="The step runs in eager PyTorch. Train on the CPU to run it in a session.",
                operator=str(node.target),
                module=source_line(node),
            )
