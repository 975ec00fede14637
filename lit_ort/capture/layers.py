"""Layers whose values the backward computes again: modules in a list, such as `encoder.layers.3`.

Their inputs and the results of attention and of the output layer are kept.

Source: Chen et al. 2016; what is kept, as in selective recomputation, Korthikanti et al. 2022.
"""

from __future__ import annotations

import re

import torch
from torch import fx

from lit_ort._compat.torch_aot import is_marked, keep_saved, mark_recomputed
from lit_ort._compat.torch_fx import module_path
from lit_ort.ops import operator_of

_IN_A_LIST = re.compile(r"(?P<layer>.*?\.\d+)(?:\.|$)")


# Numbers of regions from here on are layers; those of the module's own checkpoints are below.
_FIRST_REGION = 10**6


def mark_layers(graph: fx.Graph) -> int:
    """Marks the nodes of each layer, outside of checkpoints, to be computed again; returns the number of layers."""
    regions: dict[str, int] = {}
    for node in graph.nodes:
        found = _IN_A_LIST.match(module_path(node) or "")
        if node.op != "call_function" or found is None or is_marked(node):
            continue
        region = regions.setdefault(found["layer"], _FIRST_REGION + len(regions))
        if _is_kept(node):
            keep_saved(node, region)
        else:
            mark_recomputed(node, region)
    return len(regions)


def _is_kept(node: fx.Node) -> bool:
    own = operator_of(node.target)
    kept = own is not None and not own.recomputable and own.target.namespace == "lit_ort"
    return kept or node.target is torch.ops.aten.scaled_dot_product_attention.default
