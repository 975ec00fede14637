"""Runs a phase that is one torch node, without ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lit_ort.runtime.engines.engine_interface import Model
from lit_ort.runtime.engines.node_callbacks import Serving, results_of
from lit_ort.runtime.nodes import RunState


class NoSession:
    """Calls the only torch node of a phase, with the errors of a session.

    Args:
        model: the phase; its inputs and outputs are those of the node, in the same order.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def run(self, tensors: Sequence[torch.Tensor], state: RunState) -> list[torch.Tensor]:
        with Serving(self._model, state):
            results = results_of(0, tensors)
        assert results is not None, "an error of the node was raised"
        # As from a session, no result is an input itself.
        return [result.detach() if any(result is tensor for tensor in tensors) else result for result in results]
