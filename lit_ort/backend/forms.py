"""Other forms of a compiled graph, for gradients that its session doesn't compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lit_ort.runtime.autograd import SplitRunner


class Forms:
    """The other forms of one compiled graph.

    Args:
        make_split: compiles the two-session form for the sizes of given inputs.
        run_in_eager: runs the graph in eager, tracked by autograd, and returns its outputs; None if that is not
            allowed.

    Attributes:
        wants_eager: whether a gradient has been differentiated again, so that later steps run in eager.
    """

    def __init__(
        self,
        make_split: Callable[[Sequence[torch.Tensor]], SplitRunner],
        run_in_eager: Callable[[Sequence[torch.Tensor]], Sequence[Any]] | None,
    ) -> None:
        self._make_split = make_split
        self._run_in_eager = run_in_eager
        self._split: dict[tuple[torch.Size, ...], SplitRunner] = {}
        self.wants_eager = False

    def split(self, tensors: Sequence[torch.Tensor]) -> SplitRunner:
        """The two-session form of a fused graph, for a gradient of an output other than the loss."""
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self._split:
            self._split[shapes] = self._make_split(tensors)
        return self._split[shapes]

    def eager(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any] | None:
        """The graph's outputs, for gradients that are differentiated again; None if that is not allowed."""
        if self._run_in_eager is None:
            return None
        self.wants_eager = True
        return self._run_in_eager(tensors)
