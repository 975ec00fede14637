"""Recurrent layers, which have kernels of the project's own on the CPU alone."""

from __future__ import annotations

import torch
from torch import fx

from lit_ort.capture.places import source_line
from lit_ort.errors import CaptureError

aten = torch.ops.aten
_LAYERS = frozenset({aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu})


def refuse_recurrent_layers(graph: fx.Graph, device: torch.device) -> None:
    """Refuses a graph with recurrent layers: torch's own are one operator there, with buffers that no trace has.

    Raises:
        CaptureError: it has one.
    """
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _LAYERS:
            raise CaptureError(
                f"recurrent layers on {device} are not built yet",
                remedy="The step runs in eager; train on the CPU to have it in a session.",
                operator=str(node.target),
                module=source_line(node),
            )
