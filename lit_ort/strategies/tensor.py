"""`strategy="ort_tensor"`: each process has a part of every large layer; all work on the same batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision as PrecisionPlugin
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from lit_ort._compat.lightning import plain_optimizer
from lit_ort.distributed import merged_state
from lit_ort.distributed.clipping import SharedNormClipping, SharedNormPrecision
from lit_ort.distributed.tensor_parallel import Shard, cut_of, cuts, shard
from lit_ort.errors import UnsupportedError
from lit_ort.options import ORTOptions
from lit_ort.strategies.arguments import TIMEOUT, Dynamic, EngineName, Fallback, Precision, Recompute, StartMethod
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
    shared_norm_class: ClassVar[type[SharedNormClipping]] = SharedNormPrecision

    def __init__(
        self,
        *,
        precision: Precision = "32-true",
        fallback: Fallback = "warn",
        verify_first_step: bool = False,
        verify_every_n_steps: int | None = None,
        verify_tolerance: float = 1e-4,
        recompute: Recompute | None = None,
        dynamic: Dynamic = "auto",
        disable_passes: Sequence[str] = (),
        dump_dir: str | None = None,
        cache_dir: str | None = None,
        threads: int | None = None,
        allow_spinning: bool = False,
        engine: EngineName = "auto",
        keep_memory: bool = True,
        timeout: timedelta | None = TIMEOUT,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: PrecisionPlugin | None = None,
    ) -> None:
        """`lit_ort.ORTOptions` says more about the arguments from `precision` to `keep_memory`.

        Args:
            precision: what products and attention compute in; the Trainer's precision goes before it.
            fallback: a graph that can't run through ONNX Runtime runs in PyTorch with a warning, or is an error.
            verify_first_step: compare each graph's first run with eager, dropout off.
            verify_every_n_steps: the same at the first and every n-th run.
            verify_tolerance: the largest relative error that verification accepts.
            recompute: "layers" keeps less of each layer and computes the rest again in the backward; a float of 0 to 1
                is the share of activation memory to keep.
            dynamic: one graph for all sizes from the second one on, or one for each size.
            disable_passes: names of graph passes to leave out.
            dump_dir: folder that receives the ONNX file of every stage of every graph.
            cache_dir: folder that keeps compiled graphs for later runs.
            threads: of a session's operators; None takes torch's number.
            allow_spinning: let idle session threads spin.
            engine: which build of ONNX Runtime runs sessions, `training`, `stock`, or the one that is installed.
            keep_memory: let the C library keep freed memory for the next step.
            timeout: after which a process that waits for another one gives up.
            process_group_backend: of torch.distributed; None takes gloo.
            start_method: how Lightning starts the processes; "popen" runs the script again.
            accelerator: as in Lightning's `DDPStrategy`; the CPU's.
            parallel_devices: as in Lightning's `DDPStrategy`, which sets them from the Trainer's devices.
            cluster_environment: as in Lightning's `DDPStrategy`; what says which ranks there are.
            checkpoint_io: as in Lightning's `DDPStrategy`.
            precision_plugin: as in Lightning's `DDPStrategy`, for one of the precisions above.
        """
        super().__init__(
            ORTOptions(
                precision=precision,
                fallback=fallback,
                verify_first_step=verify_first_step,
                verify_every_n_steps=verify_every_n_steps,
                verify_tolerance=verify_tolerance,
                recompute=recompute,
                dynamic=dynamic,
                disable_passes=disable_passes,  # pyright: ignore[reportArgumentType] - becomes a tuple there
                dump_dir=dump_dir,
                cache_dir=cache_dir,
                threads=threads,
                allow_spinning=allow_spinning,
                engine=engine,
                keep_memory=keep_memory,
            ),
            timeout=timeout,
            process_group_backend=process_group_backend,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

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
            self._shard_module(module)
        super().setup(trainer)
        self.precision_plugin = self.shared_norm_class(
            self.precision_plugin.precision, _world(), lambda parameter: cut_of(parameter) is not None
        )

    def _shard_module(self, module: Any) -> None:
        plan = getattr(module, "tensor_plan", None)
        if plan is None:
            raise UnsupportedError(
                f"strategy='ort_tensor' shards the layers that {type(module).__name__}.tensor_plan() names, and it "
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
        optimizer = plain_optimizer(optimizer)
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

    Raises:
        OptionsError: a value outside its rule.
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
