"""A request to the backend: a graph to compile, and one call of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from lit_ort._compat.devices import device_of
from lit_ort.capture.numbers import NumberedGraph
from lit_ort.runtime.program import Form


@dataclasses.dataclass(frozen=True)
class Request:
    """A graph to compile and one call of it.

    Args:
        graph: Dynamo's graph, with its numbers separated.
        original: Dynamo's graph.
        tensors, keys: the call's inputs.
        any_sizes: compile for as many sizes as possible, not only for those of `tensors`.
        form: the form that gradients of earlier runs called for, or None.
        gradients: whether grad mode is enabled.
        autocast: the dtype of the autocast around the call, or None.
        default_dtype: torch's default dtype at the call. The backward of `precision="64-true"` runs under another one.
    """

    graph: NumberedGraph
    original: fx.GraphModule
    tensors: Sequence[torch.Tensor]
    keys: tuple[Any, ...]
    any_sizes: bool
    form: Form | None = None
    gradients: bool = True
    autocast: torch.dtype | None = None
    default_dtype: torch.dtype = dataclasses.field(default_factory=torch.get_default_dtype)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The grad mode, autocast and default dtype of the call, for tracing."""
        kind = device_of(self.tensors).type
        low = torch.autocast(kind, self.autocast or torch.bfloat16, enabled=self.autocast is not None)
        dtype = torch.get_default_dtype()
        with torch.inference_mode(False), torch.set_grad_enabled(self.gradients), low:
            torch.set_default_dtype(self.default_dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(dtype)
