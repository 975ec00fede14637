"""A strategy for any other Dynamo backend: the baseline for `ort`, under equal conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision

from lit_ort.strategies.compiled_mixin import CompiledMixin
from lit_ort.strategies.either_package import EitherSingleDeviceStrategy


class CompiledStrategy(CompiledMixin, EitherSingleDeviceStrategy):
    """Runs every step through `torch.compile(backend=backend)` on one device, as `ORTStrategy` does with `ort`."""

    strategy_name = "compiled"

    def __init__(
        self,
        backend: str | Callable[..., Any] = "inductor",
        device: str | torch.device = "cpu",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        """The arguments besides `backend` are those of Lightning's `SingleDeviceStrategy`.

        Args:
            backend: the name of a Dynamo backend, or a backend.
            device: the device of the module and its batches.
            accelerator: as in Lightning's `SingleDeviceStrategy`.
            checkpoint_io: as in Lightning's `SingleDeviceStrategy`.
            precision_plugin: as in Lightning's `SingleDeviceStrategy`.
        """
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
        self.backend = backend

    def backend_of(self, step: str) -> str | Callable[..., Any]:
        return self.backend
