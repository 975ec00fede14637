"""Prepares the programs of torch.export for torch's ONNX exporter."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default)


def prepare_for_onnx(program: ExportedProgram) -> None:
    """Works around, in place, two errors of torch 2.13's exporter when it decomposes a program.

    Size checks can lose their inputs. They are generated only for a program with example inputs, which are removed.

    The exporter assumes that a view is possible even if strides don't allow it. Each view is replaced by a view of a
    copy. ONNX has no strides, so the copy costs nothing.
    """
    program._example_inputs = None  # pyright: ignore[reportAttributeAccessIssue]
    graph = program.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _VIEWS:
            with graph.inserting_before(node):
                settings: dict[str, Any] = {"memory_format": torch.contiguous_format}
                copied = graph.call_function(_aten.clone.default, (node.args[0],), settings)
            copied.meta.update({key: value for key, value in node.meta.items() if key != "val"})
            copied.meta["val"] = node.args[0].meta["val"]
            node.replace_input_with(node.args[0], copied)
    program.graph_module.recompile()
