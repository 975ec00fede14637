"""A compiled graph at one signature: computes outputs from the graph's tensors, with in-place writes and views."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from lit_ort.errors import SharedMemoryError
from lit_ort.runtime.autograd import Call
from lit_ort.runtime.program import DETACHED, TRACKED, Mutation, Output, Signature
from lit_ort.runtime.sizes import hold, value_of, values_of

Tensors = Sequence[torch.Tensor]


class Check(Protocol):
    """Compares runs with eager."""

    def before_run(self, arguments: Sequence[Any]) -> None: ...


class Forms(Protocol):
    """The other forms of the graph."""

    @property
    def wants_eager(self) -> bool: ...


class Executable:
    """A graph that runs through sessions.

    Args:
        signature: its inputs and outputs.
        call: its sessions.
        forms: its other forms.

    Attributes:
        check: compares its runs with eager; None without verification.
    """

    def __init__(self, signature: Signature, call: Call, forms: Forms) -> None:
        self.signature = signature
        self.check: Check | None = None
        self._call = call
        self._forms = forms

    @property
    def wants_eager(self) -> bool:
        """Whether the graph has to run in eager from now on."""
        return self._forms.wants_eager

    @property
    def changes_size(self) -> bool:
        """Whether it can support sizes other than those that it was compiled for."""
        return self.signature.sizes is not None

    def serves(self, tensors: Tensors) -> bool:
        """Whether it is valid for inputs of these sizes."""
        return is_for(self.signature, tensors)

    def __call__(self, tensors: Tensors, numbers: Sequence[Any]) -> tuple[Any, ...]:
        """Return the graph's outputs.

        Raises:
            SharedMemoryError: an input that is changed in place shares its memory with another input.
        """
        if self.signature.mutations:
            require_own_memory(self.signature, tensors)
        results = self._call(tensors)
        for mutation in self.signature.mutations:
            _write(mutation, tensors, results)
        return tuple(_value_of(output, results, tensors, numbers) for output in self.signature.outputs)


def is_for(signature: Signature, tensors: Tensors) -> bool:
    """Whether inputs meet the conditions on sizes under which a graph is valid."""
    return signature.sizes is None or hold(signature.sizes, [tensor.shape for tensor in tensors])


def require_own_memory(signature: Signature, tensors: Tensors) -> None:
    """Checks that no input that is changed in place shares its memory with another input.

    Raises:
        SharedMemoryError: one does; a session would read the other input's old value.
    """
    changed = {tensors[mutation.input].untyped_storage().data_ptr(): mutation.input for mutation in signature.mutations}
    for position, tensor in enumerate(tensors):
        owner = changed.get(tensor.untyped_storage().data_ptr())
        if owner is not None and owner != position and tensor.numel() and tensors[owner].numel():
            names = signature.input_names
            raise SharedMemoryError(
                f"{names[owner]} is changed in place and shares its memory with {names[position]}",
                remedy="Clone one of the tensors before the step to run this part in ONNX Runtime.",
            )


def _write(mutation: Mutation, tensors: Tensors, results: Tensors) -> None:
    target, value = tensors[mutation.input], results[mutation.result]
    if mutation.mode == TRACKED:
        target.copy_(value)
    elif mutation.mode == DETACHED:
        target.detach().copy_(value)
    else:
        with torch.no_grad():
            target.copy_(value)


def _value_of(output: Output, results: Tensors, tensors: Tensors, numbers: Sequence[Any]) -> Any:
    if output.source == "number":
        return numbers[output.index]
    if output.source == "constant":
        return output.value.clone() if isinstance(output.value, torch.Tensor) else output.value
    base = results[output.index] if output.source == "result" else tensors[output.index]
    value = base if output.view is None else _viewed(base, output, tensors)
    value = value.detach() if output.detached else value
    return value if output.dtype is None or value.dtype == output.dtype else value.to(output.dtype)


def _viewed(base: torch.Tensor, output: Output, tensors: Tensors) -> torch.Tensor:
    view = output.view
    assert view is not None
    shapes = [tensor.shape for tensor in tensors]
    offset = base.storage_offset() + value_of(view.offset, shapes)
    with torch.no_grad() if output.untracked else nullcontext():
        return base.as_strided(values_of(view.size, shapes), values_of(view.stride, shapes), offset)
