"""Which ONNX operators, with which attributes, may go through ONNX Runtime's gradient builder.

The builder can succeed and be wrong, so this is a list of what was proven right against eager (`tests/test_support.py`
walks it), not of what the builder accepts. Only nodes on the way of a gradient are looked at: those between an input
that wants a gradient and an output that has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from lit_ort.compiler.convert import place_of
from lit_ort.compiler.kernel_nodes import kernel_of, operator_of
from lit_ort.compiler.kernels import KERNELS, torch_call
from lit_ort.compiler.signature import StepSignature
from lit_ort.compiler.sizes import sizes_of
from lit_ort.compiler.stop_gradient import STOP_GRADIENT
from lit_ort.compiler.torch_calls import target_of
from lit_ort.errors import GradientError
from lit_ort.runtime.random import RANDOM_OPERATORS

# Says why a node is not proven, or nothing.
Check = Callable[[ir.Node, frozenset[int]], "str | None"]

FLOATS = (ir.DataType.FLOAT,)


def _always(node: ir.Node, differentiable: frozenset[int]) -> str | None:
    return None


def _only_input(*allowed: int) -> Check:
    """The gradient is proven for these inputs only."""

    def check(node: ir.Node, differentiable: frozenset[int]) -> str | None:
        beyond = sorted(differentiable - set(allowed))
        return f"its gradient is proven for input {allowed[0]}, and input {beyond[0]} wants one" if beyond else None

    check.__doc__ = f"for input {', '.join(map(str, allowed))}"
    return check


def _same_shapes(*positions: int) -> Check:
    """The builder forgets broadcasting here: gradients are right for inputs of the output's own shape."""

    def check(node: ir.Node, differentiable: frozenset[int]) -> str | None:
        for position in sorted(differentiable & set(positions)):
            value = node.inputs[position]
            assert value is not None
            sizes = sizes_of(value)
            if sizes is None or sizes != sizes_of(node.outputs[0]):
                return f"input {position} of shape {value.shape} is broadcast to {node.outputs[0].shape}"
        return None

    check.__doc__ = "for inputs that are not broadcast"
    return check


def _matrices(node: ir.Node, differentiable: frozenset[int]) -> str | None:
    """For matrices, not vectors."""
    for position, value in enumerate(node.inputs):
        if value is None or value.shape is None or len(value.shape) < 2:
            return f"input {position} has fewer than two dimensions, and vectors are not proven"
    return None


def _exact(node: ir.Node, differentiable: frozenset[int]) -> str | None:
    """In its exact form, not the one by tanh."""
    approximate = node.attributes.get_string("approximate", "none")
    return f"approximate={approximate!r} gets gradients with an error of 4e-4" if approximate != "none" else None


def _every_output_read(node: ir.Node, differentiable: frozenset[int]) -> str | None:
    """Where every part is read."""
    if differentiable != {0}:
        return "its gradient is proven for input 0 only"
    unread = [k for k, value in enumerate(node.outputs) if not value.uses() and not value.is_graph_output()]
    return f"output {unread[0]} is not read, and the gradient needs every part" if unread else None


def _between_floats(node: ir.Node, differentiable: frozenset[int]) -> str | None:
    """Between float32 and float64."""
    before, after = node.inputs[0], node.outputs[0]
    wide = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    types = [value.dtype for value in (before, after) if value is not None]
    return None if all(dtype in wide for dtype in types) else f"it casts between {types[0]} and {types[-1]}"


