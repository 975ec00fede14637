"""`strategy="ort"` for code that imports `pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning.strategies import SingleDeviceStrategy

from lit_ort.strategies.mixins import ORTMixin


class ORTStrategy(ORTMixin, SingleDeviceStrategy):
    """As `lit_ort.ORTStrategy`, on `pytorch_lightning`'s classes."""

    strategy_name = "ort"
