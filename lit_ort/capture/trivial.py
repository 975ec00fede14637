"""Graphs that compute nothing.

Dynamo also produces graphs of a single `detach` or view, for example after a graph break where a value is logged. A
session would take longer than the graph itself.
"""

from __future__ import annotations

from torch import fx

_VIEWS = frozenset({"detach", "view", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t"})


def computes(graph: fx.Graph) -> bool:
    """Whether a graph does more than detach and view its inputs."""
    calls = (node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output"))
    return any(node.op != "call_method" or node.target not in _VIEWS for node in calls)
