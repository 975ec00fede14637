"""`strategy="ort_tensor"`: each process has a shard of every large layer; all processes run the same batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from lit_ort._compat.lightning import plain_optimizer
from lit_ort.distributed import merged_state
from lit_ort.distributed.clipping import with_shared_norm
from lit_ort.distributed.tensor_parallel import Shard, cut_of, cuts, require_equal_gradients, shard
from lit_ort.errors import UnsupportedError
from lit_ort.strategies.arguments import ProcessArguments
from lit_ort.strategies.either_package import EitherDDPStrategy
from lit_ort.strategies.processes import ProcessesMixin, Unwrapped, draw_as_first, take_from_first

_MARK = "_lit_ort_shard"

# Optimizers whose update of an element depends only on that element's gradient and state, so that a shard of a
# parameter is updated as in the whole parameter.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


class ORTTensorStrategy(ProcessesMixin, Unwrapped, EitherDDPStrategy):
    """Trains a module with a shard of the layers that its `tensor_plan()` names on each process (Megatron-LM).

    Sums over processes are operators of the step's graph, which stays one graph. Every process reads the same batches,
    and dropout in a sharded layer is the same on all processes. Checkpoints have the form of a single process.

    Raises:
        OptionsError: an invalid value.
        UnsupportedError: no plan, a layer that can't be divided ...
        RankError: a process could not join the others.
    """

    strategy_name = "ort_tensor"
    # Optimizer steps whose gradients are compared between the processes: the first one of each optimizer.
    _unchecked_steps = 0

    def __init__(
        self,
        **arguments: Unpack[ProcessArguments],
    ) -> None:
        """Takes options of the engine and arguments of Lightning's strategy.

        Args:
            arguments: those of `lit_ort.ORTOptions` but `optimizer_in_graph`, `fused_optimizer`, and those of
                Lightning's `DDPStrategy` about processes: see `lit_ort.strategies.arguments.ProcessArguments`.
        """
        super().__init__(
            arguments,
        )

    @property
    def rank(self) -> int:
        # For values that all ranks have, dropout has to be the same on all ranks.
        return 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        if _MARK not in module.__dict__:
            self._shard_module(module)
        super().setup(trainer)
        draw_as_first(_world())
        self.precision_plugin = with_shared_norm(
            self.precision_plugin, _world(), lambda parameter: cut_of(parameter) is not None
        )

    def _shard_module(self, module: Any) -> None:
        plan = getattr(module, "tensor_plan", None)
        if plan is None:
            raise UnsupportedError(
                f"strategy='ort_tensor' shards the layers that {type(module).__name__}.tensor_plan() names, but there "
                "is no such method. Add one (docs/scaling.md), or use strategy='ort_ddp'."
            )
        group = _world()
        take_from_first(module, group)
        part = Shard(group.group_name, group.rank(), group.size())
        shard(module, plan(), part)
        module.__dict__[_MARK] = part

    def on_train_start(self) -> None:
        # Callbacks can draw in one process alone.
        draw_as_first(_world())
        super().on_train_start()

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            _require_elementwise(optimizer)
        self._unchecked_steps = len(self.optimizers)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().optimizer_step(*args, **kwargs)
        if self._unchecked_steps:
            self._unchecked_steps -= 1
            require_equal_gradients(self.lightning_module.named_parameters(), _world())
        return loss

    # Checkpoints have the form of a single process.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        own = super().lightning_module_state_dict()
        parts = merged_state.gathered(own, _world())
        if not self.is_global_zero:
            return own
        cut_by_name = dict(cuts(self.lightning_module))
        return {name: _whole(cut_by_name.get(name), [part[name] for part in parts]) for name in own}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        part = self.lightning_module.__dict__.get(_MARK)
        cut_by_name = dict(cuts(self.lightning_module))
        own = {
            name: cut_by_name[name].part(value, part.rank, part.size) if name in cut_by_name else value
            for name, value in checkpoint["state_dict"].items()
        }
        super().load_model_state_dict({"state_dict": own}, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = plain_optimizer(optimizer)
        own = optimizer.state_dict()
        parts = merged_state.gathered(own["state"], _world())
        if not self.is_global_zero:
            return {}
        shards = _cuts_by_index(optimizer)
        whole = {index: _merged(shards[index], [part[index] for part in parts]) for index in own["state"]}
        return {**own, "state": whole}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        part = self.lightning_module.__dict__[_MARK]
        states = []
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            shards = _cuts_by_index(optimizer)
            own = {index: _own(shards[index], values, part) for index, values in state["state"].items()}
            states.append({**state, "state": own})
        super().load_optimizer_state_dict({"optimizer_states": states})


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the Trainer calls setup_environment() first"
    return group


def _require_elementwise(optimizer: Optimizer) -> None:
    known = isinstance(optimizer, _ELEMENTWISE) or getattr(optimizer, "elementwise", False)
    if not known and any(cut is not None for cut, _ in _cuts_by_index(optimizer)):
        raise UnsupportedError(
            f"strategy='ort_tensor' lets each process update its shards of parameters, but {type(optimizer).__name__} "
            f"may need whole parameters (as LAMB and Adafactor do). Use {', '.join(c.__name__ for c in _ELEMENTWISE)}, "
            "or set its attribute elementwise = True if its update of an element depends only on that element's "
            "gradient and state."
        )


def _whole(cut: Any, parts: list[Any]) -> Any:
    return parts[0] if cut is None else cut.whole(parts)


def _cuts_by_index(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """The cut of each parameter, or None, and its shape on this process, in the order of an optimizer's state."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [(cut_of(parameter), parameter.shape) for parameter in parameters]


def _merged(cut_and_shape: tuple[Any, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A parameter's state, merged from all ranks. Values of the parameter's shape are sharded as the parameter is."""
    cut, shape = cut_and_shape
    return {
        name: _whole(cut if getattr(value, "shape", None) == shape else None, [part[name] for part in parts])
        for name, value in parts[0].items()
    }


def _own(cut_and_shape: tuple[Any, Any], values: dict[str, Any], part: Shard) -> dict[str, Any]:
    cut, shape = cut_and_shape
    return {
        name: cut.part(value, part.rank, part.size)
        if cut is not None and isinstance(value, Tensor) and value.dim() == len(shape)
        else value
        for name, value in values.items()
    }
