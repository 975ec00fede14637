"""Where in the user's code a node comes from."""

from __future__ import annotations

import re

from torch import fx


def source_line(node: fx.Node) -> str | None:
    """The innermost source line of the user's code that made a node, as `file:line`."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    match = re.match(r'File "(?P<file>[^"]+)", line (?P<line>\d+)', places[-1]) if places else None
    return f"{match['file']}:{match['line']}" if match else None


def first_line(graph: fx.Graph) -> str | None:
    """The outermost source line of the first of a graph's nodes that has one, as `file:line`."""
    for node in graph.nodes:
        match = re.search(r'File "(?P<file>[^"]+)", line (?P<line>\d+)', node.meta.get("stack_trace") or "")
        if match:
            return f"{match['file']}:{match['line']}"
    return None
