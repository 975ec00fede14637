"""Prepares the programs of torch.export for torch's ONNX exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.export import ExportedProgram

from lit_ort._compat.patching import removed_entry, replaced_entry
from lit_ort._compat.recurrent import results_of, shapes_without_steps

_aten = torch.ops.aten
# The recurrent layers that ONNX has, in the form of ATen's operators.
_WHOLE_LAYERS = (_aten.lstm.input, _aten.gru.input)
_VIEWS = (_aten.view.default, _aten.reshape.default)


@contextmanager
def layers_of_any_length() -> Iterator[None]:
    """Makes torch.export and its ONNX exporter compute the shapes of LSTMs and GRUs without tracing each time step.

    That would fix the length of their inputs. The layers are kept whole, and exported as ONNX's operators.
    """
    with shapes_without_steps(), ExitStack() as stack:
        for target in _WHOLE_LAYERS:
            stack.enter_context(removed_entry(target.py_kernels, torch._C.DispatchKey.Autograd))
            stack.enter_context(replaced_entry(target.py_kernels, torch._C.DispatchKey.Meta, results_of))
            stack.enter_context(replaced_entry(decomposition_table, target, results_of))
            stack.callback(target._dispatch_cache.clear)
            target._dispatch_cache.clear()
        yield


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
