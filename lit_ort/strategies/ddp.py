"""`strategy="ort_ddp"`: several processes, each with its part of a batch; gradients are averaged between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch._dynamo
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lit_ort.distributed.adasum import AdaSum, adasum_hook, require_power_of_two
from lit_ort.errors import OptionsError, UnsupportedError
from lit_ort.options import require_bool
from lit_ort.strategies.processes import ProcessesMixin

_FIRST_BUCKET = "_DEFAULT_FIRST_BUCKET_BYTES"


class DDPMixin(ProcessesMixin):
    """Everything of `ORTDDPStrategy` but the package of Lightning's that it comes on."""

    strategy_name = "ort_ddp"

    def __init__(self, *, overlap: bool = False, adasum: bool = False, **arguments: Any) -> None:
        require_bool("overlap", overlap)
        require_bool("adasum", adasum)
        self._overlap = overlap
        self._adasum = adasum
        if self._adasum and arguments.get("ddp_comm_hook") is not None:
            raise OptionsError("adasum=True is a ddp_comm_hook, and another one is given. Leave one of them out.")
        super().__init__(arguments, ("overlap", "adasum"), (DistributedDataParallel.__init__,))

    def setup_distributed(self) -> None:
        if self._adasum:
            require_power_of_two(self.num_nodes * self.num_processes)
        super().setup_distributed()

    def setup(self, trainer: Any) -> None:
        if self._ddp_kwargs.get("static_graph") and trainer.accumulate_grad_batches != 1:
            raise UnsupportedError(
                f"static_graph=True with accumulate_grad_batches={trainer.accumulate_grad_batches}: "
                "DistributedDataParallel fails there, in eager too. Leave static_graph out."
            )
        super().setup(trainer)

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
