"""Steps through any other Dynamo backend: the rival that `ort` is compared with, under equal conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_ort.strategies.mixins import CompiledMixin


class CompiledStrategy(CompiledMixin, SingleDeviceStrategy):
    """Runs every step through `torch.compile(backend=backend)` on one device, as `ORTStrategy` does with its own.

    Args:
        backend: the name of a Dynamo backend, or a backend.
        device, accelerator, checkpoint_io, precision_plugin: as in Lightning's `SingleDeviceStrategy`.
    """

    strategy_name = "compiled"

    def __init__(
        self,
        backend: str | Callable[..., Any] = "inductor",
        device: Any = "cpu",
        accelerator: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
    ) -> None:
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
        self.backend = backend

    def backend_of(self, step: str) -> str | Callable[..., Any]:
        return self.backend
