"""`strategy="ort_tensor"`: each process has a part of every large layer; all work on the same batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from lit_ort.distributed import merged_state
from lit_ort.distributed.clipping import SharedNormPrecision
from lit_ort.distributed.tensor_parallel import Shard, cut_of, cuts, shard
from lit_ort.errors import UnsupportedError
from lit_ort.strategies.processes import ProcessesMixin, Unwrapped, take_from_first

_MARK = "_lit_ort_shard"

# Optimizers that update an element by its own gradient and state alone, so that a part of a parameter is updated as it
# would be in the whole.
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


class TensorMixin(ProcessesMixin):
    """Everything of `ORTTensorStrategy` but the package of Lightning's that it comes on."""

    strategy_name = "ort_tensor"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(arguments, ())

    @property
    def rank(self) -> int:
        """Zero: dropout of values that all ranks have has to be the same on all."""
        return 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        if _MARK not in module.__dict__:
            self._share_out(module)
        super().setup(trainer)
        self._precision_plugin = SharedNormPrecision(
            self.precision_plugin.precision, _world(), lambda parameter: cut_of(parameter) is not None
        )

    def _share_out(self, module: Any) -> None:
        plan = getattr(module, "tensor_plan", None)
        if plan is None:
            raise UnsupportedError(
                f"strategy='ort_tensor' shares out the layers that {type(module).__name__}.tensor_plan() names, and it "
                "has none. Add one (docs/scaling.md), or use strategy='ort_ddp'."
            )
        group = _world()
        take_from_first(module, group)
        part = Shard(group.group_name, group.rank(), group.size())
        shard(module, plan(), part)
        module.__dict__[_MARK] = part

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            _require_elementwise(optimizer)

    # Checkpoints are those of one process.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        own = super().lightning_module_state_dict()
        parts = merged_state.gathered(own, _world())
        if not self.is_global_zero:
            return own
        how = dict(cuts(self.lightning_module))
        return {name: _whole(how.get(name), [part[name] for part in parts]) for name in own}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        part = self.lightning_module.__dict__.get(_MARK)
        how = dict(cuts(self.lightning_module))
        own = {
            name: how[name].part(value, part.rank, part.size) if name in how else value
            for name, value in checkpoint["state_dict"].items()
        }
        super().load_model_state_dict({"state_dict": own}, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        own = optimizer.state_dict()
        parts = merged_state.gathered(own["state"], _world())
        if not self.is_global_zero:
            return {}
        how = _cuts_by_place(optimizer)
        whole = {place: _merged(how[place], [part[place] for part in parts]) for place in own["state"]}
        return {**own, "state": whole}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        part = self.lightning_module.__dict__[_MARK]
        states = []
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            how = _cuts_by_place(optimizer)
            own = {place: _own(how[place], values, part) for place, values in state["state"].items()}
            states.append({**state, "state": own})
        super().load_optimizer_state_dict({"optimizer_states": states})


class ORTTensorStrategy(TensorMixin, Unwrapped, DDPStrategy):
    """Trains a module of which each process has a part of the layers that its `tensor_plan()` names (Megatron-LM).

    Sums over processes are operators of the step's graph, which stays one graph. Every process reads the same batches,
    and dropout of a part of a layer is the same one on all. Checkpoints are those of one process.

    Args:
        arguments: options of `lit_ort.ORTOptions` and arguments of Lightning's `DDPStrategy`, by name.

    Raises:
        OptionsError: an unknown argument, or a value outside its rule.
        UnsupportedError: no plan, a layer that doesn't divide ...
        RankError: a process that could not join the others.
    """


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the Trainer calls setup_environment() first"
    return group


def _require_elementwise(optimizer: Optimizer) -> None:
    known = isinstance(optimizer, _ELEMENTWISE) or getattr(optimizer, "elementwise", False)
    if not known and any(cut is not None for cut, _ in _cuts_by_place(optimizer)):
        raise UnsupportedError(
            f"strategy='ort_tensor' lets each process update its parts of parameters, and {type(optimizer).__name__} "
            f"may look at whole ones (as LAMB and Adafactor do). Use {', '.join(c.__name__ for c in _ELEMENTWISE)}, "
            "or set its attribute elementwise = True if it updates each element by its own gradient and state alone."
        )


def _whole(cut: Any, parts: list[Any]) -> Any:
    return parts[0] if cut is None else cut.whole(parts)


def _cuts_by_place(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """How each parameter is cut, in the order of an optimizer's state, and its own shape."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [(cut_of(parameter), parameter.shape) for parameter in parameters]


def _merged(how: tuple[Any, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A parameter's state of all ranks: what has the parameter's shape is cut as it is."""
    cut, shape = how
    return {
        name: _whole(cut if getattr(value, "shape", None) == shape else None, [part[name] for part in parts])
        for name, value in parts[0].items()
    }


def _own(how: tuple[Any, Any], values: dict[str, Any], part: Shard) -> dict[str, Any]:
    cut, shape = how
    return {
        name: cut.part(value, part.rank, part.size)
        if cut is not None and isinstance(value, Tensor) and value.dim() == len(shape)
        else value
        for name, value in values.items()
    }
