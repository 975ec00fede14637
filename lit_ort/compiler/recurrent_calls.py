"""Recurrent layers, each as one call of torch's own.

Apart from `recurrent`, which Dynamo's settings need in every process: calls bring the exporter with them, and a graph
from the cache runs without it.
"""

from __future__ import annotations

from torch import fx

from lit_ort.compiler.recurrent import LAYERS, results_of
from lit_ort.compiler.torch_calls import as_call

# Packed sequences have a tensor there.
HAS_BIASES = 3


def settle_recurrent(graph: fx.Graph) -> None:
    """Writes recurrent layers over padded sequences as calls."""
    for node in graph.nodes:
        target = LAYERS.get(node.target) if node.op == "call_function" else None
        if target is not None and len(node.args) > HAS_BIASES and isinstance(node.args[HAS_BIASES], bool):
            node.target = as_call(target, results_of)
