"""Replaces dropout by an operator whose mask is a function of the run's seed.

In:  `aten.dropout(x, p, train=True)`
Out: `lit_ort.dropout(x, seed, p, stream)`
Saves most of the time of torch's Bernoulli draws. A recomputed or repeated forward also drops the same elements.
"""

from __future__ import annotations

import torch

from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "dropout"


def fuse_dropout(graph: FusionGraph) -> PassReport:
    """Replaces dropout in a captured graph, in place."""
    fired, declined = 0, []
    for node in list(graph.graph.nodes):
        if node.target is not aten.dropout.default:
            continue
        x, probability, training = node.args
        if not training or probability == 0:
            continue
        if not isinstance(probability, (int, float)):
            declined.append(f"{node.name}: its probability {probability} is not a constant")
        elif not node.meta["val"].is_floating_point():
            declined.append(f"{node.name}: its dtype {node.meta['val'].dtype} is not a floating-point dtype")
        else:
            arguments = (x, graph.seed(), float(probability), graph.next_stream())
            graph.replace(node, torch.ops.lit_ort.dropout.default, arguments, element=0)
            fired += 1
    return PassReport(NAME, fired, tuple(declined))
