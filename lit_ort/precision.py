"""The seat of precision: which numbers a session computes in."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision

from lit_ort.errors import UnsupportedError

BUILT = ("32-true",)


class ORTPrecision(Precision):
    """Precision of `strategy="ort"`: `Trainer(strategy="ort", plugins=[ORTPrecision("32-true")])`.

    Args:
        precision: `"32-true"`, float32 throughout.

    Raises:
        UnsupportedError: a precision that isn't built yet.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in BUILT:
            raise UnsupportedError(
                f"precision={precision!r} is not built for strategy='ort' yet. Built so far: {', '.join(BUILT)}."
            )
        self.precision = precision  # type: ignore[assignment]
