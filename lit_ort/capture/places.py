"""Where in the user's code a node comes from."""

from __future__ import annotations

import re

from torch import fx

_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def source_line(node: fx.Node) -> str | None:
    """The innermost source line of the user's code that made a node, as `file:line`."""
    places = _places(node)
    return places[-1] if places else None


def first_line(graph: fx.Graph) -> str | None:
    """The outermost source line of the first of a graph's nodes that has one, as `file:line`."""
    return next((places[0] for places in map(_places, graph.nodes) if places), None)


def _places(node: fx.Node) -> list[str]:
    """The source lines that a node was made in, from the outermost call to the innermost."""
    return [f"{match['file']}:{match['line']}" for match in _PLACE.finditer(node.meta.get("stack_trace") or "")]
