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
    """

    graph: NumberedGraph
    original: fx.GraphModule
    tensors: Sequence[torch.Tensor]
    keys: tuple[Any, ...]
    any_sizes: bool
    form: Form | None = None
    gradients: bool = True
    autocast: torch.dtype | None = None

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The grad mode and autocast of the call, for tracing."""
        kind = device_of(self.tensors).type
        low = torch.autocast(kind, self.autocast or torch.bfloat16, enabled=self.autocast is not None)
        with torch.inference_mode(False), torch.set_grad_enabled(self.gradients), low:
            yield
