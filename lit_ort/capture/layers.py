"""Marks the layers of a module for recomputation in the backward: modules in a list, such as `encoder.layers.3`.

The inputs of layers and the results of attention and of the output layer are saved; everything else in a layer is
computed again.

Source: Chen et al. 2016; the saved results follow selective recomputation, Korthikanti et al. 2022.
"""

from __future__ import annotations

import re

import torch
from torch import fx

from lit_ort._compat.torch_aot import is_marked, keep_saved, mark_recomputed
from lit_ort._compat.torch_fx import module_path
from lit_ort.ops import operator_of

_IN_A_LIST = re.compile(r"(?P<layer>.*?\.\d+)(?:\.|$)")
# Regions from this number on are layers; smaller numbers are the module's own checkpoints.
_FIRST_REGION = 10**6


def mark_layers(graph: fx.Graph) -> int:
    """Marks the nodes of each layer, except those in checkpoints, for recomputation. Returns the number of layers."""
    regions: dict[str, int] = {}
    for node in graph.nodes:
        match = _IN_A_LIST.match(module_path(node) or "")
        if node.op != "call_function" or match is None or is_marked(node):
            continue
        region = regions.setdefault(match["layer"], _FIRST_REGION + len(regions))
        if _is_saved(node):
            keep_saved(node, region)
        else:
            mark_recomputed(node, region)
    return len(regions)


def _is_saved(node: fx.Node) -> bool:
    operator = operator_of(node.target)
    is_own = operator is not None and not operator.recomputable and operator.target.namespace == "lit_ort"
    return is_own or node.target is torch.ops.aten.scaled_dot_product_attention.default
