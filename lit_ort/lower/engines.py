"""Which engine computes each operator: ONNX Runtime's kernel or torch's.

The kernels of the lowering table take about as long as torch's. An ONNX node costs 2 µs less than a statement of a
torch node, and handing values to the other engine and back 9 µs for small values, 80 µs where both use several threads
(`python -m benchmarks.engines`). So ONNX Runtime computes runs of operators that are long enough to pay for both
borders.
"""

from __future__ import annotations

from torch import fx

from lit_ort._compat.torch_fx import is_element, is_size, is_view
from lit_ort.lower.operators import lowering_of

# Consecutive operators from which a run pays for its borders.
SHORTEST_RUN = 8


def onnx_nodes(graph: fx.Graph, shortest_run: int = SHORTEST_RUN) -> frozenset[fx.Node]:
    """The nodes that run as ONNX Runtime's own."""
    chosen: set[fx.Node] = set()
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or is_element(node) or is_size(node):
            continue
        lowering = lowering_of(node)
        if is_view(node):
            if lowering is not None and lowering.view:
                continue
        elif lowering is not None:
            run.append(node)
            continue
        # Of a view that ONNX Runtime doesn't have, it would take a copy.
        chosen.update(run if len(run) >= shortest_run else ())
        run = []
    chosen.update(run if len(run) >= shortest_run else ())
    return frozenset(chosen)
