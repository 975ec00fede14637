"""`strategy="ort_pipeline"`: the stages of a model on several processes, which micro-batches pass through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from typing_extensions import Unpack

from lit_ort._compat.lightning import plain_optimizer
from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.distributed import merged_state
from lit_ort.distributed.clipping import with_shared_norm
from lit_ort.distributed.pipeline import Pipeline, Placement, placed, require_schedule
from lit_ort.errors import UnsupportedError
from lit_ort.options import require_count
from lit_ort.strategies.arguments import ProcessArguments, Schedule
from lit_ort.strategies.either_package import EitherDDPStrategy
from lit_ort.strategies.processes import ProcessesMixin, Unwrapped, draw_as_first, take_from_first


class ORTPipelineStrategy(ProcessesMixin, Unwrapped, EitherDDPStrategy):
    """Trains a module whose `configure_model` creates a `lit_ort.Pipeline`: each process has some of its stages.

    If there are more processes than `pipeline_size`, there are several pipelines, whose gradients are averaged.
    Checkpoints have the form of a single process, and any strategy can read them. Every process of a pipeline reads the
    same batches.

    Raises:
        OptionsError: an invalid value.
        UnsupportedError: stages that can't be divided among the processes, parameters outside of stages ...
        RankError: a process could not join the others.
    """

    strategy_name = "ort_pipeline"
    _placement: Placement | None = None

    def __init__(
        self,
        *,
        schedule: Schedule = "1f1b",
        micro_batches: int = 8,
        pipeline_size: int | None = None,
        **arguments: Unpack[ProcessArguments],
    ) -> None:
        """Takes options of the engine and arguments of Lightning's strategy.

        Args:
            schedule: "1f1b" (alternates forwards and backwards, with the least memory), "gpipe" (all forwards, then all
                backwards), or "interleaved" (1f1b with several stages per process).
            micro_batches: the number of parts of a batch, which pass through the stages one after the other.
            pipeline_size: the number of processes of one pipeline; None uses all.
            arguments: those of `lit_ort.ORTOptions` but `optimizer_in_graph`, `fused_optimizer`, and those of
                Lightning's `DDPStrategy` about processes: see `lit_ort.strategies.arguments.ProcessArguments`.
        """
        require_schedule(schedule)
        require_count("micro_batches", micro_batches)
        require_count("pipeline_size", pipeline_size, or_none_for="all processes")
        self._schedule = schedule
        self._micro_batches = micro_batches
        self._pipeline_size = pipeline_size
        super().__init__(
            arguments,
        )

    # The stages and batches of each process.

    def setup_distributed(self) -> None:
        ranks = self.num_nodes * self.num_processes
        size = self._pipeline_size or ranks
        if ranks % size:
            raise UnsupportedError(
                f"pipeline_size={size} doesn't divide the {ranks} processes into pipelines. Pass a divisor of {ranks}."
            )
        super().setup_distributed()
        mesh = init_device_mesh(self.root_device.type, (ranks // size, size), mesh_dim_names=("replicas", "stages"))
        self._placement = Placement(
            mesh.get_group("stages"),
            mesh.get_group("replicas"),
            self._schedule,
            self._micro_batches,
            self.root_device,
            self._compiled,
        )

    @property
    def placement(self) -> Placement:
        assert self._placement is not None, "the Trainer calls setup_environment() first"
        return self._placement

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        with placed(self.placement), super().model_sharded_context():
            yield

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        replicas = self.placement.replicas
        return {"num_replicas": replicas.size(), "rank": replicas.rank()}

    def setup(self, trainer: Any) -> None:
        _require_stages(self.lightning_module)
        super().setup(trainer)
        draw_as_first(self.placement.group)
        self.precision_plugin = with_shared_norm(self.precision_plugin, self.placement.group)
        take_from_first(self.lightning_module, self.placement.replicas)

    def on_train_start(self) -> None:
        # Callbacks can draw in one process alone.
        draw_as_first(self.placement.group)
        super().on_train_start()

    # A step itself is plain Python; the stages that it calls are compiled.

    def _run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        with dynamo_settings(step, self._strict, compile_log=self.compile_log):
            return getattr(self.lightning_module, step)(*args, **kwargs)

    def _compiled(self, stage: nn.Module, name: str) -> Callable[..., Any]:
        return torch.compile(stage, backend=self.backend_of(name))

    # Checkpoints have the form of a single process.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        own = super().lightning_module_state_dict()
        parts = merged_state.gathered(own, self.placement.group)
        return merged_state.merged_weights(parts) if self.is_global_zero else own

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        own = self.lightning_module.state_dict()
        part = {name: value for name, value in checkpoint["state_dict"].items() if name in own}
        super().load_model_state_dict({"state_dict": part}, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = plain_optimizer(optimizer)
        names = merged_state.names_by_group(optimizer, self.lightning_module)
        parts = merged_state.gathered((optimizer.state_dict(), names), self.placement.group)
        if not self.is_global_zero:
            return {}
        states, names_of_all = zip(*parts, strict=True)
        return merged_state.merged_optimizer(states, names_of_all)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        own = [merged_state.names_by_group(optimizer, self.lightning_module) for optimizer in self.optimizers]
        gathered: list[Any] = [None] * self.placement.size
        dist.all_gather_object(gathered, own, group=self.placement.group)
        states = [
            merged_state.part_of_optimizer(state, merged_state.merged_names([names[k] for names in gathered]), own[k])
            for k, state in enumerate(checkpoint["optimizer_states"])
        ]
        super().load_optimizer_state_dict({"optimizer_states": states})


def _parameters_of(loss: Callable[..., Any]) -> list[str]:
    return [name for name, _ in loss.named_parameters()] if isinstance(loss, nn.Module) else []


def _require_stages(module: nn.Module) -> None:
    pipelines = [(name, part) for name, part in module.named_modules() if isinstance(part, Pipeline)]
    inside = tuple(f"{name}." for name, _ in pipelines)
    outside = [name for name, _ in module.named_parameters() if not name.startswith(inside)]
    if not pipelines or outside:
        problem = f"{outside[0]} is outside of its stages" if pipelines else "it creates none"
        raise UnsupportedError(
            f"strategy='ort_pipeline' trains the stages of a lit_ort.Pipeline that {type(module).__name__} creates in "
            f"configure_model, but {problem}. Put all parameters into stages, or use strategy='ort_ddp'."
        )
    in_loss = [f"{name}.loss.{own}" for name, part in pipelines for own in _parameters_of(part.loss)]
    if in_loss:
        raise UnsupportedError(
            f"{in_loss[0]} is a parameter of a Pipeline's loss, which only the last stage's process computes. Put it "
            "into the last stage."
        )
    if any(part.placement is None for _, part in pipelines):
        raise UnsupportedError(
            f"{type(module).__name__} creates its lit_ort.Pipeline outside of configure_model, so that every process "
            "has all stages. Create it in configure_model."
        )
