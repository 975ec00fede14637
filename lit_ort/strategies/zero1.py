"""`strategy="ort_zero1"`: as `ort_ddp`, with the optimizer's state sharded over the processes."""

from __future__ import annotations

from typing import Any

from lit_ort.strategies.ddp import ORTDDPStrategy


class ORTZero1Strategy(ORTDDPStrategy):
    """As `ORTDDPStrategy`, but each process keeps the optimizer's state for only its shard of the parameters (ZeRO-1).

    The module's optimizers and schedulers stay unchanged. Checkpoints contain the whole state; any number of processes
    and strategies without sharding can read them. The arguments are those of `ORTDDPStrategy`.

    Raises:
        UnsupportedError: an optimizer that can't be sharded, or a setting that `ORTDDPStrategy` does not support.
        OptionsError, RankError: as for `ORTDDPStrategy`.
    """

    strategy_name = "ort_zero1"

    def setup_optimizers(self, trainer: Any) -> None:
        # Importing torch's sharded optimizer compiles a dozen functional optimizers.
        from lit_ort.distributed.sharding import ShardedOptimizer

        super().setup_optimizers(trainer)
        self.optimizers = [
            optimizer if hasattr(optimizer, "consolidate_state_dict") else ShardedOptimizer(optimizer)
            for optimizer in self.optimizers
        ]

    def _own_optimizer(self, optimizer: Any) -> Any:
        return getattr(optimizer, "optim", optimizer)
