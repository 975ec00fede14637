"""Dynamo's FX graph -> ExportedProgram and StepSignature.

Dynamo lifts parameters and buffers to inputs of its graph, so nothing of them can be folded into a constant.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._export.verifier import SpecViolationError
from torch.export import Dim, ExportedProgram

from lit_ort.compiler.autocast import compute_in_float32, float32_of, settle_autocast
from lit_ort.compiler.batch_statistics import settle_statistics
from lit_ort.compiler.checkpoints import CHECKPOINT, mark_checkpoints
from lit_ort.compiler.constants import constant_results
from lit_ort.compiler.decompositions import decompose
from lit_ort.compiler.functions import settle_functions
from lit_ort.compiler.numbers import copy_graph, size_symbols
from lit_ort.compiler.quiet import ignore_torch_deprecation
from lit_ort.compiler.recurrent_calls import settle_recurrent
from lit_ort.compiler.signature import GraphOutput, StepSignature, tensors_of
from lit_ort.compiler.sizes import example_sizes, shape_environment
from lit_ort.compiler.stop_gradient import stop_gradient
from lit_ort.compiler.torch_calls import Target
from lit_ort.errors import CaptureError
from lit_ort.options import BF16_MIXED, FLOAT32

# torch.export documents no exception hierarchy of its own.
_EXPORT_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    NotImplementedError,
    AttributeError,
    KeyError,
    SpecViolationError,
)


@dataclasses.dataclass(frozen=True)
class CapturedGraph:
    """An exported graph.

    Args:
        program, signature: the graph and what goes in and out.
        sizes: one call's examples of the sizes that may change, by name.
    """

    program: ExportedProgram
    signature: StepSignature
    sizes: dict[str, int]


def capture(
    graph_module: fx.GraphModule,
    arguments: Sequence[Any],
    precision: str = FLOAT32,
    calls: frozenset[Target] = frozenset(),
    any_sizes: bool = False,
) -> CapturedGraph:
    """Exports an FX graph at the shapes of `arguments`, or for any sizes where Dynamo left them symbolic.

    Args:
        graph_module: what Dynamo hands to a backend; its parameters are placeholders.
        arguments: one call's inputs: tensors, and Python numbers where Dynamo kept a size or number symbolic.
        precision: of the nodes outside of the graph's own autocast regions.
        calls: operators that run as torch's own.
        any_sizes: leave symbolic sizes symbolic. `sizes.conditions_of` tells, when all is done, for which it is right.

    Raises:
        CaptureError: autocast to another type than bfloat16, a higher-order operator in the graph, or a graph that
            torch.export refuses.
    """
    graph = copy_graph(graph_module)
    functions = settle_functions(graph, graph_module)
    _refuse_higher_order(graph)
    mark_checkpoints(graph)
    precisions = settle_autocast(graph, precision)
    if BF16_MIXED in precisions:
        compute_in_float32(graph)
        arguments = [float32_of(argument) for argument in arguments]
    # Only sessions with gradients can't do without this.
    wants = any(_requires_grad(_example(node)) for node in next(reversed(graph.nodes)).all_input_nodes)
    constants = constant_results(graph, graph_module) if wants else {}
    outputs, results = _classify_outputs(graph, arguments, constants)
    _strip_grad_mode(graph, mark=any(results))
    dimensions = _symbolic_dimensions(graph) if any_sizes else None
    names = _bind_inputs(graph, arguments, any_sizes)
    settle_statistics(graph, any(results))
    settle_recurrent(graph)
    graph.lint()
    tensors = tensors_of(arguments)
    # As sessions take them: strides of their own would be sizes that change, too.
    detached = tuple(tensor.detach().contiguous() for tensor in tensors)
    program = _export(fx.GraphModule(graph_module, graph), detached, calls, dimensions)
    changed = _changed_inputs(program)
    if changed:
        _return_changes(graph, changed)
        program = _export(fx.GraphModule(graph_module, graph), detached, calls, dimensions)
    wants_gradient = tuple(k for k, tensor in enumerate(tensors) if tensor.requires_grad)
    signature = StepSignature(
        input_names=names,
        wants_gradient=wants_gradient if any(results) else (),
        outputs=outputs,
        result_differentiable=(*results, *(False for _ in changed)),
        changes=tuple((position, len(results) + k) for k, position in enumerate(changed)),
        precisions=precisions,
        functions=functions,
    )
    return CapturedGraph(program, signature, example_sizes(program, tensors) if any_sizes else {})


def source_line(node: fx.Node) -> str | None:
    """The innermost source line of the user's code that made a node."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [k for k, line in enumerate(lines) if line.startswith("File ")]
    if not places:
        return None
    match = re.match(r'File "(?P<file>[^"]+)", line (?P<line>\d+)', lines[places[-1]])
    return f"{match['file']}:{match['line']}" if match else None


