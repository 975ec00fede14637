"""The common part of the strategies with several processes: they join, report which rank fails, and end together."""

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
    generator_states,
    leave_samplers_alone,
    note_sigterm,
    own_class_of,
    replace_sigterm_handler,
    set_generator_states,
    synchronizes_layers,
)
from lit_ort._compat.torch_distributed import end_with_parent
from lit_ort.errors import RankError, UnsupportedError
from lit_ort.strategies.arguments import ProcessArguments
from lit_ort.strategies.ort_mixin import ORTMixin

# Parts of gloo's errors about a process that has ended or doesn't answer.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")
# The environment variable with the process id of Lightning's launcher, in the processes that it starts.
_LAUNCHER = "LIT_ORT_LAUNCHER"


class ProcessesMixin(ORTMixin):
    """A mixin before Lightning's DDPStrategy, which starts the processes and connects them.

    These strategies don't have `optimizer_in_graph`, whose runs would update parameters before gradients are reduced.
    """

    arguments = ProcessArguments
    hands_on_code = False
    _trainer: Any = None

    @property
    def rank(self) -> int:
        return self.global_rank

    def _agreed(self, decision: bool) -> bool:
        return self.broadcast(decision)

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
            address = f"{environment.main_address}:{environment.main_port}"
            raise RankError(
                f"rank {self.global_rank} of {self.world_size} could not join the others at {address}: "
                f"{str(error).rstrip('.')}. Check that rank 0 runs there, that MASTER_ADDR and MASTER_PORT are the "
                "same for all ranks, and that no firewall is between them."
            ) from error

    def setup(self, trainer: Any) -> None:
        if synchronizes_layers(self) or _synchronizes(self.lightning_module):
            raise UnsupportedError(
                "SyncBatchNorm has no kernel for the CPU in PyTorch. Use sync_batchnorm=False, with the statistics of "
                "each rank's part of a batch, or GroupNorm or LayerNorm."
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
            # Lightning doesn't end the processes that it started, and they would wait for this rank until the timeout.
            self.launcher.kill(signal.SIGKILL)

    def teardown(self) -> None:
        super().teardown()
        self._trainer = None


class Unwrapped:
    """A mixin directly before Lightning's DDPStrategy that doesn't wrap the module in DistributedDataParallel.

    It is for strategies whose processes have different parts of the module.
    """

    def setup_environment(self: Any) -> None:
        super().setup_environment()  # type: ignore[misc]
        if self.distributed_sampler_kwargs["num_replicas"] == 1:
            # Every process reads the same batches, those of one process. Asking for the number of steps, as in
            # `configure_optimizers`, sets the dataloaders up.
            leave_samplers_alone(self.lightning_module.trainer)

    def setup(self: Any, trainer: Any) -> None:
        """Does what Lightning's single-process strategies do: DDPStrategy would give every process the same module."""
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()


@contextmanager
def _ending_with_launcher(environment: Any) -> Iterator[None]:
    """Ends this process together with its launcher while it waits to join it.

    Before Lightning handles signals, it would not notice, and would wait until the timeout. Later it loses its
    connection.
    """
    launcher = os.environ.get(_LAUNCHER)
    by_lightning = own_class_of(environment).__name__ == "LightningEnvironment"
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
    """Handles SIGTERM: the rank stops after the batch, and so do the processes that it started.

    Lightning's own handler immediately waits for a broadcast. That is a deadlock if another rank waits in a collective
    for this rank: a rank handles signals only after its collective.
    """
    if note_sigterm(trainer) and trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signum)


def draw_as_first(group: dist.ProcessGroup) -> None:
    """Sets Python's, NumPy's and torch's generators to the states of those of a group's first process.

    All then draw the same order of data.
    """
    states = [generator_states()]
    dist.broadcast_object_list(states, dist.get_global_rank(group, 0), group=group)
    set_generator_states(states[0])


def take_from_first(module: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcasts the parameters and buffers of a group's first process."""
    first = dist.get_global_rank(group, 0)
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), first, group=group)


def _cause(exception: BaseException) -> str:
    """One line about an exception, which distinguishes a failure of another rank from one of this rank."""
    line = f"{type(exception).__name__}: {exception}".strip().splitlines()[0]
    if any(sign in str(exception) for sign in _LOST):
        return (
            f"it lost another rank, or waited for it longer than the timeout ({line}). That rank's own line has the "
            "reason; a rank without a line hangs, or was killed."
        )
    return line


def _synchronizes(module: torch.nn.Module) -> bool:
    return any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())
