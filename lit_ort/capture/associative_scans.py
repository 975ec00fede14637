"""Makes associative scans calls of the function that torch computes them with, which is traced to its operators.

In:  nodes of the operator `associative_scan`, which call a separate graph: `combine_mode="pointwise"`, on GPUs
Out: a call of `generic_associative_scan` on the same graph
Needed for right gradients: those of the operator are wrong for a product that accumulates (torch 2.13, also in eager
PyTorch and with the backend "aot_eager").
"""

from __future__ import annotations

from torch import fx

from lit_ort._compat.torch_functorch import ASSOCIATIVE_SCAN, associative_scan_by_slices


def decompose_associative_scans(graph_module: fx.GraphModule) -> None:
    """Rewrites a graph of torch functions, and the graphs that it calls, in place."""
    for module in graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        scans = [node for node in module.graph.nodes if node.target is ASSOCIATIVE_SCAN]
        for node in scans:
            node.target = associative_scan_by_slices
        if scans:
            module.recompile()
