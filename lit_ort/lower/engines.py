"""Selects the engine of each operator: ONNX Runtime's kernel or torch's.

The kernels of the lowering table take about as long as torch's. The overhead of an ONNX node is 2 µs less than that of
a statement in a torch node. Passing values to the other engine and back takes 9 µs for small values, and 80 µs if both
engines use several threads (`python -m benchmarks.engines`). Therefore ONNX Runtime computes a run of consecutive
operators only if it is long enough to compensate for that.
"""

from __future__ import annotations

from torch import fx

from lit_ort._compat.torch_fx import is_element, is_size, is_view
from lit_ort.lower.operators import lowering_of
from lit_ort.passes.owners import memory_owner, overwritten

# The number of consecutive operators from which a run is faster in ONNX Runtime.
SHORTEST_RUN = 8


def onnx_nodes(graph: fx.Graph, shortest_run: int = SHORTEST_RUN) -> frozenset[fx.Node]:
    """The nodes that ONNX Runtime's kernels compute."""
    # ONNX Runtime can merge its own nodes or compute them once, so it computes no values that torch changes.
    changed = {memory_owner(node) for node in graph.nodes if overwritten(node) is not None}
    nodes: set[fx.Node] = set()
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or is_element(node) or is_size(node):
            continue
        lowering = lowering_of(node)
        if is_view(node):
            if lowering is not None and lowering.view:
                continue
        elif lowering is not None and node not in changed:
            run.append(node)
            continue
        # Operators of torch end a run. So do views that ONNX Runtime doesn't have, since it would need a copy of them.
        nodes.update(run if len(run) >= shortest_run else ())
        run = []
    nodes.update(run if len(run) >= shortest_run else ())
    return frozenset(nodes)
