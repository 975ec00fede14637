"""`strategy="ort"`: one device, every step through ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_ort.errors import UnsupportedError
from lit_ort.strategies.mixins import ORTMixin


class SingleDeviceMixin(ORTMixin):
    """Everything of `ORTStrategy` but the package of Lightning's that it comes on."""

    strategy_name = "ort"

    def __init__(
        self,
        device: Any = "cpu",
        accelerator: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            options,
            device=device,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @property
    def parallel_devices(self) -> Sequence[Any]:
        """Empty: it is here so that Lightning says how many devices were asked for."""
        return ()

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[Any] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise UnsupportedError(
                f"devices={len(devices)}, and strategy='ort' trains on one. Use devices=1, or "
                "strategy='ort_ddp' for several."
            )

    @property
    def num_nodes(self) -> int:
        return 1

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        if nodes != 1:
            raise UnsupportedError(
                f"num_nodes={nodes}, and strategy='ort' trains on one. Use num_nodes=1, or "
                "strategy='ort_ddp' for several."
            )


class ORTStrategy(SingleDeviceMixin, SingleDeviceStrategy):
    """Trains, validates, tests and predicts with any LightningModule through ONNX Runtime on the CPU.

    The module stays as it is: hooks, `self.log`, state_dict keys, checkpoints. What can't run through ONNX Runtime runs
    in eager with a warning (`fallback="warn"`) or raises (`fallback="error"`); `lit_ort.explain(trainer)` tells.

    Args:
        device: the CPU.
        accelerator, checkpoint_io, precision_plugin: as in Lightning's `SingleDeviceStrategy`.
        options: those of `lit_ort.ORTOptions`, by name.

    Raises:
        OptionsError: an unknown option, or a value outside its rule.
        UnsupportedError: an accelerator or a precision that isn't served yet, or more than one device.
    """
