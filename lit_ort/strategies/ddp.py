"""`strategy="ort_ddp"`: several processes, each with its part of a batch; gradients are averaged between them."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import DistError
from torch.nn.parallel import DistributedDataParallel

from lit_ort.distributed.adasum import AdaSum, adasum_hook, require_power_of_two
from lit_ort.errors import OptionsError, RankError, UnsupportedError
from lit_ort.options import ORTOptions
from lit_ort.strategies.mixins import ORTMixin

# What gloo says when another process has gone or doesn't answer.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")
_FIRST_BUCKET = "_DEFAULT_FIRST_BUCKET_BYTES"
# What the strategy itself hands to DistributedDataParallel.
_OWN_ARGUMENTS = frozenset({"self", "kwargs", "module", "device_ids", "output_device", "dim"})


class DDPMixin(ORTMixin):
    """Everything of `ORTDDPStrategy` but the package of Lightning's that it comes on."""

    strategy_name = "ort_ddp"

    def __init__(self, *, overlap: bool = False, adasum: bool = False, **arguments: Any) -> None:
        self._overlap = _flag("overlap", overlap)
        self._adasum = _flag("adasum", adasum)
        options, own = _sorted(type(self), arguments)
        if options.get("optimizer_in_graph"):
            raise OptionsError(
                f"optimizer_in_graph=True updates parameters before strategy={self.strategy_name!r} has combined "
                "gradients. Leave it out."
            )
        if self._adasum and own.get("ddp_comm_hook") is not None:
            raise OptionsError("adasum=True is a ddp_comm_hook, and another one is given. Leave one of them out.")
        super().__init__(options, **own)

    @property
    def rank(self) -> int:
        return self.global_rank

    # Before training: what can't work is said now.

    def setup_distributed(self) -> None:
        if self._adasum:
            require_power_of_two(self.num_nodes * self.num_processes)
        environment = self.cluster_environment
        try:
            super().setup_distributed()
        except DistError as error:
            place = f"{environment.main_address}:{environment.main_port}"
            raise RankError(
                f"rank {self.global_rank} of {self.world_size} could not join the others at {place}: {error}. Check "
                "that rank 0 runs there, that MASTER_ADDR and MASTER_PORT are the same for all ranks, and that no "
                "firewall is between them."
            ) from error

    def setup(self, trainer: Any) -> None:
        self._refuse(trainer)
        super().setup(trainer)

    def _refuse(self, trainer: Any) -> None:
        if self._layer_sync is not None or _synchronizes(self.lightning_module):
            raise UnsupportedError(
                "SyncBatchNorm has no kernel for the CPU in PyTorch. Use sync_batchnorm=False, whose statistics are "
                "those of each rank's own part of a batch, or GroupNorm or LayerNorm."
            )
        if self._ddp_kwargs.get("static_graph") and trainer.accumulate_grad_batches != 1:
            raise UnsupportedError(
                f"static_graph=True with accumulate_grad_batches={trainer.accumulate_grad_batches}: "
                "DistributedDataParallel fails there, in eager too. Leave static_graph out."
            )

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks for CUDA only.
        hook, state = (adasum_hook, AdaSum()) if self._adasum else (self._ddp_comm_hook, self._ddp_comm_state)
        if hook is None:
            return
        wrapper = self._ddp_comm_wrapper
        self.model.register_comm_hook(state, hook if wrapper is None else wrapper(hook))

    # A step goes through DistributedDataParallel's forward, which prepares the averaging of gradients.

    def _run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        module, wrapper = self.lightning_module, self.model
        if not isinstance(wrapper, DistributedDataParallel):
            return super()._run(step, *args, **kwargs)
        by_hand = not module.automatic_optimization
        run = super()._run

        def forward(*args: Any, **kwargs: Any) -> Any:
            del module.__dict__["forward"]
            with _one_graph() if not self._overlap else _graphs_by_bucket(wrapper):
                result = run(step, *args, **kwargs)
            if by_hand:  # manual_backward prepares it instead
                wrapper.require_backward_grad_sync = False
            return result

        module.__dict__["forward"] = forward
        try:
            return wrapper(*args, **kwargs)
        finally:
            module.__dict__.pop("forward", None)
            if by_hand:
                wrapper.require_backward_grad_sync = True

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if not dist.is_initialized():
            return
        step = self.lightning_module.trainer.global_step
        head = f"lit_ort: rank {self.global_rank} of {self.world_size} stops at step {step}: "
        print(head + _cause(exception), file=sys.stderr, flush=True)
        if self.launcher is not None:
            # Lightning leaves those that it started running, and one that waits for this rank waits long.
            self.launcher.kill(signal.SIGKILL)


