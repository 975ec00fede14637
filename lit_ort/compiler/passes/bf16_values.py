"""Hands values from one kernel to the next in bfloat16, and rounds each of the others once.

In:  kernels that round their factors themselves, the same value in several of them, and pass on float32
Out: `ATen(x, operator="lit_ort::bf16_round")` once for each value whose kernel can't give bfloat16, and kernels ending
     in `_rounded` where every reader rounds anyway; moves of data (Reshape, Split ..) in bfloat16 between them
Saves half of the activations that are kept for the backward, and most of the rounding: a weight is read in full once.
"""

from __future__ import annotations

import onnx_ir as ir

from lit_ort.compiler.kernel_nodes import kernel_node, kernel_of, set_kernel
from lit_ort.compiler.kernels import attention, dropout, gelu, linear_cross_entropy
from lit_ort.compiler.kernels.bf16 import BF16, ROUND, ROUNDED, ROW_SUM
from lit_ort.compiler.marks import copy_marks
from lit_ort.compiler.passes.base import GraphPass
from lit_ort.inspect import PassReport

# Operators that move elements and compute nothing, with all their inputs or the first alone.
MOVES = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Split", "Slice", "Concat"})
_GELUS = {gelu.gelu_name(kind, gradient) for kind in (gelu.EXACT, gelu.TANH) for gradient in (False, True)}
_DROPOUTS = {dropout.DROPOUT, dropout.DROPOUT_GRADIENT}


class Bf16Values(GraphPass):
    name = "bf16_values"

    def apply(self, model: ir.Model) -> PassReport:
        outputs = set(model.graph.outputs)
        narrow: set[ir.Value] = set()
        # From the last reader to the first writer: whether a value can be narrow depends on all that read it.
        for node in reversed(model.graph):
            for value in _narrowable(node):
                if value not in outputs and _only_rounded(value, narrow):
                    narrow.add(value)
            if len({value in narrow for value in _narrowable(node)}) > 1:
                narrow.difference_update(node.outputs)
        for node in list(model.graph):
            if any(value in narrow for value in node.outputs):
                _make_narrow(node, narrow)
        fired = sum(_round_once(model.graph, value, narrow) for value in _values(model.graph))
        return PassReport(self.name, fired + len(narrow))


def _narrowable(node: ir.Node) -> tuple[ir.Value, ...]:
    """The outputs that a node can give in bfloat16: all or none of them."""
    kernel = kernel_of(node) or ""
    if kernel.startswith(linear_cross_entropy.NAME):
        return ()
    if kernel.startswith(attention.GRADIENT) or kernel.startswith(attention.MASKED_GRADIENT):
        return tuple(node.outputs) if BF16 in kernel else ()
    if kernel.startswith(attention.NAME):
        return tuple(node.outputs[:1]) if BF16 in kernel else ()
    if kernel in _DROPOUTS or _is_product(kernel) or (kernel in _GELUS and _follows_products(node)):
        return tuple(node.outputs[:1])
    if node.op_type in MOVES and not node.domain and _is_float(node.inputs[0]):
        return tuple(node.outputs)
    return ()


def _follows_products(node: ir.Node) -> bool:
    """Whether what a node reads was rounded anyway, so that computing with it in bfloat16 loses nothing more."""
    for value in node.inputs:
        source = value.producer() if value is not None else None
        while source is not None and source.op_type in MOVES and not source.domain and source.inputs[0] is not None:
            source = source.inputs[0].producer()
        if source is None or not _is_product(kernel_of(source) or ""):
            return False
    return True


def _is_product(kernel: str) -> bool:
    return kernel.startswith(("bf16_gemm", "bf16_matmul"))


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.FLOAT


def _rounded_positions(node: ir.Node) -> range:
    """The inputs that a kernel rounds itself."""
    kernel = kernel_of(node) or ""
    if _is_product(kernel):
        return range(2)
    if kernel.endswith(BF16) and kernel.startswith(linear_cross_entropy.NAME):
        return range(2)
    if BF16 in kernel and kernel.startswith(attention.NAME):
        return range(4 if "gradient" in kernel else 3)
    return range(0)


def _takes_either(node: ir.Node, position: int) -> bool:
    kernel = kernel_of(node)
    return position == 0 and (kernel == ROW_SUM or kernel in _DROPOUTS)


def _only_rounded(value: ir.Value, narrow: set[ir.Value]) -> bool:
    """Whether each reader rounds a value, or takes it in either type, and one at least rounds it."""
    uses = value.uses()
    return all(_takes_either(use.node, use.idx) or _rounds(use.node, use.idx, narrow) for use in uses) and any(
        _rounds(use.node, use.idx, narrow) for use in uses
    )


def _rounds(node: ir.Node, position: int, narrow: set[ir.Value]) -> bool:
    if position in _rounded_positions(node):
        return True
    follows = node.op_type in MOVES and not node.domain and (position == 0 or node.op_type == "Concat")
    return (follows or kernel_of(node) in _GELUS) and node.outputs[0] in narrow


def _make_narrow(node: ir.Node, narrow: set[ir.Value]) -> None:
    for value in node.outputs:
        if value in narrow:
            value.dtype = ir.DataType.BFLOAT16
    kernel = kernel_of(node)
    # GELU gives the type that it takes.
    if kernel is not None and kernel not in _GELUS:
        set_kernel(node, kernel + ROUNDED)


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]


def _round_once(graph: ir.Graph, value: ir.Value, narrow: set[ir.Value]) -> int:
    """Gives the readers that round a float32 value one rounded copy of it, made where the first of them runs."""
    uses = [use for use in value.uses() if _rounds(use.node, use.idx, narrow)]
    if value in narrow or not uses or not _is_float(value):
        return 0
    readers = {use.node for use in uses}
    first = next(node for node in graph if node in readers)
    made = kernel_node(ROUND, [value], ((ir.DataType.BFLOAT16, value.shape),), f"{value.name}/{ROUND}")
    made.outputs[0].name = f"{value.name}__bf16"
    copy_marks(first, made)
    graph.insert_before(first, made)
    for use in uses:
        use.node.replace_input_with(use.idx, made.outputs[0])
    return 1
