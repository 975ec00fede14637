"""What all strategies of several processes do alike: they join, say which of them fails and why, and end together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import DistError

from lit_ort._compat.lightning import (
    leave_samplers_alone,
    note_sigterm,
    replace_sigterm_handler,
    synchronizes_layers,
)
from lit_ort._compat.torch_distributed import end_with_parent
from lit_ort.errors import RankError, UnsupportedError
from lit_ort.strategies.mixins import ORTMixin

# What gloo says when another process has gone or doesn't answer.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")
# In the environment of processes that Lightning's launcher starts: the launcher's process.
_LAUNCHER = "LIT_ORT_LAUNCHER"


class ProcessesMixin(ORTMixin):
    """Stands before Lightning's DDPStrategy, which starts processes and joins them.

    No such strategy has `optimizer_in_graph`, whose runs would update parameters before gradients are combined.
    """

    _trainer: Any = None

    @property
    def rank(self) -> int:
        return self.global_rank

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_LAUNCHER] = str(os.getpid())

    def setup_distributed(self) -> None:
        environment = self.cluster_environment
        try:
            with _ending_with_launcher(environment):
                super().setup_distributed()
        except DistError as error:
            place = f"{environment.main_address}:{environment.main_port}"
            raise RankError(
                f"rank {self.global_rank} of {self.world_size} could not join the others at {place}: "
                f"{str(error).rstrip('.')}. Check that rank 0 runs there, that MASTER_ADDR and MASTER_PORT are the "
                "same for all ranks, and that no firewall is between them."
            ) from error

    def setup(self, trainer: Any) -> None:
        if synchronizes_layers(self) or _synchronizes(self.lightning_module):
            raise UnsupportedError(
                "SyncBatchNorm has no kernel for the CPU in PyTorch. Use sync_batchnorm=False, whose statistics are "
                "those of each rank's own part of a batch, or GroupNorm or LayerNorm."
            )
        super().setup(trainer)
        self._trainer = trainer
        replace_sigterm_handler(trainer, partial(_stop_after_the_batch, trainer))

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if not dist.is_initialized():
            return
        when = "before training" if self._trainer is None else f"at step {self._trainer.global_step}"
        head = f"lit_ort: rank {self.global_rank} of {self.world_size} stops {when}: "
        print(head + _cause(exception), file=sys.stderr, flush=True)
        if self.launcher is not None:
            # Lightning leaves those that it started running, and one that waits for this rank waits long.
            self.launcher.kill(signal.SIGKILL)

    def teardown(self) -> None:
        super().teardown()
        self._trainer = None


class Unwrapped:
    """Stands right before Lightning's DDPStrategy where no DistributedDataParallel is wanted: a module whose processes
    have different parts of it.
    """

    def setup(self: Any, trainer: Any) -> None:
        """What Lightning's strategies of one process do: DDPStrategy's own would make all processes' modules equal."""
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if self.distributed_sampler_kwargs["num_replicas"] == 1:
            # Every process reads the same batches, those of one process.
            leave_samplers_alone(trainer)


@contextmanager
def _ending_with_launcher(environment: Any) -> Iterator[None]:
    """Ends this process with the one that started it, for as long as it waits to join it.

    Nobody else tells it before Lightning handles signals, and it would wait for the whole timeout. Later on it loses
    its connection.
    """
    launcher = os.environ.get(_LAUNCHER)
    by_lightning = type(environment).__name__ == "LightningEnvironment"
    if not by_lightning or environment.local_rank() == 0 or launcher is None:
        yield
        return
    end_with_parent(signal.SIGTERM)
    if not _is_running(int(launcher)):
        rank = environment.global_rank()
        raise RankError(f"process {launcher}, which started rank {rank}, has ended before the ranks joined.")
    try:
        yield
    finally:
        end_with_parent(0)


def _is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _stop_after_the_batch(trainer: Any, signum: int, _: Any) -> None:
    """What a rank does when it is told to end; processes that it started are told as well.

    Lightning's own handler waits for a broadcast at once, and so for ever if another rank waits for this one's part of
    the step: a rank reads signals again when it has it.
    """
    if note_sigterm(trainer) and trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signum)


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
            "one that has no line hangs, or died without one."
        )
    return said


def _synchronizes(module: torch.nn.Module) -> bool:
    return any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())
