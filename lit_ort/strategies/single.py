"""`strategy="ort"`: one device, every step through ONNX Runtime."""

from __future__ import annotations

from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_ort.strategies.mixins import ORTMixin


class ORTStrategy(ORTMixin, SingleDeviceStrategy):
    """Trains, validates, tests and predicts with any LightningModule through ONNX Runtime on the CPU.

    The module stays as it is: hooks, `self.log`, state_dict keys, checkpoints. What can't run through ONNX Runtime runs
    in eager with a warning (`fallback="warn"`) or raises (`fallback="error"`); `lit_ort.explain(trainer)` tells.

    Args:
        device: the CPU.
        accelerator, checkpoint_io, precision_plugin: as in Lightning's `SingleDeviceStrategy`.
        options: those of `lit_ort.ORTOptions`, by name.

    Raises:
        OptionsError: an unknown option, or a value outside its rule.
        UnsupportedError: an accelerator, a precision or a number of devices that isn't served yet.
    """

    strategy_name = "ort"
