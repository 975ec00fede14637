"""oneDNN's recurrent layers, which read their arguments as if contiguous, and keep what their backward needs only where
gradients are on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lit_ort.ops.operator import Memory, Operator

aten = torch.ops.aten


def _kernel(target: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(memory: Memory, *args: Any) -> Any:
        plain = [argument.contiguous() if isinstance(argument, torch.Tensor) else argument for argument in args]
        # The operator asks for grad mode, and sessions run without.
        with torch.enable_grad():
            return target(*plain)

    return kernel


OPERATORS = tuple(
    Operator(target, _kernel(target), recomputable=False)
    for target in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
)