def _refuse_higher_order(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is CHECKPOINT:
            raise CaptureError(
                "the graph has a checkpoint with a context_fn, which decides by torch's operators what is kept",
                remedy="Leave context_fn out: attention's results and dropout's masks are kept in any case.",
                operator=str(node.target),
                module=source_line(node),
            )
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"the graph has the higher-order operator {node.target}, which has no ONNX form here",
                remedy="Run this part in eager with torch.compiler.disable, or without it.",
                operator=str(node.target),
                module=source_line(node),
            )


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _strip_grad_mode(graph: fx.Graph, mark: bool) -> None:
    """Drops the switches of grad mode, which an export would turn into subgraphs.

    With `mark`, first puts a marker wherever eager autograd stops: `detach`, `no_grad` regions, and anything else whose
    float result needs no gradient though an input does.
    """
    for node in list(graph.nodes) if mark else []:
        value = _example(node)
        stops = (
            node.op in ("call_function", "call_method", "call_module")
            and isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and not value.requires_grad
            and any(_requires_grad(_example(argument)) for argument in node.all_input_nodes)
        )
        if stops:
            with graph.inserting_after(node):
                marker = graph.call_function(stop_gradient, (node,))
            marker.meta = dict(node.meta)
            node.replace_all_uses_with(marker, delete_user_cb=lambda user, marker=marker: user is not marker)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (torch._C._set_grad_enabled, torch.set_grad_enabled):
            graph.erase_node(node)


def _classify_outputs(
    graph: fx.Graph, arguments: Sequence[Any], constants: Mapping[fx.Node, torch.Tensor]
) -> tuple[tuple[GraphOutput, ...], tuple[bool, ...]]:
    """Leaves only computed tensors as outputs of `graph`; what is handed through or constant is remembered instead."""
    output = next(node for node in graph.nodes if node.op == "output")
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    returned = output.args[0]
    assert isinstance(returned, (tuple, list)), "Dynamo graphs return a tuple"
    outputs: list[GraphOutput] = []
    results: list[fx.Node] = []
    for value in returned:
        if not isinstance(value, fx.Node):
            outputs.append(GraphOutput("constant", value))
        elif value in constants:
            outputs.append(GraphOutput("constant", constants[value]))
        elif value.op == "placeholder":
            position = placeholders.index(value)
            is_tensor = isinstance(arguments[position], torch.Tensor)
            before = len(tensors_of(arguments[:position]))
            outputs.append(GraphOutput("input", before) if is_tensor else GraphOutput("constant", arguments[position]))
        elif not isinstance(_example(value), torch.Tensor):
            raise CaptureError(
                f"the graph returns {value.name}, a Python number computed from its inputs",
                remedy="Return a tensor, or compute the number outside of the compiled step.",
                operator=str(value.target),
                module=source_line(value),
            )
        else:
            if value not in results:
                results.append(value)
            example = _example(value)
            dtype = torch.bfloat16 if example.dtype == torch.bfloat16 else None
            outputs.append(GraphOutput("result", results.index(value), _requires_grad(example), dtype))
    output.args = (tuple(results),)
    return tuple(outputs), tuple(_requires_grad(_example(node)) for node in results)


