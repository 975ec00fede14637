"""An optimizer whose state is sharded across ranks: ZeRO stage 1, with torch's ZeroRedundancyOptimizer.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020
(arXiv:1910.02054), stage 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from lit_ort._compat.torch_optim import note_step, sync_groups
from lit_ort.distributed.optimizer_copies import copy_of, depends_on_others
from lit_ort.errors import UnsupportedError


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Performs the same steps as `optimizer`; each rank updates a part of the parameters and broadcasts it to the
    others.

    All ranks must create it together, from an optimizer that has not stepped yet. Learning rate schedulers of
    `optimizer` act on this optimizer too, since both share their parameter groups.

    Args:
        optimizer: any torch optimizer that updates each parameter independently.

    Raises:
        UnsupportedError: the update of a parameter depends on others, or the parameters have several dtypes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS needs all parameters at once, but strategy='ort_zero1' shards them. Use another optimizer, or "
                "strategy='ort_ddp'."
            )
        if depends_on_others(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} updates a parameter by what the others are, such as a norm of all "
                "gradients, but strategy='ort_zero1' shards them. Use another optimizer or other settings of it, or "
                "strategy='ort_ddp'."
            )
        types = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
        if len(types) > 1:
            raise UnsupportedError(
                f"{type(optimizer).__name__} has parameters of dtypes {', '.join(sorted(map(str, types)))}, but "
                "strategy='ort_zero1' supports one dtype only. Use strategy='ort_ddp'."
            )
        self._whole = optimizer
        groups = [dict(group) for group in optimizer.param_groups]
        super().__init__(groups, self._copy_for)  # pyright: ignore[reportArgumentType] - used as a class
        self.defaults = optimizer.defaults
        optimizer.param_groups = self.param_groups
        optimizer.state.clear()

    def step(self, closure: Any = None, **arguments: Any) -> Any:
        loss = super().step(None if closure is None else partial(self._with_settings, closure), **arguments)
        note_step(self._whole)
        return loss

    def _with_settings(self, closure: Callable[[], Any]) -> Any:
        """Calls a closure, and passes on what it has set of the parameter groups, such as a learning rate."""
        loss = closure()
        sync_groups(self, self.optim)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of a complete optimizer, whether it was sharded or not, and keeps this rank's part."""
        super().load_state_dict(dict(state_dict))
        self._whole.param_groups = self.param_groups

    def _copy_for(self, groups: Iterable[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
        """A copy of the optimizer with other parameter groups, without its constructor, whose arguments are unknown."""
        part = copy_of(self._whole)
        part.param_groups = [dict(group) for group in groups]
        own = [parameter for group in part.param_groups for parameter in group["params"]]
        # Some optimizers create their state before the first step; that of other parameters is theirs to keep.
        states = self._whole.state
        part.state = defaultdict(dict, {parameter: states[parameter] for parameter in own if parameter in states})
        return part
