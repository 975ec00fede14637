"""Assigns a separate random stream to each operator that draws random numbers.

In:  torch operators that draw from torch's generator
Out: the same operators, marked with the number of their stream, which a recomputed copy in the backward shares
The seed of a run and the stream determine the random numbers, so a recomputed copy draws the same ones.
"""

from __future__ import annotations

from torch import fx

from lit_ort._compat.torch_ops import draws

STREAM = "lit_ort_stream"


def number_streams(module: fx.GraphModule) -> bool:
    """Marks the nodes of a joint graph. Returns whether any of them draws random numbers."""
    count = 0
    for node in module.graph.nodes:
        if draws(node):
            node.meta[STREAM] = count
            count += 1
    return count > 0