def _symbolic_dimensions(graph: fx.Graph) -> tuple[dict[int, Any] | None, ...]:
    """For each tensor input, which of its dimensions Dynamo left symbolic, as torch.export wants it."""
    values = (_example(node) for node in graph.nodes if node.op == "placeholder")
    shapes = (value.shape for value in values if isinstance(value, torch.Tensor))
    found = ([k for k, size in enumerate(shape) if isinstance(size, torch.SymInt)] for shape in shapes)
    return tuple({k: Dim.DYNAMIC for k in symbolic} or None for symbolic in found)


def _read_sizes(graph: fx.Graph) -> None:
    """Lets the graph read the sizes that it is given as numbers from the tensors that have them."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    places = size_symbols(placeholders)
    for node in placeholders:
        place = None if isinstance(_example(node), torch.Tensor) else places.get(str(_example(node)))
        if place is not None and node.users:
            with graph.inserting_after(placeholders[-1]):
                size = graph.call_function(torch.ops.aten.sym_size.int, place)
            size.meta["example_value"] = _example(node)
            node.replace_all_uses_with(size)


def _bind_inputs(graph: fx.Graph, arguments: Sequence[Any], any_sizes: bool) -> tuple[str, ...]:
    """Writes Python numbers into the graph as constants and names the tensors that stay."""
    if any_sizes:
        _read_sizes(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(arguments)
    names: list[str] = []
    for position, (node, argument) in enumerate(zip(placeholders, arguments, strict=True)):
        if isinstance(argument, torch.Tensor):
            name = readable_name(str(node.target))
            names.append(name if name not in names else f"{name}__{position}")
            continue
        for user in list(node.users):
            user.args = fx.map_arg(user.args, lambda n, node=node, argument=argument: argument if n is node else n)
            user.kwargs = fx.map_arg(user.kwargs, lambda n, node=node, argument=argument: argument if n is node else n)
        graph.erase_node(node)
    return tuple(names)


def readable_name(placeholder: str) -> str:
    """`L_self_modules_encoder_modules_layers_modules_0_parameters_weight_` -> `encoder.layers.0.weight`."""
    match = re.fullmatch(r"[LGlg]_\w*?_?(?P<path>(?:modules|parameters|buffers)_\w+?)_*", placeholder)
    if not match:
        return re.sub(r"^[LGlg]_|_+$", "", placeholder) or placeholder
    return re.sub(r"(?:^|_)(?:modules|parameters|buffers)_", ".", match["path"]).lstrip(".")


def _export(
    graph_module: fx.GraphModule,
    tensors: tuple[torch.Tensor, ...],
    calls: frozenset[Target],
    dimensions: tuple[dict[int, Any] | None, ...] | None,
) -> ExportedProgram:
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            ignore_torch_deprecation()
            program = torch.export.export(graph_module, tensors, dynamic_shapes=dimensions, strict=False)
            environment = shape_environment(program)
            if environment is not None:
                # What decompositions decide by the examples has to be known, too.
                environment.frozen = False
            return decompose(program, calls)
    except _EXPORT_ERRORS as error:
        raise CaptureError(
            f"torch.export refused the graph: {_first_line(error)}",
            remedy="Reduce the step to this operation and run it under torch.export to see the whole reason.",
        ) from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _changed_inputs(program: ExportedProgram) -> list[int]:
    """Positions of the inputs that the graph changes in place."""
    inputs = list(program.graph_signature.user_inputs)
    return [inputs.index(name) for name in program.graph_signature.user_inputs_to_mutate.values()]


def _return_changes(graph: fx.Graph, positions: Sequence[int]) -> None:
    """Lets the graph change copies of these inputs and return them, after its own results."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    copies = []
    with graph.inserting_after(placeholders[-1]):
        for position in positions:
            copy = graph.call_method("clone", (placeholders[position],))
            placeholders[position].replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
            copies.append(copy)
    returned = output.args[0]
    assert isinstance(returned, tuple)
    output.args = ((*returned, *copies),)
