"""What is said of single nodes on their way from an FX graph to the training model.

A node's stack trace is what reaches the ONNX model from an FX graph, so it carries the marks there.
"""

from __future__ import annotations

import onnx_ir as ir
from torch import fx

# A node's mark is kept in its ONNX metadata under this and its name.
PREFIX = "lit_ort."
# The mark of what a checkpoint or a layer may compute again.
REGION = "region"
_SEPARATOR = "\nlit_ort "
_STACK_TRACE = "pkg.torch.onnx.stack_trace"


def mark(node: fx.Node, name: str, value: str) -> None:
    """Marks an FX node; `value` has no line break."""
    node.meta["stack_trace"] = f"{node.meta.get('stack_trace') or ''}{_SEPARATOR}{name} {value}"


def move_marks(model: ir.Model) -> None:
    """Moves the marks of a freshly translated model to where passes look for them."""
    for node in model.graph:
        trace, *marks = node.metadata_props.get(_STACK_TRACE, "").split(_SEPARATOR)
        if marks:
            node.metadata_props[_STACK_TRACE] = trace
        for text in marks:
            # A function of several FX nodes keeps the marks of all; they are equal, as they share a line.
            name, _, rest = text.partition(" ")
            node.metadata_props[PREFIX + name] = rest.partition("\n")[0]


def copy_marks(source: ir.Node, *targets: ir.Node) -> None:
    """Gives nodes that take another one's place what was said of it."""
    for target in targets:
        target.metadata_props.update(source.metadata_props)
