"""torch.export's programs, made ready for torch's ONNX exporter."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default)


def prepare_for_onnx(program: ExportedProgram) -> None:
    """Takes out, in place, two things on which torch 2.13's exporter fails when it decomposes a program.

    Checks of sizes, which lose their inputs where there are many: they are made only of a program with example inputs.
    And views, which the exporter takes for possible where strides forbid them: each views a copy. A copy is nothing in
    ONNX.
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
