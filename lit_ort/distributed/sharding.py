"""An optimizer whose state is sharded among ranks: ZeRO's first stage, by torch's ZeroRedundancyOptimizer.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020
(arXiv:1910.02054), its stage 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from lit_ort._compat.torch_optim import note_step
from lit_ort.errors import UnsupportedError


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Steps as `optimizer` does, each rank for its part of the parameters, which it then sends to the others.

    All ranks create it together, from an optimizer that has not stepped. Schedules of `optimizer` act on this one: both
    have the same parameter groups.

    Args:
        optimizer: any optimizer of torch's kind that updates each parameter by itself.

    Raises:
        UnsupportedError: an optimizer that looks at all parameters at once, or parameters of several types.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS looks at all parameters at once, and strategy='ort_zero1' shards them. Use another "
                "optimizer, or strategy='ort_ddp'."
            )
        types = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
        if len(types) > 1:
            raise UnsupportedError(
                f"{type(optimizer).__name__} has parameters of types {', '.join(sorted(map(str, types)))}, and "
                "strategy='ort_zero1' shards those of one type. Use strategy='ort_ddp'."
            )
        self._whole = optimizer
        groups = [dict(group) for group in optimizer.param_groups]
        super().__init__(groups, self._part_of_it)  # pyright: ignore[reportArgumentType] - stands for a class
        self.defaults = optimizer.defaults
        optimizer.param_groups = self.param_groups

    def step(self, closure: Any = None, **arguments: Any) -> Any:
        loss = super().step(closure, **arguments)
        note_step(self._whole)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a whole optimizer, sharded before or not, and keeps this rank's part."""
        super().load_state_dict(dict(state_dict))
        self._whole.param_groups = self.param_groups

    def _part_of_it(self, groups: Iterable[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
        """The same optimizer over other groups. Not every constructor's argument could be read from an optimizer."""
        part = object.__new__(type(self._whole))
        part.__dict__.update(self._whole.__dict__)
        # A schedule's wrapper, which steps the whole one.
        part.__dict__.pop("step", None)
        part.state = defaultdict(dict)
        part.param_groups = [dict(group) for group in groups]
        return part
