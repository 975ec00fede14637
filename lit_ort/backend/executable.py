"""A compiled graph at one signature: computes outputs from the graph's tensors, with in-place writes and views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lit_ort.errors import SharedMemoryError
from lit_ort.runtime.autograd import Call
from lit_ort.runtime.gradient_watches import watch
from lit_ort.runtime.program import DETACHED, TRACKED, UNNOTICED, Form, Mutation, Output, Signature
from lit_ort.runtime.sizes import hold
from lit_ort.runtime.views import output_value, sharing

Tensors = Sequence[torch.Tensor]


class Check(Protocol):
    """Compares runs with eager."""

    def before_run(self, arguments: Sequence[Any]) -> None: ...


class Forms(Protocol):
    """The other forms of the graph."""

    wanted: Form | None
    inner: tuple[int, ...]


class Executable:
    """A graph that runs through sessions.

    Args:
        signature: its inputs and outputs.
        call: its sessions.
        forms: its other forms.

    Attributes:
        call: runs its sessions, without writes into the inputs.
        check: compares its runs with eager; None without verification.
    """

    def __init__(self, signature: Signature, call: Call, forms: Forms) -> None:
        self.signature = signature
        self.check: Check | None = None
        self.call = call
        self._forms = forms
        self._sharing = sharing(signature.outputs, forms.inner)
        self._watched = [k for k in forms.inner if not _is_input(signature.outputs[k])]

    @property
    def wanted(self) -> Form | None:
        """The form that gradients of earlier runs called for; None if this one is right."""
        return self._forms.wanted

    def forget_wanted(self) -> None:
        """Keeps this form, whatever gradients arrived before."""
        self._forms.wanted = None

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
        results = self.call(tensors)
        for mutation in self.signature.mutations:
            _write(mutation, tensors, results)
        outputs = [output_value(output, results, tensors, numbers) for output in self.signature.outputs]
        if self._forms.inner:
            watch(results, outputs, self._watched, self._sharing)
        if self.signature.grad_mode is not None:
            torch.set_grad_enabled(self.signature.grad_mode)
        return tuple(outputs)


def _is_input(output: Output) -> bool:
    """Whether an output is an input itself, whose gradient is complete where its own function receives it."""
    return output.source == "input" and output.view is None


def is_for(signature: Signature, tensors: Tensors) -> bool:
    """Whether inputs meet the conditions on sizes under which a graph is valid."""
    return signature.sizes is None or hold(signature.sizes, [tensor.shape for tensor in tensors])


def require_own_memory(signature: Signature, tensors: Tensors) -> None:
    """Checks that no input that is changed in place shares its memory with another input.

    Raises:
        SharedMemoryError: one does; a session would read the other input's old value.
    """
    changed = {tensors[mutation.input].untyped_storage().data_ptr(): mutation.input for mutation in signature.mutations}
    for position in changed.values():
        pairs = zip(tensors[position].shape, tensors[position].stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in pairs):
            raise SharedMemoryError(
                f"{signature.input_names[position]} is changed in place and is expanded: its elements share memory",
                remedy="Clone it before the step to run this part in ONNX Runtime.",
            )
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
    elif mutation.mode == UNNOTICED:
        target.data.copy_(value)
    else:
        with torch.no_grad():
            target.copy_(value)
