"""`strategy="ort"` for code that imports `pytorch_lightning`."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.strategies import SingleDeviceStrategy

from lit_ort.strategies.mixins import ORTMixin


class ORTStrategy(ORTMixin, SingleDeviceStrategy):
    """As `lit_ort.ORTStrategy`, on `pytorch_lightning`'s classes."""

    strategy_name = "ort"

    def __init__(
        self,
        device: Any = "cpu",
        accelerator: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
        **options: Any,
    ) -> None:
        self.configure(options)
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
