"""Strategies derive from `lightning.pytorch`; what depends on the package is done by the Trainer's."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from lightning_utilities.core.overrides import is_overridden

from lit_ort import ORTDDPStrategy, ORTPipelineStrategy, ORTStrategy
from lit_ort._compat.lightning import LIGHTNING, PYTORCH_LIGHTNING, in_package
from lit_ort.strategies.either_package import EitherDDPStrategy, EitherStrategy

EITHER = {Strategy: EitherStrategy, DDPStrategy: EitherDDPStrategy}
# What of Lightning's the other methods use. It is the same for objects of both packages: functions of tensors, modules
# and torch's optimizers, the states of a Trainer, which are equal to their names, and messages.
NEUTRAL = {
    "TrainerFn",
    "_DDPForwardRedirection",
    "_EmptyInit",
    "_ForwardRedirection",
    "_all_gather_ddp_if_available",
    "_augment_message",
    "_distributed_is_initialized",
    "_get_default_process_group_backend_for_device",
    "_optimizer_to_device",
    "_optimizers_to_device",
    "_register_ddp_comm_hook",
    "_sync_ddp_if_available",
    "_sync_module_states",
    "move_data_to_device",
    "prepare_for_backward",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "utils_rank_zero_only",
}
# Plugins that nobody chose, but `CompiledMixin` or a Trainer always does; torch's DistributedDataParallel; and a check
# for kinds of optimizers, to which a wrapped optimizer of either package belongs as the optimizer does.
OF_OTHER_METHODS = {
    "Strategy.checkpoint_io": {"TorchCheckpointIO", "_WrappingCheckpointIO"},
    "Strategy.precision_plugin": {"Precision"},
    "ParallelStrategy.block_backward_sync": {"pl"},
    "DDPStrategy._enable_model_averaging": {"LightningOptimizer"},
}


def functions_of(member: Any) -> list[Callable[..., Any]]:
    if isinstance(member, property):
        return [inspect.unwrap(function) for function in (member.fget, member.fset) if function is not None]
    member = getattr(member, "__func__", member)
    return [inspect.unwrap(member)] if inspect.isfunction(member) else []


def global_names(code: CodeType) -> Iterator[str]:
    yield from (str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from global_names(constant)


def lightnings(function: Any) -> set[str]:
    """The names of Lightning's functions, classes and modules that a function's code uses."""
    values = {name: function.__globals__.get(name) for name in global_names(function.__code__)}
    origins = {name: getattr(value, "__module__", getattr(value, "__name__", "")) for name, value in values.items()}
    return {name for name, origin in origins.items() if str(origin).startswith("lightning")}


def test_methods_that_depend_on_the_package_are_those_of_the_trainers() -> None:
    found = {}
    for kind in (Strategy, SingleDeviceStrategy, ParallelStrategy, DDPStrategy):
        for name, member in vars(kind).items():
            used = set().union(*map(lightnings, functions_of(member))) - NEUTRAL
            if used and name not in vars(EITHER.get(kind, object)):
                found[f"{kind.__name__}.{name}"] = used
    assert found == OF_OTHER_METHODS, "override the method in lit_ort/strategies/either_package.py"


@pytest.mark.parametrize("package", [LIGHTNING, PYTORCH_LIGHTNING])
def test_lightning_knows_which_contexts_are_its_own(package: str) -> None:
    own = in_package(Strategy, package)
    strategies = (ORTStrategy(), ORTDDPStrategy(), ORTPipelineStrategy())
    for strategy in strategies:
        strategy.package = package
    overriding = [type(strategy) for strategy in strategies if is_overridden("model_sharded_context", strategy, own)]
    assert overriding == [ORTPipelineStrategy]
    assert strategies[0].model_sharded_context.__func__ is own.model_sharded_context


@pytest.mark.parametrize("package", [LIGHTNING, PYTORCH_LIGHTNING])
def test_methods_of_the_trainers_package_can_be_called_with_any_strategy(package: str) -> None:
    """`super()` in them would require a subclass that is not only registered."""
    for kind, either in EITHER.items():
        for name in vars(either).keys() & vars(kind).keys():
            for function in functions_of(vars(in_package(kind, package))[name]):
                assert "__class__" not in function.__code__.co_freevars, f"{package}: {kind.__name__}.{name}"
