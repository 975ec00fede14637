"""ExportedProgram -> forward model (onnx_ir), with parameters and buffers as graph inputs."""

from __future__ import annotations

import ast
import re

import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnx_ir.passes import common
from torch.onnx._internal.exporter import _core

from lit_ort.compiler.autocast import mark_model
from lit_ort.compiler.capture import CapturedGraph
from lit_ort.compiler.marks import move_marks
from lit_ort.compiler.quiet import quiet_exporter
from lit_ort.compiler.translations import OPSET, onnx_registry
from lit_ort.errors import ConvertError

IR_VERSION = 10
FOLDED_ELEMENTS = 1024


def convert(captured: CapturedGraph) -> ir.Model:
    """Translates a captured graph to ONNX, one operator at a time.

    Returns:
        A model whose inputs carry `captured.signature.input_names`, every node named, constants folded. Equal operators
        are not merged: two dropouts on one input are two draws.

    Raises:
        ConvertError: an operator without an ONNX translation.
    """
    try:
        with quiet_exporter():
            # What torch.onnx.export calls, which would build the registry anew: half a second.
            exported = _core.export(
                captured.program,
                registry=onnx_registry(),
                optimize=False,
                verbose=False,
                opset_version=OPSET,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise _untranslated(error) from error
    model = exported.model
    _name_inputs(model, captured.signature.input_names)
    simplify(model)
    move_marks(model)
    mark_model(model, captured.signature.precisions)
    model.ir_version = IR_VERSION
    return model


def simplify(model: ir.Model) -> None:
    """Inlines functions, folds small constants, drops what nobody reads and names every node.

    Unnamed nodes would break ONNX Runtime's GatherSliceToSplitFusion, which makes two of one name; and its
    GemmTransposeFusion takes any Transpose for one that swaps.
    """
    common.InlinePass()(model)
    _drop_idle_transposes(model.graph)
    onnxscript.optimizer.fold_constants(model, input_size_limit=FOLDED_ELEMENTS, output_size_limit=FOLDED_ELEMENTS**2)
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.IdentityEliminationPass(),
        common.ShapeInferencePass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
    name_nodes(model)


def _drop_idle_transposes(graph: ir.Graph) -> None:
    """Those that leave every axis where it is."""
    for node in graph:
        order = node.attributes.get_ints("perm", ()) if node.op_type == "Transpose" else ()
        if order and list(order) == sorted(order):
            node.op_type = "Identity"
            node.attributes.clear()


def name_nodes(model: ir.Model) -> None:
    """Gives every node a name of its own."""
    taken: set[str] = set()
    for position, node in enumerate(model.graph):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{position}"
        taken.add(node.name)


def module_of(node: ir.Node) -> str | None:
    """The module path that an ONNX node came from, such as `self.encoder.layers.0`, where the exporter kept it."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    if not scopes:
        return None
    paths = [path for path in ast.literal_eval(scopes)[:-1] if path]
    return re.sub(r"[A-Z]\['([^']+)'\]", r"\1", paths[-1]) if paths else None


def line_of(node: ir.Node) -> str | None:
    """The innermost source line that an ONNX node came from, as `file:line`."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
    return ":".join(places[-1]) if places else None


def place_of(node: ir.Node) -> str | None:
    """Module path and source line of a node, as far as they are known."""
    return ", ".join(part for part in (module_of(node), line_of(node)) if part) or None


def _name_inputs(model: ir.Model, names: tuple[str, ...]) -> None:
    assert len(model.graph.inputs) == len(names), "one ONNX input for every tensor input of the captured graph"
    taken = {value.name for node in model.graph for value in node.outputs}
    clash = taken & set(names)
    for node in model.graph:
        for value in node.outputs:
            if value.name in clash:
                value.name = f"{value.name}__value"
    for value, name in zip(model.graph.inputs, names, strict=True):
        value.name = name


def _untranslated(error: BaseException) -> ConvertError:
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__
    text = "\n".join(chain)
    operator = re.search(r"target=torch\.ops\.([\w.]+)", text)
    place = re.findall(r'File "([^"]+)", line (\d+)', text)
    reason = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), type(error).__name__)
    return ConvertError(
        f"the graph has an operator without an ONNX form: {reason}",
        remedy="Write it with other operators, or keep it out of the step with torch.compiler.disable.",
        operator=operator[1] if operator else None,
        module=":".join(place[-1]) if place else None,
    )
