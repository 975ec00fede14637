"""Locations of nodes in the user's code."""

from __future__ import annotations

import re

from torch import fx

_LOCATION = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def source_line(node: fx.Node) -> str | None:
    """The innermost line of the user's code that a node comes from, as `file:line`."""
    locations = _locations(node)
    return locations[-1] if locations else None


def first_line(graph: fx.Graph) -> str | None:
    """The outermost line of the user's code for the first node that has a location, as `file:line`."""
    return next((locations[0] for locations in map(_locations, graph.nodes) if locations), None)


def _locations(node: fx.Node) -> list[str]:
    """The lines of a node's stack trace, from the outermost call to the innermost."""
    return [f"{match['file']}:{match['line']}" for match in _LOCATION.finditer(node.meta.get("stack_trace") or "")]
