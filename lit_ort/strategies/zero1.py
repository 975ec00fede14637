"""`strategy="ort_zero1"`: as `ort_ddp`, with the optimizer's state sharded among the processes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lit_ort.strategies.ddp import DDPMixin


class Zero1Mixin(DDPMixin):
    """Everything of `ORTZero1Strategy` but the package of Lightning's that it comes on."""

    strategy_name = "ort_zero1"

    def setup_optimizers(self, trainer: Any) -> None:
        # torch's sharded optimizer compiles a dozen others when it is imported.
        from lit_ort.distributed.sharding import ShardedOptimizer

        super().setup_optimizers(trainer)
        self.optimizers = [
            optimizer if hasattr(optimizer, "consolidate_state_dict") else ShardedOptimizer(optimizer)
            for optimizer in self.optimizers
        ]


class ORTZero1Strategy(Zero1Mixin, DDPStrategy):
    """As `ORTDDPStrategy`, and each process keeps the optimizer's state of its part of the parameters only (ZeRO 1).

    The module's optimizers stay as they are, and so do schedules. Checkpoints have the whole state, and are read by any
    number of processes and by strategies that don't shard it. The arguments are those of `ORTDDPStrategy`.

    Raises:
        UnsupportedError: an optimizer that can't be sharded, and what `ORTDDPStrategy` refuses.
        OptionsError, RankError: as of `ORTDDPStrategy`.
    """
