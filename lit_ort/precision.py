"""The precision plugin: which numbers a session computes in."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision

from lit_ort.errors import UnsupportedError
from lit_ort.options import PRECISIONS


class ORTPrecision(Precision):
    """Precision of `strategy="ort"`: `Trainer(strategy="ort", plugins=[ORTPrecision("bf16-mixed")])`.

    The same as `Trainer(strategy="ort", precision="bf16-mixed")`. The strategy puts autocast around a step, and its
    graphs are compiled for it.

    Args:
        precision: `"32-true"`, float32 throughout, or `"bf16-mixed"`, matrix products and attention in bfloat16 and
            weights, gradients and everything else in float32.

    Raises:
        UnsupportedError: a precision that isn't built yet.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in PRECISIONS:
            raise UnsupportedError(
                f"precision={precision!r} is not built for strategy='ort' yet. Built so far: {', '.join(PRECISIONS)}."
            )
        self.precision = precision
