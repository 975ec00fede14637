"""Lightning's strategies, for Trainers of both of its packages: `lightning.pytorch` and `pytorch_lightning`.

The packages have the same code, each with its own classes. The strategies of lit_ort derive from `lightning.pytorch`'s,
and are registered as subclasses of the same ones of `pytorch_lightning`. A method whose code depends on the package,
because it creates or requires objects of the package's classes, is that of the Trainer's package.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from lit_ort._compat.lightning import LIGHTNING, PYTORCH_LIGHTNING, configure_launcher, in_package, package_of


class EitherStrategy(Strategy):
    """Lightning's `Strategy`, for a Trainer of either package; behind the other base in the bases of a strategy.

    Attributes:
        package: the Trainer's package, `lightning.pytorch` before a Trainer has the strategy.
    """

    package: str = LIGHTNING

    # Lightning's connector sets this attribute before all others that are the Trainer's.

    @Strategy.accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        self.package = package_of(accelerator)
        in_package(Strategy, self.package).accelerator.fset(self, accelerator)

    # Getters stay Lightning's: steps that read the Trainer's counters are traced through them.

    if TYPE_CHECKING:

        @property
        def lightning_module(self) -> Any:
            """The module, of either package."""

    @Strategy.optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        in_package(Strategy, self.package).optimizers.fset(self, optimizers)

    def setup_optimizers(self, trainer: Any) -> None:
        in_package(Strategy, self.package).setup_optimizers(self, trainer)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return in_package(Strategy, self.package).optimizer_state(self, optimizer)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return in_package(Strategy, self.package).optimizer_step(self, optimizer, *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return in_package(Strategy, self.package).load_checkpoint(self, checkpoint_path, *args, **kwargs)

    if not TYPE_CHECKING:

        @property
        def model_sharded_context(self) -> Callable[[], AbstractContextManager[None]]:
            # Lightning asks whether it is overridden, and compares its code with that of the package's own.
            return in_package(Strategy, self.package).model_sharded_context.__get__(self)


class EitherSingleDeviceStrategy(SingleDeviceStrategy, EitherStrategy):
    """Lightning's `SingleDeviceStrategy`, for a Trainer of either package."""


class EitherDDPStrategy(DDPStrategy, EitherStrategy):
    """Lightning's `DDPStrategy`, for a Trainer of either package."""

    def _configure_launcher(self) -> None:
        configure_launcher(in_package(DDPStrategy, self.package), self)

    def setup_distributed(self) -> None:
        in_package(DDPStrategy, self.package).setup_distributed(self)

    def configure_ddp(self) -> None:
        in_package(DDPStrategy, self.package).configure_ddp(self)


def register_as_subclasses() -> None:
    """Makes the checks of `pytorch_lightning` for its own strategies hold for these."""
    for own, either in ((SingleDeviceStrategy, EitherSingleDeviceStrategy), (DDPStrategy, EitherDDPStrategy)):
        in_package(own, PYTORCH_LIGHTNING).register(either)
