"""The operators of native sessions besides regions: matmuls, also of groups of rows, loops of recurrent layers, output
layers with their losses, and the views that these read.

Matmuls are custom operators on the threads of OpenMP, and ONNX Runtime's kernels on its own. A native session calls no
Python, except for torch nodes of other operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import first_argument, is_element, is_size, is_view, untransposed
from lit_ort._compat.torch_ops import ASSERTIONS, SLICE_END
from lit_ort._compat.torch_sizes import hint_of, memory_order
from lit_ort.kernels.kernel_arguments import DTYPES, END_DTYPES
from lit_ort.kernels.loss_arguments import INPUTS as LOSS_INPUTS
from lit_ort.kernels.recurrent_arguments import BACKWARD_INPUTS, FORWARD_INPUTS
from lit_ort.lower.emitter import Emitter
from lit_ort.lower.operators import ANY, LOWERINGS, Lowering, lowering_of
from lit_ort.ops.hand_over import hand_over
from lit_ort.ops.region_operator import REGION
from lit_ort.passes.fuse_regions import MOST_ELEMENTS, is_small, tensors_of
from lit_ort.passes.pixel_nodes import CHANNELS_FIRST
from lit_ort.regions.placed_region import strides_of_inputs
from lit_ort.runtime.elements import ELEMENTS
from lit_ort.runtime.engines.engine_interface import MICROSOFT

aten = torch.ops.aten
_PERMUTES = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
_RESHAPES = frozenset({aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims})
# A call of a session takes about 20 us, a torch node 15 us, and an operator in one 4 us (Intel Xeon, one thread).
FEWEST_OPERATORS, OPERATORS_OF_SWITCH = 6, 4
_FLOATS = frozenset(DTYPES)
# Matmuls of groups of rows, and whether they are the gradient of matrices.
GROUPS: Mapping[Any, bool] = MappingProxyType(
    {torch.ops.lit_ort.grouped_matmul.default: False, torch.ops.lit_ort.grouped_matmul_gradient.default: True}
)
# Output layers with cross entropy; the second one of bfloat16 factors.
_LOW_LOSS = torch.ops.lit_ort.bfloat16_cross_entropy.default
_LOSSES = frozenset({torch.ops.lit_ort.linear_cross_entropy.default, _LOW_LOSS})
# Convolutions of images; their gradients have the same first two inputs.
_CONVOLUTION = torch.ops.lit_ort.image_convolution.default
_WEIGHT_GRADIENT = torch.ops.lit_ort.image_weight_gradient.default
# The arguments of the loops of recurrent layers.
_LOOPS: Mapping[Any, Sequence[str]] = MappingProxyType(
    {
        torch.ops.lit_ort.recurrent_loop.default: FORWARD_INPUTS,
        torch.ops.lit_ort.recurrent_loop_backward.default: BACKWARD_INPUTS,
    }
)


def obstacle(graph: fx.Graph, uses_openmp: bool = False) -> str | None:
    """What keeps a phase from being a native session; None if it can be one.

    Operators that have no form there are in torch nodes. If the session runs on threads of its own, there may be a few
    of them, of few elements: torch computes larger ones on OpenMP's threads, and they would wait for the session's.

    Args:
        graph: the phase.
        uses_openmp: whether the session runs on OpenMP's threads.
    """
    native, by_torch = list[fx.Node](), list[fx.Node]()
    is_read = reads_inputs(graph)
    for node in graph.nodes:
        # A session of other inputs has none that nothing reads.
        if node.op == "placeholder" and not node.users and is_read:
            continue
        # Results that nothing reads, such as gradients of absent biases, are no values of the session.
        values = [] if isinstance(node.meta.get("val"), (tuple, list)) else tensors_of(node)
        if not _stays_in_torch_nodes(node) and any(t.dtype not in ELEMENTS or 0 in t.shape for t in values):
            return f"{node.name} is of a dtype or of sizes that sessions don't have"
        if node.op != "call_function" or is_size(node) or is_element(node) or is_view(node):
            continue
        if node.target is REGION and None in memory_of_inputs(node):
            return f"a value of {node.name} in another layout than ONNX Runtime's"
        is_native = node.target is REGION or native_lowering_of(node) is not None or is_native_loop(node)
        is_native = is_native or (uses_openmp and (is_native_loss(node) or is_native_group(node)))
        is_native = is_native or (uses_openmp and is_native_convolution(node))
        (native if is_native else by_torch).append(node)
    unfit = next((node for node in by_torch if not _has_form(node)), None)
    if unfit is not None:
        return f"{unfit.target}, which returns nothing, or values of a size that only its run determines"
    large = None if uses_openmp else next((node for node in by_torch if not is_small(node)), None)
    if large is not None:
        return f"{large.target} of more than {MOST_ELEMENTS} elements"
    if len(native) < FEWEST_OPERATORS + OPERATORS_OF_SWITCH * _switches(graph, by_torch):
        return f"{len(native)} regions and matmuls, too few to outweigh the calls of a session and of torch from it"
    return None


def reads_inputs(graph: fx.Graph) -> bool:
    """Whether a phase reads an input; otherwise its session has the first one."""
    inputs = graph.find_nodes(op="placeholder")
    return any(node.users and isinstance(node.meta.get("val"), torch.Tensor) for node in inputs)


def _stays_in_torch_nodes(node: fx.Node) -> bool:
    """Whether a value is complex, and only operators and views of torch nodes read it; as real numbers, others can."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_complex() or 0 in value.shape or node.op != "call_function":
        return False
    return all(user.op == "call_function" and user.target is not REGION for user in node.users)


