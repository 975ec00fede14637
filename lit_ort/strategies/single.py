"""`strategy="ort"`: one device, every step through ONNX Runtime."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision as PrecisionPlugin
from typing_extensions import Unpack

from lit_ort._compat.devices import is_cpu
from lit_ort._compat.lightning import move_to
from lit_ort.errors import LitOrtWarning, UnsupportedError
from lit_ort.strategies.arguments import Compile, StrategyArguments
from lit_ort.strategies.either_package import EitherSingleDeviceStrategy
from lit_ort.strategies.ort_mixin import ORTMixin


class ORTStrategy(ORTMixin, EitherSingleDeviceStrategy):
    """Trains, validates, tests and predicts with any LightningModule through ONNX Runtime on one device.

    The module stays unchanged: hooks, `self.log`, state_dict keys, checkpoints. Graphs that can't run through ONNX
    Runtime run in eager with a warning (`fallback="warn"`) or raise (`fallback="error"`). `lit_ort.explain(trainer)`
    lists them.

    Raises:
        OptionsError: an invalid value.
        UnsupportedError: an accelerator or a precision that isn't supported yet, or more than one device.
    """

    strategy_name = "ort"
    accelerators = ("CPUAccelerator", "CUDAAccelerator")

    def __init__(
        self,
        device: str | torch.device = "cpu",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: PrecisionPlugin | None = None,
        *,
        compile: Compile | None = None,
        optimizer_in_graph: bool = False,
        **arguments: Unpack[StrategyArguments],
    ) -> None:
        """Takes options of the engine and arguments of Lightning's strategy.

        Args:
            device: the device of the steps; the Trainer's device overrides it.
            accelerator: as in Lightning's `SingleDeviceStrategy`; the CPU's, or CUDA's with stock onnxruntime.
            checkpoint_io: as in Lightning's `SingleDeviceStrategy`.
            precision_plugin: as in Lightning's `SingleDeviceStrategy`, for one of the precisions of `ORTOptions`.
            compile: when steps are compiled. "auto": each step begins in eager and is timed; it is compiled when what
                is left of the run makes that worth its time, and stays compiled if it is faster. "always": at its first
                call. "never". None is the environment variable LIT_ORT_COMPILE, or "auto".
            optimizer_in_graph: the run of a step also clips gradients and takes the optimizer's step.
            arguments: the others of `lit_ort.ORTOptions`, which documents them, and `fused_optimizer`: let Adam, AdamW,
                SGD and Adagrad step in torch's fused form where the module chose no form; the default is True.
        """
        super().__init__(
            arguments,
            compile=compile,
            optimizer_in_graph=optimizer_in_graph,
            device=device,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @property
    def parallel_devices(self) -> Sequence[Any]:
        # Lightning's connector then sets it to the Trainer's devices.
        return ()

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[Any] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise UnsupportedError(
                f"devices={len(devices)}, but strategy='ort' trains on one. Use devices=1, or "
                "strategy='ort_ddp' for several."
            )
        if devices and isinstance(devices[0], torch.device):
            self._compute_on(devices[0])

    def _compute_on(self, device: torch.device) -> None:
        """Sets the Trainer's device.

        Raises:
            UnsupportedError: the engine doesn't support the device, or `optimizer_in_graph` doesn't.
        """
        engine = self.backend_of("training_step").engine
        if device.type not in engine.device_types:
            raise UnsupportedError(
                f"the Trainer's device is {device}, but {engine.version} computes on the CPU. Use "
                "Trainer(accelerator='cpu', strategy='ort'), or stock onnxruntime, see docs/engines.md."
            )
        if not is_cpu(device):
            if self.options.optimizer_in_graph:
                raise UnsupportedError(
                    f"optimizer_in_graph=True on {device}, but it supports only the CPU. Leave it out on this device."
                )
            warnings.warn(
                f"strategy='ort' on {device} is not faster than eager PyTorch, since all operators are torch's there, "
                "see docs/engines.md#on-a-gpu. Use it on CPUs, or leave it out on this device.",
                LitOrtWarning,
                stacklevel=2,
            )
        move_to(self, device)

    @property
    def num_nodes(self) -> int:
        return 1

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        if nodes != 1:
            raise UnsupportedError(
                f"num_nodes={nodes}, but strategy='ort' trains on one. Use num_nodes=1, or "
                "strategy='ort_ddp' for several."
            )
