"""What a graph becomes, from stage to stage: its signature, its training model, and the two with a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from lit_ort.inspect import GraphReport
from lit_ort.options import BF16_MIXED, FLOAT32


@dataclasses.dataclass(frozen=True)
class GraphOutput:
    """Where one output of the FX graph comes from: a `result` of the session, an `input` handed through, a `constant`.

    Args:
        source: `"result"`, `"input"` or `"constant"`.
        value: index of the result, index among the tensor inputs, or the constant itself.
        differentiable: whether autograd expects a gradient for it.
        dtype: what eager gives, where the session computes it in another type.
    """

    source: str
    value: Any
    differentiable: bool = False
    dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class StepSignature:
    """What goes in and out of one graph.

    Args:
        input_names: readable, unique name of every tensor input of the session (`encoder.layers.0.linear1.weight`).
        wants_gradient: positions in `input_names` of the inputs that want gradients.
        outputs: every output of the FX graph, in order.
        result_differentiable: for every result of the session, whether a gradient can come back for it.
        changes: inputs that the graph changes in place: position in `input_names`, and of the result to copy into it.
        precisions: those that its nodes compute in.
        sizes: None for one set of sizes; else the conditions on sizes (terms of `conditions`) under which it is right.
        functions: what its nodes call that is no operator of torch's.
    """

    input_names: tuple[str, ...]
    wants_gradient: tuple[int, ...]
    outputs: tuple[GraphOutput, ...]
    result_differentiable: tuple[bool, ...]
    changes: tuple[tuple[int, int], ...] = ()
    precisions: frozenset[str] = frozenset({FLOAT32})
    sizes: tuple[Any, ...] | None = None
    functions: tuple[Any, ...] = ()

    @property
    def bf16(self) -> bool:
        return BF16_MIXED in self.precisions

    @property
    def gradient_names(self) -> tuple[str, ...]:
        return tuple(self.input_names[position] for position in self.wants_gradient)


@dataclasses.dataclass(frozen=True)
class TrainingModel:
    """A model with gradients.

    Args:
        model: forward and backward.
        results: the values that the forward hands out, in order.
        gradient_positions: for each name in `signature.gradient_names`, its position among the model's gradients, or
            None where no gradient reaches the input.
        gradient_outputs: names of the gradients, in the order the session returns them.
        yielded: for split models, which results come back with a gradient: positions in the session's results.
    """

    model: ir.Model
    results: tuple[str, ...]
    gradient_positions: tuple[int | None, ...] = ()
    gradient_outputs: tuple[str, ...] = ()
    yielded: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Everything that one graph became, but for its session."""

    signature: StepSignature
    kind: str
    training: TrainingModel
    report: GraphReport


def tensors_of(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among a graph's inputs: a session's inputs, in order."""
    return [argument for argument in arguments if isinstance(argument, torch.Tensor)]


def describe(name: str, tensor: torch.Tensor, shape: ir.Shape | None = None) -> str:
    """Name, type and shape of an input, for reports; `any` for the sizes that change in a model's `shape`."""
    sizes = tensor.shape if shape is None else [size if isinstance(size, int) else "any" for size in shape]
    return f"{name} {str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, sizes))}]"