def _has_form(node: fx.Node) -> bool:
    """Whether an operator can be in a torch node of a native session."""
    if node.target in ASSERTIONS:
        return True
    if node.target is hand_over or not tensors_of(node):
        return False
    return all(hint_of(value.numel()) is not None for value in tensors_of(node))


def _switches(graph: fx.Graph, by_torch: Sequence[fx.Node]) -> int:
    """The number of torch nodes: each ends where another operator reads its values."""
    inside, pending, count = frozenset(by_torch), set[fx.Node](), 0
    for node in graph.nodes:
        is_inside = node in inside
        reads = not pending.isdisjoint(node.all_input_nodes)
        if is_inside or (reads and (is_view(node) or is_element(node))):
            pending.add(node)
        elif reads:
            count += 1
            pending.clear()
    return count


def native_lowering_of(node: fx.Node) -> Lowering | None:
    """How an operator or a view is written in a native session; None if it has no form there."""
    lowering = lowering_of(node, NATIVE_OPERATORS)
    return lowering if lowering is None or lowering.view == is_view(node) else None


def is_native_loop(node: fx.Node) -> bool:
    """Whether a node is the loop of a recurrent layer, or of its gradient, that a native session computes."""
    inputs = loop_inputs(node)
    return "state" in inputs and inputs["state"].meta["val"].dtype in _FLOATS


def loop_inputs(node: fx.Node) -> dict[str, fx.Node]:
    """The inputs of the loop of a recurrent layer, by their names; none of any other node."""
    return {name: value for name, value in _loop_arguments(node).items() if isinstance(value, fx.Node)}


def loop_kind(node: fx.Node) -> tuple[str, bool]:
    """The mode of a loop, and whether its layer runs from the last step to the first."""
    arguments = _loop_arguments(node)
    return str(arguments["mode"]), bool(arguments["reverse"])


def _loop_arguments(node: fx.Node) -> dict[str, Any]:
    return dict(zip(_LOOPS.get(node.target, ()), node.args, strict=False))


def is_native_loss(node: fx.Node) -> bool:
    """Whether a node is an output layer with its cross entropy that sessions on OpenMP's threads compute."""
    if node.target not in _LOSSES:
        return False
    values = {name: value.meta["val"].dtype for name, value in loss_inputs(node).items()}
    labels, hidden, weight = (values.pop(name) for name in ("labels", "hidden", "weight"))
    is_low = node.target is _LOW_LOSS
    others = torch.float32 if is_low else hidden
    has_kernel = hidden == weight and {others, *values.values()} == {others} and labels == torch.int64
    has_kernel = has_kernel and hidden in ({torch.bfloat16} if is_low else _FLOATS)
    # That of autocast has another flag.
    return has_kernel and isinstance(node.args[5], int) and (is_low or not node.args[7])


def is_native_group(node: fx.Node) -> bool:
    """Whether a node is a matmul of groups of rows that sessions on OpenMP's threads compute."""
    if node.target not in GROUPS:
        return False
    left, right, ends = (value.meta["val"].dtype for value in group_inputs(node))
    return left == right and left in _FLOATS and ends in END_DTYPES


def group_inputs(node: fx.Node) -> list[fx.Node]:
    """The factors of a matmul of groups, and where these end."""
    return [value for value in node.args if isinstance(value, fx.Node)]


