"""What all strategies of several processes do alike: they join, say which of them fails and why, and end together."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError

from lit_ort.errors import OptionsError, RankError, UnsupportedError
from lit_ort.options import ORTOptions
from lit_ort.strategies.mixins import ORTMixin

# What gloo says when another process has gone or doesn't answer.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")


class ProcessesMixin(ORTMixin):
    """Stands before Lightning's DDPStrategy, which starts processes and joins them.

    Args:
        arguments: options of `ORTOptions`, and arguments of Lightning's strategy and of `takers`, by name.
        own: names of the strategy's own arguments, for the message on one that is unknown.
        takers: to which of them a strategy hands arguments on, beside Lightning's.
    """

    def __init__(
        self, arguments: Mapping[str, Any], own: tuple[str, ...], takers: tuple[Callable[..., Any], ...] = ()
    ) -> None:
        options, others = _sorted(arguments, own, (_lightning_strategy(type(self)).__init__, *takers))
        if options.get("optimizer_in_graph"):
            raise OptionsError(
                f"optimizer_in_graph=True updates parameters before strategy={self.strategy_name!r} has combined "
                "gradients. Leave it out."
            )
        super().__init__(options, **others)

    @property
    def rank(self) -> int:
        return self.global_rank

    def setup_distributed(self) -> None:
        environment = self.cluster_environment
        try:
            super().setup_distributed()
        except DistError as error:
            place = f"{environment.main_address}:{environment.main_port}"
            raise RankError(
                f"rank {self.global_rank} of {self.world_size} could not join the others at {place}: "
                f"{str(error).rstrip('.')}. Check that rank 0 runs there, that MASTER_ADDR and MASTER_PORT are the "
                "same for all ranks, and that no firewall is between them."
            ) from error

    def setup(self, trainer: Any) -> None:
        if self._layer_sync is not None or _synchronizes(self.lightning_module):
            raise UnsupportedError(
                "SyncBatchNorm has no kernel for the CPU in PyTorch. Use sync_batchnorm=False, whose statistics are "
                "those of each rank's own part of a batch, or GroupNorm or LayerNorm."
            )
        super().setup(trainer)
        # Lightning registers it after this.
        trainer._signal_connector._sigterm_notifier_fn = partial(_stop_after_the_batch, trainer)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if not dist.is_initialized():
            return
        trainer = self.lightning_module._trainer  # none before it has begun
        when = "before training" if trainer is None else f"at step {trainer.global_step}"
        head = f"lit_ort: rank {self.global_rank} of {self.world_size} stops {when}: "
        print(head + _cause(exception), file=sys.stderr, flush=True)
        if self.launcher is not None:
            # Lightning leaves those that it started running, and one that waits for this rank waits long.
            self.launcher.kill(signal.SIGKILL)


class Unwrapped:
    """Stands right before Lightning's DDPStrategy where no DistributedDataParallel is wanted: a module whose processes
    have different parts of it.
    """

    def setup(self: Any, trainer: Any) -> None:
        super(_lightning_strategy(type(self)), self).setup(trainer)  # type: ignore[misc]
        if self.distributed_sampler_kwargs["num_replicas"] == 1:
            # Every process reads the same batches, those of one process.
            trainer._accelerator_connector.use_distributed_sampler = False

    def _setup_model(self, model: Any) -> Any:
        return model


def _stop_after_the_batch(trainer: Any, signum: int, _: Any) -> None:
    """What a rank does when it is told to end; processes that it started are told as well.

    Lightning's own handler waits for a broadcast at once, and so for ever if another rank waits for this one's part of
    the step: a rank reads signals again when it has it.
    """
    connector = trainer._signal_connector
    if not connector.received_sigterm and trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signum)
    connector.received_sigterm = True


def take_from_first(module: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """All of a group begin with the parameters and buffers of its first process."""
    first = dist.get_global_rank(group, 0)
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), first, group=group)


def _cause(exception: BaseException) -> str:
    """One line on what went wrong; another rank's fault is told from one's own."""
    said = f"{type(exception).__name__}: {exception}".strip().splitlines()[0]
    if any(sign in str(exception) for sign in _LOST):
        return (
            f"it lost another rank, or waited for it longer than the timeout ({said}). That rank's own line says why; "
            "one that has no line hangs, or died without a word."
        )
    return said


def _lightning_strategy(strategy: type[Any]) -> type[Any]:
    """Lightning's own class among the bases, of whichever package."""
    return next(part for part in strategy.__mro__ if part.__name__ == "DDPStrategy")


def _sorted(
    arguments: Mapping[str, Any], own: tuple[str, ...], takers: tuple[Callable[..., Any], ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options, and arguments that are handed on."""
    options = {field.name for field in fields(ORTOptions)}
    signatures = (inspect.signature(taker) for taker in takers)
    others = {name for signature in signatures for name in signature.parameters} - _NOT_GIVEN
    unknown = sorted(arguments.keys() - options - others)
    if unknown:
        raise OptionsError(
            f"Unknown argument {unknown[0]!r}. There are {', '.join([*own, *sorted(options), *sorted(others)])}."
        )
    given = {name: value for name, value in arguments.items() if name in options}
    return given, {name: value for name, value in arguments.items() if name in others}


# Parameters that nobody gives: a strategy fills them in itself.
_NOT_GIVEN = frozenset({"self", "kwargs", "module", "device_ids", "output_device", "dim"})


def _synchronizes(module: torch.nn.Module) -> bool:
    return any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())