class ORTDDPStrategy(DDPMixin, DDPStrategy):
    """Trains one module in several processes through ONNX Runtime, each with its part of a batch.

    Gradients are averaged by torch's DistributedDataParallel over gloo. Dropout differs between ranks; what else is
    random, data order too, follows Lightning's DDPStrategy.

    Args:
        overlap: cut each step's graph where DistributedDataParallel's buckets end (`bucket_cap_mb`), so that gradients
            travel during the backward. Off: one graph a step, whose gradients travel when it is done.
        adasum: combine gradients by AdaSum instead of averaging them, for a power of two of ranks.
        arguments: options of `lit_ort.ORTOptions`, arguments of Lightning's `DDPStrategy` (`timeout`,
            `process_group_backend` ...) and of torch's `DistributedDataParallel` (`find_unused_parameters`,
            `gradient_as_bucket_view`, `bucket_cap_mb` ...), by name.

    Raises:
        OptionsError: an unknown argument, or a value outside its rule.
        UnsupportedError: what isn't served: another accelerator, SyncBatchNorm, AdaSum over three ranks ...
        RankError: a process that could not join the others.
    """


def _one_graph() -> AbstractContextManager[Any]:
    return torch._dynamo.config.patch(optimize_ddp=False)


@contextmanager
def _graphs_by_bucket(wrapper: DistributedDataParallel) -> Iterator[None]:
    """Dynamo cuts a graph where a bucket's gradients are complete; it knows the first bucket's size by default only."""
    first = min(getattr(dist, _FIRST_BUCKET), wrapper.bucket_bytes_cap)
    with torch._dynamo.config.patch(optimize_ddp=True), patch.object(dist, _FIRST_BUCKET, first):
        yield


def _cause(exception: BaseException) -> str:
    """One line on what went wrong; another rank's fault is told from one's own."""
    said = f"{type(exception).__name__}: {exception}".strip().splitlines()[0]
    if any(sign in str(exception) for sign in _LOST):
        return (
            f"it lost another rank, or waited for it longer than the timeout ({said}). That rank's own line says why; "
            "one that has no line hangs, or died without a word."
        )
    return said


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionsError(f"{name}={value!r} is not a bool. Pass True or False.")
    return value


def _sorted(strategy: type[Any], arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options, and arguments of the classes below."""
    options = {field.name for field in fields(ORTOptions)}
    base = next(part for part in strategy.__mro__ if part.__name__ == "DDPStrategy")
    signatures = (inspect.signature(part.__init__) for part in (base, DistributedDataParallel))
    own = {name for signature in signatures for name in signature.parameters} - _OWN_ARGUMENTS
    unknown = sorted(arguments.keys() - options - own)
    if unknown:
        raise OptionsError(
            f"Unknown argument {unknown[0]!r}. There are overlap, adasum, the options "
            f"{', '.join(sorted(options))}, and {', '.join(sorted(own))}."
        )
    given = {name: value for name, value in arguments.items() if name in options}
    return given, {name: value for name, value in arguments.items() if name in own}


def _synchronizes(module: torch.nn.Module) -> bool:
    return any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())