def is_native_convolution(node: fx.Node) -> bool:
    """Whether a node is a convolution of images, or its gradient, that sessions on OpenMP's threads compute."""
    return node.target in (_CONVOLUTION, _WEIGHT_GRADIENT)


def convolution_inputs(node: fx.Node) -> list[fx.Node]:
    """The images and the weight of a convolution, or the gradient of its result and the images."""
    return [value for value in node.args[:2] if isinstance(value, fx.Node)]


def convolution_of(node: fx.Node) -> tuple[str, tuple[Any, ...], tuple[int, ...], int]:
    """What `ConvolutionNode` says of a convolution: its kind, its sizes, its windows and its groups."""
    first, second = (value.meta["val"] for value in convolution_inputs(node))
    _, _, size, *windows, groups = node.args[:7]
    kind, kernel, images = "weight_gradient", size, (first, second)
    if node.target is _CONVOLUTION:
        kind = "image_gradient" if node.args[7] else "convolution"
        kernel, images = second.shape[-3:-1], (first, node.meta["val"])
    sizes = [one.shape[dim] for one in images for dim in CHANNELS_FIRST]
    pairs = ((one[0], one[-1]) for one in (kernel, *windows))  # type: ignore[index]
    return kind, tuple(sizes), tuple(number for pair in pairs for number in pair), groups  # type: ignore[misc,return-value]


def loss_settings(node: fx.Node) -> tuple[Any, Any, Any]:
    """The ignored label of such a node, whether the loss is the mean, and which gradients it computes."""
    _, _, _, _, _, ignore_index, mean, *_, wanted = node.args
    return ignore_index, mean, wanted


def loss_inputs(node: fx.Node) -> dict[str, fx.Node]:
    """The inputs of an output layer with its cross entropy, by their names."""
    named = zip(LOSS_INPUTS, node.args, strict=False)
    return {name: value for name, value in named if isinstance(value, fx.Node)}


def memory_base(node: fx.Node) -> fx.Node:
    """The node of which a value is a view with all its elements in the same order."""
    while is_view(node) and node.target in _RESHAPES:
        node = first_argument(node)
    return node


def memory_of_inputs(region: fx.Node) -> list[fx.Node | None]:
    """For each input of a region, the value whose memory it reads; None if there is none."""
    tensors, text, _ = region.args
    strides = strides_of_inputs(str(text))
    assert isinstance(tensors, (list, tuple))
    nodes = [tensor for tensor in tensors if isinstance(tensor, fx.Node)]
    return [_memory_of(node, one) for node, one in zip(nodes, strides, strict=True)]


def permuted_base(node: fx.Node) -> fx.Node | None:
    """The result of an operator whose memory has the elements of a permutation of it in their order; None otherwise."""
    value, base = node.meta["val"], node
    while is_view(base) and base.target in _PERMUTES:
        base = first_argument(base)
    is_result = base is not node and base.op == "call_function" and not is_view(base)
    return base if is_result and value.is_contiguous() and _is_dense(base.meta["val"]) else None


def _memory_of(node: fx.Node, strides: Sequence[Any] | None) -> fx.Node | None:
    """The value whose memory a region reads, through views of all its elements in the order of memory."""
    base, value = _whole_base(node), node.meta["val"]
    if strides is not None:
        return base if _has_strides(value, strides) else None
    if base is None:
        return memory_base(node)
    return base if value.is_contiguous() else None


def _has_strides(value: torch.Tensor, strides: Sequence[Any]) -> bool:
    """Whether a value has the strides that are known before a run."""
    sized = zip(value.shape, value.stride(), strides, strict=True)
    return all(size == 1 or own == stride for size, own, stride in sized if isinstance(stride, int))


def _whole_base(node: fx.Node) -> fx.Node | None:
    """The value with all the elements of a view in their order of memory; None if there is none."""
    value = node.meta["val"]
    while is_view(node) and node.target in _RESHAPES | _PERMUTES:
        # A reshape of what is not in order copies it.
        if node.target in _RESHAPES and not first_argument(node).meta["val"].is_contiguous():
            return None
        node = first_argument(node)
    base = node.meta["val"]
    # Sessions have contiguous inputs, whatever the strides of the trace.
    if is_view(node) or (node.op != "call_function" and not base.is_contiguous()):
        return None
    return node if _is_dense(value) and _is_dense(base) and base.numel() == value.numel() else None


