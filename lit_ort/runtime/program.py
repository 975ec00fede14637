"""Compiled graphs as plain data: torch nodes, phases, and how their inputs and outputs map to the graph's.

Everything here has a JSON form, so that a compiled graph can be stored in a file and run without building it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from lit_ort._compat.devices import CPU

FUSED, SPLIT, FORWARD, EAGER = "fused", "split", "forward", "eager"
# The form of a value: how ONNX Runtime represents a torch value whose dtype the two don't share.
AS_IS, AS_BYTES, AS_REAL = "", "bytes", "real"
# The threads of a native session.
OPENMP, SESSION, CALLER = "openmp", "session", "caller"


@dataclasses.dataclass(frozen=True)
class LargeResult:
    """A large result of an operator that computes it in given memory.

    Args:
        position: of the result among the operator's.
        shape, dtype: of the result; sizes are encoded as arguments are.
    """

    position: int
    shape: tuple[Any, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Statement:
    """One torch operator of a torch node.

    Args:
        target: the operator, such as `aten.mm.default`.
        args, kwargs: its arguments, encoded as in `lit_ort.runtime.argument_codec`.
        results: the number of values that it defines.
        out: the overload that writes its one large result into given memory, or None.
        large: the large results of this overload, or of an operator of this project, which allocates them.
        stream: its number among the operators that draw from torch's generator, or None.
        module: the name of the module that it comes from, for error messages; empty if unknown.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: int = 1
    out: str | None = None
    large: tuple[LargeResult, ...] = ()
    stream: int | None = None
    module: str = ""


@dataclasses.dataclass(frozen=True)
class TorchNode:
    """One node of an ONNX graph that torch computes: statements over numbered slots; the first slots are its inputs.

    Args:
        inputs: the form of each input.
        statements: in the order in which they run; each defines the next slots.
        outputs: the slot of each output.
        forms: the form of each output.
        anchored: whether the last input is unused; it is added to nodes that read no input of the graph.
    """

    inputs: tuple[str, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[int, ...]
    forms: tuple[str, ...]
    anchored: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of a session's input.

    Args:
        kind: `tensor` (an input of the graph), `sizes` (a vector of dynamic sizes), `seed`, `saved` (a value that the
            forward session saved) or `tangent` (the gradient of a result).
        index: its position among the values of that kind.
        terms: for `sizes`: numbers or terms of `lit_ort.runtime.sizes`.
        form: the form of the input.
    """

    kind: str
    index: int = 0
    terms: tuple[Any, ...] = ()
    form: str = AS_IS


@dataclasses.dataclass(frozen=True)
class RegionNode:
    """One node of an ONNX graph that is a compiled region.

    Args:
        text: the region, as `lit_ort.regions.placed_region` writes it.
        sizes: the sizes of the call, as numbers or terms of `lit_ort.runtime.sizes`.
        module: the name of the module that it comes from, for error messages; empty if unknown.
    """

    text: str
    sizes: tuple[Any, ...] = ()
    module: str = ""


@dataclasses.dataclass(frozen=True)
class MatmulNode:
    """One node of an ONNX graph that is a matmul on the threads of OpenMP.

    Args:
        dtype: of the factors.
        sizes: the matrices in a batch, and rows, columns and inner size of each, as numbers or terms of
            `lit_ort.runtime.sizes`.
        transposed: whether the left and the right factor are stored as their transposes.
        added: None, or whether the value that is added to the matmul has rows of its own; otherwise it is one row.
        is_batch: whether the result has a dimension for the matrices of a batch.
    """

    dtype: torch.dtype
    sizes: tuple[Any, ...]
    transposed: tuple[bool, bool]
    added: bool | None = None
    is_batch: bool = False


@dataclasses.dataclass(frozen=True)
class LoopNode:
    """One node of an ONNX graph that is the loop over time of a recurrent layer, or of its gradient.

    Args:
        mode: "lstm", "gru", "tanh" or "relu".
        reverse: whether the layer's steps run from the last to the first.
        dtype: of all values.
        sizes: the steps, the rows of the first one, the width of the state, and the rows of all steps, as numbers or
            terms of `lit_ort.runtime.sizes`.
        inputs: the names of its inputs, in order, as in `lit_ort.kernels.recurrent_calls`.
    """

    mode: str
    reverse: bool
    dtype: torch.dtype
    sizes: tuple[Any, ...]
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LossNode:
    """One node of an ONNX graph that is an output layer with its cross entropy, and the gradients of both.

    Args:
        dtype: of the factors; other values but the labels are float32 if these are bfloat16, and otherwise the same.
        sizes: the rows, the width of the input and the classes, as numbers or terms of `lit_ort.runtime.sizes`.
        inputs: the names of its inputs, in order, as in `lit_ort.kernels.loss_arguments`.
        gradients: the names of the gradients that it computes, likewise.
        ignore_index: the label of rows that are ignored.
        mean: whether the loss is the mean over rows instead of the sum.
        module: the name of the module that it comes from, for error messages; empty if unknown.
    """

    dtype: torch.dtype
    sizes: tuple[Any, ...]
    inputs: tuple[str, ...]
    gradients: tuple[str, ...]
    ignore_index: int
    mean: bool
    module: str = ""


@dataclasses.dataclass(frozen=True)
class GroupedMatmulNode:
    """One node of an ONNX graph that is a matmul of groups of rows, or the gradient of their matrices.

    Args:
        dtype: of the factors.
        ends_dtype: of the ends of groups.
        sizes: the groups, the rows of all, and the columns of the left and of the right factor, as numbers or terms of
            `lit_ort.runtime.sizes`.
        is_gradient: whether both factors have rows, and each group's transposed rows are multiplied.
        transposed: whether the groups' matrices are stored as their transposes.
    """

    dtype: torch.dtype
    ends_dtype: torch.dtype
    sizes: tuple[Any, ...]
    is_gradient: bool
    transposed: bool


@dataclasses.dataclass(frozen=True)
class ConvolutionNode:
    """One node of an ONNX graph that is a convolution of images with channels last, or a gradient of it.

    Args:
        kind: `convolution`, `image_gradient` or `weight_gradient`.
        dtype: of all values.
        sizes: of the images and the result, or of the result's gradient and the images of a weight's gradient: batch,
            channels, height and width of both, as numbers or terms of `lit_ort.runtime.sizes`.
        windows: the height and width of the kernel, of its stride, its padding and its dilation.
        groups: into how many groups of channels it is cut.
    """

    kind: str
    dtype: torch.dtype
    sizes: tuple[Any, ...]
    windows: tuple[int, ...]
    groups: int


KernelNode = RegionNode | MatmulNode | LoopNode | LossNode | GroupedMatmulNode | ConvolutionNode


@dataclasses.dataclass(frozen=True)
class ResultType:
    """The type of an output of a native session, whose memory the caller allocates.

    Args:
        dtype: of the output.
        shape: as numbers or terms of `lit_ort.runtime.sizes`.
        computed_shape: the shape in which the session computes it, with the same elements in the same order.
    """

    dtype: torch.dtype
    shape: tuple[Any, ...]
    computed_shape: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class PlacedValue:
    """A value of a native session whose place in the memory of a run is known before the run.

    Args:
        name: of the value in the model.
        dtype: of the value.
        shape: as numbers or terms of `lit_ort.runtime.sizes`.
        first, last: the positions of the node that computes it and of the last one that reads it.
        owner: the position among the placed values of the one whose memory it has; None for one with its own.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Any, ...]
    first: int
    last: int
    owner: int | None = None


