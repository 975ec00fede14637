"""Which of Dynamo's graphs have nothing to compute.

Dynamo makes a graph of a single `detach` or view as well, such as behind a graph break where a value is logged; a
session for it would cost more than it does.
"""

from __future__ import annotations

from torch import fx

_VIEWS = frozenset({"detach", "view", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t"})


def computes(graph: fx.Graph) -> bool:
    """Whether a graph does anything but detach and view its inputs."""
    calls = (node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output"))
    return any(node.op != "call_method" or node.target not in _VIEWS for node in calls)
