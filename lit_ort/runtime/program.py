"""What runs, as plain data: torch nodes, sessions and how a graph's inputs and outputs map to theirs.

Everything here has a JSON form, so that a compiled graph can be kept in a file and run without building it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from lit_ort._compat.devices import CPU

FUSED, SPLIT, FORWARD = "fused", "split", "forward"
# How a value of a type that ONNX Runtime doesn't share with torch crosses the border of a torch node.
AS_IS, AS_BYTES, AS_REAL = "", "bytes", "real"


@dataclasses.dataclass(frozen=True)
class Statement:
    """One torch operator of a torch node.

    Args:
        target: the operator, such as `aten.mm.default`.
        args, kwargs: its arguments in the words of `lit_ort.runtime.words`.
        results: how many values it defines.
        out: the overload that writes into given memory, or None.
        shape, dtype: of the result, where it is written into given memory.
        stream: which of the run's random streams it draws from, or None.
        module: the name of the module that it came from, for errors; empty where none is known.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: int = 1
    out: str | None = None
    shape: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None
    stream: int | None = None
    module: str = ""


@dataclasses.dataclass(frozen=True)
class TorchNode:
    """One node of an ONNX graph that torch computes: statements over slots, the first of which are its inputs.

    Args:
        inputs: how each input crosses the border.
        statements: in the order they run; each defines the next slots.
        outputs: slot of each output.
        forms: how each output crosses the border.
        anchored: whether the last input is unused, and there because the node reads no input of the graph.
    """

    inputs: tuple[str, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[int, ...]
    forms: tuple[str, ...]
    anchored: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """Where an input of a session comes from.

    Args:
        kind: `tensor` (an input of the graph), `sizes` (a vector of changing sizes), `seed`, `saved` (a value of the
            forward session) or `tangent` (the gradient of a result).
        index: which one.
        terms: for `sizes`, each number or a term of `lit_ort.runtime.sizes`.
        form: how it crosses the border.
    """

    kind: str
    index: int = 0
    terms: tuple[Any, ...] = ()
    form: str = AS_IS


@dataclasses.dataclass(frozen=True)
class Phase:
    """One session: an ONNX model, the torch nodes it calls and what goes in and out.

    Args:
        model: the serialized model.
        nodes: its torch nodes; a node's `overload_name` is the position here.
        inputs: name and source of each input.
        outputs: names of the outputs, in order.
        forms: how each output crosses the border.
        terms: the changing sizes that its nodes take as numbers, as terms of `lit_ort.runtime.sizes`.
        device: where its nodes compute.
    """

    model: bytes
    nodes: tuple[TorchNode, ...]
    inputs: tuple[tuple[str, Source], ...]
    outputs: tuple[str, ...]
    forms: tuple[str, ...]
    terms: tuple[Any, ...] = ()
    device: str = str(CPU)


@dataclasses.dataclass(frozen=True)
class View:
    """The geometry of an alias: sizes and strides in elements, and the offset from the base's own."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any


@dataclasses.dataclass(frozen=True)
class Output:
    """Where one output of the FX graph comes from.

    Args:
        source: `result` (of the session), `input` (handed back as it is), `number` (computed in Python) or `constant`.
        index: of the result, the tensor input or the number.
        value: the constant.
        view: how the output lies in the memory of the result or input, where it is an alias of it.
        dtype: what Dynamo expects, where the result has another type.
        detached: whether an alias needs no gradient where the result or input may.
        untracked: whether an alias is made where gradients are off.
    """

    source: str
    index: int = 0
    value: Any = None
    view: View | None = None
    dtype: torch.dtype | None = None
    detached: bool = False
    untracked: bool = False


# How autograd sees a write into an input.
DETACHED, NO_GRAD, TRACKED = "detached", "no_grad", "tracked"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """An input that the graph changes in place: its position, the result with its new value, and what autograd sees."""

    input: int
    result: int
    mode: str


@dataclasses.dataclass(frozen=True)
class Signature:
    """What goes in and out of one graph.

    Args:
        input_names: a readable, unique name of every tensor input (`encoder.layers.0.linear1.weight`).
        outputs: every output of the FX graph, in order.
        results: how many of the forward session's outputs are results; values saved for the backward, or gradients,
            come after them.
        keys: what each result is, in whichever form the graph runs: kind and index.
        differentiable: for each result, whether autograd may send a gradient for it.
        loss: the result whose gradient a fused run takes to be one, or None.
        gradients: for each tensor input, which of the computed gradients is its own, or None.
        mutations: inputs that are changed in place.
        saved_inputs: tensor inputs that the backward session reads.
        precisions: in which the graph's regions compute.
        sizes: None for one set of sizes; else the conditions on sizes under which the graph is right.
        draws: whether it draws random numbers.
    """

    input_names: tuple[str, ...]
    outputs: tuple[Output, ...]
    results: int
    keys: tuple[tuple[str, int], ...]
    differentiable: tuple[bool, ...]
    loss: int | None
    gradients: tuple[int | None, ...]
    mutations: tuple[Mutation, ...] = ()
    saved_inputs: tuple[int, ...] = ()
    precisions: frozenset[str] = frozenset()
    sizes: tuple[Any, ...] | None = None
    draws: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled graph, but for its sessions.

    Args:
        kind: `fused` (one run gives results and gradients), `split` (forward and backward apart) or `forward`.
        signature: what goes in and out.
        forward: the session of a forward or fused run.
        backward: the session of a split graph's backward.
    """

    kind: str
    signature: Signature
    forward: Phase
    backward: Phase | None = None


def tensors_of(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among a graph's inputs, in order."""
    return [argument for argument in arguments if isinstance(argument, torch.Tensor)]