@dataclasses.dataclass(frozen=True)
class Phase:
    """The data of one session: an ONNX model, the nodes of it that are not ONNX's, and its inputs and outputs.

    Args:
        model: the serialized model; empty if the phase is one torch node of few operators, which needs no session.
        nodes: its torch nodes; a node's `overload_name` is its position in this tuple.
        regions: its region nodes, likewise, if the session is native.
        matmuls: its matmuls that are custom operators, likewise, if the session is native and runs on OpenMP's threads.
        loops: its loops of recurrent layers, likewise.
        losses: its output layers with cross entropy, likewise.
        groups: its matmuls of groups of rows, likewise.
        convolutions: its convolutions of images, likewise.
        results: the types of the outputs, if the session is native: if Python is called by torch nodes alone.
        placed: the large values of a native session, results among them.
        sizes: the dynamic sizes of the inputs of a native session, as terms.
        pool: the threads on which a native session runs: `OPENMP`, which torch's operators use too, `SESSION`, its own
            threads, or `CALLER`, where others would be awake too late to save time.
        inputs: the name and the source of each input.
        outputs: the names of the outputs, in order.
        forms: the form of each output.
        terms: the dynamic sizes that its nodes use as numbers, as terms of `lit_ort.runtime.sizes`.
        device: the device on which its nodes compute.
    """

    model: bytes
    nodes: tuple[TorchNode, ...]
    inputs: tuple[tuple[str, Source], ...]
    outputs: tuple[str, ...]
    forms: tuple[str, ...]
    terms: tuple[Any, ...] = ()
    device: str = str(CPU)
    regions: tuple[RegionNode, ...] = ()
    matmuls: tuple[MatmulNode, ...] = ()
    loops: tuple[LoopNode, ...] = ()
    losses: tuple[LossNode, ...] = ()
    groups: tuple[GroupedMatmulNode, ...] = ()
    convolutions: tuple[ConvolutionNode, ...] = ()
    results: tuple[ResultType, ...] = ()
    placed: tuple[PlacedValue, ...] = ()
    sizes: tuple[Any, ...] = ()
    pool: str = SESSION

    @property
    def kernels(self) -> tuple[KernelNode, ...]:
        """Its nodes that are machine code, in the order in which a session has their calls."""
        return (*self.regions, *self.matmuls, *self.loops, *self.losses, *self.groups, *self.convolutions)

    @property
    def is_native(self) -> bool:
        """Whether its session calls no Python, or for a few torch nodes alone."""
        return bool(self.results)


