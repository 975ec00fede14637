"""Numbers the operators that draw random numbers, so that each has a stream of its own in every run of its graph.

In:  operators of torch's that draw from its generator
Out: the same, each marked with the number of its stream; a copy that the backward computes again draws the same numbers
"""

from __future__ import annotations

from torch import fx

from lit_ort._compat.torch_ops import draws

STREAM = "lit_ort_stream"


def number_streams(module: fx.GraphModule) -> bool:
    """Marks the nodes of a joint graph; returns whether any draws."""
    count = 0
    for node in module.graph.nodes:
        if draws(node):
            node.meta[STREAM] = count
            count += 1
    return count > 0