def _normalises(node: ir.Node, differentiable: frozenset[int]) -> str | None:
    """With a bias, over more than one element."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return "it has no bias, and the builder needs one"
    sizes = sizes_of(node.inputs[0])
    if sizes is None or math.prod(sizes[node.attributes.get_int("axis", -1) :]) < 2:
        return "it normalises one element, which its gradient refuses in a run"
    return None


def _forwards(node: ir.Node, differentiable: frozenset[int]) -> str | None:
    """For input 0, where it goes forwards."""
    steps = node.inputs[4] if len(node.inputs) > 4 else None
    known = None if steps is None else ir.convenience.get_const_tensor(steps)
    backwards = steps is not None and (known is None or bool((known.numpy() < 0).any()))
    return "it goes backwards" if backwards else _only_input(0)(node, differentiable)


def _plain_scatter(node: ir.Node, differentiable: frozenset[int]) -> str | None:
    """Without reduction."""
    reduction = node.attributes.get_string("reduction", "none")
    return f"reduction={reduction!r} gets wrong gradients" if reduction != "none" else None


SUPPORTED: dict[str, Check] = {
    "Add": _always,
    "Sub": _always,
    "Mul": _always,
    "Div": _always,
    "Neg": _always,
    "Abs": _always,
    "Exp": _always,
    "Log": _always,
    "Pow": _only_input(0),
    "Reciprocal": _always,
    "Erf": _always,
    "Sin": _always,
    "Cos": _always,
    "Tanh": _always,
    "Sigmoid": _always,
    "Relu": _always,
    "LeakyRelu": _always,
    "Gelu": _exact,
    "Identity": _always,
    "MatMul": _matrices,
    "Gemm": _always,
    "Reshape": _only_input(0),
    "Transpose": _always,
    "Squeeze": _only_input(0),
    "Unsqueeze": _only_input(0),
    "Flatten": _always,
    "Expand": _only_input(0),
    "Slice": _forwards,
    "Tile": _only_input(0),
    "Split": _every_output_read,
    "Concat": _always,
    "Gather": _only_input(0),
    "GatherElements": _only_input(0),
    "GatherND": _only_input(0),
    "ScatterElements": _plain_scatter,
    "Where": _same_shapes(1, 2),
    "ReduceSum": _only_input(0),
    "ReduceMean": _only_input(0),
    "Softmax": _always,
    "LogSoftmax": _always,
    "LayerNormalization": _normalises,
    "Dropout": _only_input(0),
    "SoftmaxCrossEntropyLoss": _only_input(0),
    "Cast": _between_floats,
}


def require_support(model: ir.Model, signature: StepSignature) -> None:
    """Walks every node on the way of a gradient.

    Raises:
        GradientError: names the first node that is not proven, where it came from and why.
    """
    for node, reason in unproven(model, signature):
        raise GradientError(
            f"the gradient of ONNX operator {node.op_type} is not proven right: {reason}",
            remedy="This graph can run in eager (fallback='warn'); writing it with proven operators keeps it in ORT.",
            operator=f"{node.op_type} ({target_of(node) or 'no torch operator known'})",
            module=place_of(node),
        )


def unproven(model: ir.Model, signature: StepSignature) -> Iterator[tuple[ir.Node, str]]:
    """The nodes on the way of a gradient whose gradient is not proven right, each with the reason."""
    path = gradient_path(model, signature)
    for node in model.graph:
        if is_stop_gradient(node) or not any(value in path for value in node.outputs):
            continue
        differentiable = frozenset(k for k, value in enumerate(node.inputs) if value in path)
        reason = _reason_against(node, differentiable) if differentiable else None
        if reason is not None:
            yield node, reason


def require_independent_draws(model: ir.Model) -> None:
    """Refuses a graph with several operators of ONNX Runtime's that draw: their draws in one run depend on each other.

    Raises:
        GradientError: names the second of them.
    """
    drawing = [node for node in model.graph if node.op_type in RANDOM_OPERATORS and not node.domain]
    if len(drawing) > 1:
        node = drawing[1]
        raise GradientError(
            f"the graph draws random numbers in {len(drawing)} places, and ONNX Runtime's draws of one run depend on "
            "each other",
            remedy="Draw them outside of the compiled step and hand them in, or all at once; dropout is not concerned.",
            operator=f"{node.op_type} ({target_of(node) or 'no torch operator known'})",
            module=place_of(node),
        )


def gradient_path(model: ir.Model, signature: StepSignature) -> set[ir.Value]:
    """The float values that lie between an input that wants a gradient and a result that has one."""
    reachable = _depends_on(model, (model.graph.inputs[position] for position in signature.wants_gradient))
    results = zip(model.graph.outputs, signature.result_differentiable, strict=True)
    path = {value for value, differentiable in results if differentiable and value in reachable}
    for node in reversed(model.graph):
        if not is_stop_gradient(node) and any(value in path for value in node.outputs):
            path.update(value for value in node.inputs if value is not None and value in reachable)
    return path


def gradient_names(model: ir.Model, signature: StepSignature) -> tuple[str, ...]:
    """Names of the inputs that want a gradient and get one; no gradient reaches the others, as in eager."""
    path = gradient_path(model, signature)
    inputs = (model.graph.inputs[position] for position in signature.wants_gradient)
    return tuple(str(value.name) for value in inputs if value in path)


def is_stop_gradient(node: ir.Node) -> bool:
    return operator_of(node) == STOP_GRADIENT


def _reason_against(node: ir.Node, differentiable: frozenset[int]) -> str | None:
    if kernel_of(node) == torch_call.NAME:
        # Its gradient is autograd's, in any type.
        return None
    check = _check_of(node)
    if check is None:
        return "it is not on the list of proven operators"
    return check(node, differentiable) or _unproven_type(node, differentiable)


def _check_of(node: ir.Node) -> Check | None:
    if node.domain == "":
        return SUPPORTED.get(node.op_type)
    kernel = KERNELS.get(kernel_of(node) or "")
    return _only_input(*kernel.differentiable) if kernel is not None and kernel.differentiable else None


def _unproven_type(node: ir.Node, differentiable: frozenset[int]) -> str | None:
    if node.op_type == "Cast":
        return None
    for position in sorted(differentiable):
        value = node.inputs[position]
        assert value is not None
        if value.dtype is not None and value.dtype.is_floating_point() and value.dtype not in FLOATS:
            return f"input {position} is {value.dtype.name}, and gradients are proven in FLOAT"
    return None


def _depends_on(model: ir.Model, sources: Iterable[ir.Value]) -> set[ir.Value]:
    """Float values that a change of `sources` reaches."""
    reached = set(sources)
    for node in model.graph:
        if not is_stop_gradient(node) and any(value in reached for value in node.inputs if value is not None):
            reached.update(value for value in node.outputs if value.dtype is None or value.dtype.is_floating_point())
    return reached