@dataclasses.dataclass(frozen=True)
class View:
    """The geometry of an alias: size and stride in elements, and the offset relative to the base's offset."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any


@dataclasses.dataclass(frozen=True)
class Output:
    """The source of one output of the FX graph.

    Args:
        source: `result` (of the session), `input` (returned unchanged), `number` (computed in Python) or `constant`.
        index: of the result, the tensor input or the number.
        value: the constant.
        view: the geometry of the output if it is an alias of the result or input, or None.
        dtype: the dtype that Dynamo expects if the result has another one, or None.
        detached: whether the alias is detached from the result or input.
        untracked: whether the alias is created under `torch.no_grad`.
    """

    source: str
    index: int = 0
    value: Any = None
    view: View | None = None
    dtype: torch.dtype | None = None
    detached: bool = False
    untracked: bool = False


# How autograd treats a write into an input.
DETACHED, NO_GRAD, TRACKED, UNNOTICED = "detached", "no_grad", "tracked", "unnoticed"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """An input that the graph changes in place.

    Args:
        input: the position of the input.
        result: the position of the result with its new value.
        mode: how autograd treats the write: `DETACHED`, `NO_GRAD`, `TRACKED`, or `UNNOTICED`, without a new version.
    """

    input: int
    result: int
    mode: str


@dataclasses.dataclass(frozen=True)
class Signature:
    """The inputs and outputs of one graph.

    Args:
        input_names: a readable, unique name of every tensor input (`encoder.layers.0.linear1.weight`).
        outputs: every output of the FX graph, in order.
        results: the number of results among the forward session's outputs; saved tensors, or gradients, follow them.
        keys: kind and index of each result, which are the same in every form of the graph.
        differentiable: for each result, whether autograd can pass a gradient for it.
        loss: the position of the result whose gradient a fused run assumes to be one, or None.
        gradients: for each tensor input, the position of its gradient among the computed ones, or None.
        tangents: the results whose gradient the backward takes.
        reached_from: for each computed gradient, the results that it depends on; empty if it is not part of a backward
            that takes the gradients of several results.
        mutations: the inputs that are changed in place.
        saved_inputs: the tensor inputs that the backward reads.
        precisions: the precisions of the graph's regions.
        sizes: None for a graph with static sizes; otherwise the conditions on sizes under which the graph is valid.
        seeded: whether the graph has dropout, whose random numbers depend on a seed.
        grad_mode: the grad mode that the graph sets for the code after it, or None.
    """

    input_names: tuple[str, ...]
    outputs: tuple[Output, ...]
    results: int
    keys: tuple[tuple[str, int], ...]
    differentiable: tuple[bool, ...]
    loss: int | None
    gradients: tuple[int | None, ...]
    tangents: tuple[int, ...] = ()
    reached_from: tuple[tuple[int, ...], ...] = ()
    mutations: tuple[Mutation, ...] = ()
    saved_inputs: tuple[int, ...] = ()
    precisions: frozenset[str] = frozenset()
    sizes: tuple[Any, ...] | None = None
    seeded: bool = False
    grad_mode: bool | None = None


@dataclasses.dataclass(frozen=True)
class Form:
    """How gradients of a graph are computed.

    Args:
        kind: `FUSED`, `SPLIT` or `EAGER`.
        loss: for `FUSED`, the position of the loss among Dynamo's outputs.
    """

    kind: str
    loss: int | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled graph without its sessions.

    Args:
        kind: `fused` (one run computes results and gradients), `split` (separate runs for forward and backward) or
            `forward`.
        signature: the inputs and outputs of the graph.
        forward: the phase of the forward, or of a fused graph.
        backward: the phase of a split graph's backward, or None.
    """

    kind: str
    signature: Signature
    forward: Phase
    backward: Phase | None = None


def tensors_of(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among a graph's inputs, in order."""
    return [argument for argument in arguments if isinstance(argument, torch.Tensor)]
