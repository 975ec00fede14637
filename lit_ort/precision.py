"""The precision plugin of `strategy="ort"`."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision

from lit_ort.errors import UnsupportedError
from lit_ort.options import PRECISIONS


class ORTPrecision(Precision):
    """The precision of `strategy="ort"`: `Trainer(strategy="ort", plugins=[ORTPrecision("bf16-mixed")])`.

    This is the same as `Trainer(strategy="ort", precision="bf16-mixed")`. The strategy runs steps under autocast, and
    their graphs are compiled for it.

    Args:
        precision: `"32-true"` for float32, or `"bf16-mixed"` for matmuls, convolutions and attention in
            bfloat16, and weights, their gradients and everything else in float32.

    Raises:
        UnsupportedError: an unsupported precision.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in PRECISIONS:
            raise UnsupportedError(
                f"precision={precision!r} is not one of ORTPrecision's: {', '.join(PRECISIONS)}. Use one of them, or "
                f"pass {precision!r} to the Trainer."
            )
        self.precision = precision
