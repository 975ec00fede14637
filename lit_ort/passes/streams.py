"""Numbers the operators that draw from torch's generator.

In:  torch operators that draw from torch's generator
Out: the same operators, marked with the number of their stream, which a recomputed copy in the backward shares
A run remembers the generator's state by the stream, so that a recomputed copy draws the same numbers.
"""

from __future__ import annotations

from torch import fx

from lit_ort._compat.torch_ops import draws
from lit_ort.runtime.random import WITHOUT_DROPOUT

STREAM = "lit_ort_stream"


def number_streams(module: fx.GraphModule) -> bool:
    """Marks the nodes of a joint graph. Returns whether any of them is a dropout, whose numbers depend on a seed."""
    count, seeded = 0, False
    for node in module.graph.nodes:
        if draws(node):
            node.meta[STREAM] = count
            count += 1
            seeded |= node.target in WITHOUT_DROPOUT
    return seeded
