"""Graphs that compute nothing.

Dynamo also produces graphs of a single `detach`, copy or view, for example after a graph break where a value is logged,
and graphs of assertions. A session would take longer than the graph itself.
"""

from __future__ import annotations

from torch import fx

from lit_ort._compat.torch_fx import CHECKS, output_of

_COPIES_AND_VIEWS = frozenset(
    {"clone", "detach", "view", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t"}
)


def computes(graph: fx.Graph) -> bool:
    """Whether a graph does more than detach, copy, view and check its inputs."""
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    if not any(node in calls for node in output_of(graph).all_input_nodes):
        return any(not node.users and node.target not in CHECKS for node in calls)
    return any(node.op != "call_method" or node.target not in _COPIES_AND_VIEWS for node in calls)