def _is_dense(value: torch.Tensor) -> bool:
    return memory_order(value) is not None and value.storage_offset() == 0


def _slice(e: Emitter) -> str:
    axis, start, end = e.argument(1, "dim", 0), e.argument(2, "start"), e.argument(3, "end")
    ends = [SLICE_END if end is None else end]
    starts, step = [0 if start is None else start], [e.argument(4, "step", 1)]
    rest = (e.sizes(starts), e.sizes(ends), e.integers([axis]), e.sizes(step))
    return e.op("Slice", e.value(e.argument(0, "self")), *rest)


def _select(e: Emitter) -> str:
    axis, index = e.argument(1, "dim"), e.argument(2, "index")
    bounds = e.integers([index]), e.integers([SLICE_END if index == -1 else index + 1])
    row = e.op("Slice", e.value(e.argument(0, "self")), *bounds, e.integers([axis]))
    return e.op("Reshape", row, e.sizes(e.node.meta["val"].shape), allowzero=1)


def _has_fixed_index(node: fx.Node) -> bool:
    return isinstance(node.args[2], int)


def _matmul(e: Emitter) -> str:
    left, right = e.argument(0, "self"), e.argument(1, "mat2")
    return _matmul_of(e, left, right)


def _matmul_of(e: Emitter, left: fx.Node, right: fx.Node) -> str:
    if e.uses_openmp:
        return e.matmul(_factor(e, left), _factor(e, right), left.meta["val"])
    if e.dtype == torch.float32:
        (first, first_transposed), (second, second_transposed) = _factor(e, left), _factor(e, right)
        transposed = {"transA": int(first_transposed), "transB": int(second_transposed)}
        if any(transposed.values()):
            return e.op("FusedMatMul", first, second, domain=MICROSOFT, **transposed)
        return e.op("MatMul", first, second)
    return e.op("MatMul", e.value(left), e.value(right))


def _matmul_2d(e: Emitter) -> str:
    if e.uses_openmp:
        return _matmul(e)
    return _gemm(e, e.argument(0, "self"), e.argument(1, "mat2"))


def _gemm(e: Emitter, left: fx.Node, right: fx.Node, *added: str) -> str:
    (first, first_transposed), (second, second_transposed) = _factor(e, left), _factor(e, right)
    transposed = {"transA": int(first_transposed), "transB": int(second_transposed)}
    return e.op("Gemm", first, second, *added, **transposed)


def _added_matmul_2d(e: Emitter) -> str:
    node, left, right = e.argument(0, "self"), e.argument(1, "mat1"), e.argument(2, "mat2")
    added = e.value(node)
    if not e.uses_openmp:
        return _gemm(e, left, right, added)
    shape, result = node.meta["val"].shape, e.node.meta["val"].shape
    if not shape or (shape[-1] == 1 and result[-1] != 1):
        added, shape = e.op("Expand", added, e.sizes(result)), result
    has_rows = len(shape) == 2 and shape[0] != 1
    return e.matmul(_factor(e, left), _factor(e, right), left.meta["val"], (added, has_rows))


def _added_matmul(e: Emitter) -> str:
    matmul = _matmul_of(e, e.argument(1, "batch1"), e.argument(2, "batch2"))
    return e.op("Add", e.value(e.argument(0, "self")), matmul)


def _factor(e: Emitter, node: fx.Node) -> tuple[str, bool]:
    """The name of a factor, and whether it is to be transposed."""
    whole, is_transposed = untransposed(node)
    return e.value(whole), is_transposed


def _is_plain(node: fx.Node) -> bool:
    return all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta"))


NATIVE_OPERATORS: Mapping[Any, Lowering] = MappingProxyType(
    {
        **{target: lowering for target, lowering in LOWERINGS.items() if lowering.view},
        aten.slice.Tensor: Lowering(_slice, ANY, view=True),
        aten.select.int: Lowering(_select, ANY, _has_fixed_index, view=True),
        aten.mm.default: Lowering(_matmul_2d, _FLOATS),
        aten.addmm.default: Lowering(_added_matmul_2d, _FLOATS, _is_plain),
        aten.bmm.default: Lowering(_matmul, _FLOATS),
        aten.baddbmm.default: Lowering(_added_matmul, _FLOATS, _is_plain),
        # Only sessions on the threads of OpenMP have it.
        torch.ops.lit_ort.bfloat16_matmul.default: Lowering(_matmul, frozenset({torch.bfloat16, torch.float32})),
    }
)
