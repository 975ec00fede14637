"""A model cut into stages, of which each process of a pipeline keeps and runs its own.

Source: Huang et al., GPipe, 2019 (arXiv:1811.06965); Narayanan et al., PipeDream, 2019, and Megatron-LM, 2021
(arXiv:2104.04473), for one forward and one backward in turn and for several stages a process. The schedules are those
of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lit_ort._compat.torch_distributed import saved_micro_batches
from lit_ort.errors import OptionsError, SessionError, UnsupportedError
from lit_ort.runtime.random import SEEDS, draw_from, draw_seed

Compile = Callable[[nn.Module, str], Callable[..., Any]]
Loss = Callable[[Tensor, Tensor], Tensor]

GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED = "gpipe", "1f1b", "interleaved"
SCHEDULES = {
    GPIPE: "ScheduleGPipe",
    ONE_FORWARD_ONE_BACKWARD: "Schedule1F1B",
    INTERLEAVED: "ScheduleInterleaved1F1B",
}


@dataclass(frozen=True)
class Placement:
    """Where a process is among those that train together.

    group: the processes of its pipeline, in the order of stages.
    replicas: those that have the same stages, one of each pipeline; their gradients are averaged.
    schedule: one of `SCHEDULES`.
    micro_batches: parts of a batch that are under way at a time.
    device: where the process's stages are.
    compile: what runs a stage, from the stage and its name.
    """

    group: dist.ProcessGroup
    replicas: dist.ProcessGroup
    schedule: str
    micro_batches: int
    device: torch.device
    compile: Compile

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()


def require_schedule(schedule: object) -> None:
    """Raises OptionsError for a name that no schedule has."""
    if schedule not in SCHEDULES:
        raise OptionsError(f"schedule={schedule!r} is not one of {tuple(SCHEDULES)}. Choose one of them.")


_placement: ContextVar[Placement | None] = ContextVar("lit_ort_placement", default=None)


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Lets the pipelines that are created inside keep the stages of this process only."""
    token = _placement.set(placement)
    try:
        yield
    finally:
        _placement.reset(token)


class Pipeline(nn.Module):
    """Stages one after the other, and the loss of the last one's result. Belongs into `configure_model`.

    Under `strategy="ort_pipeline"` each process has its own stages, and a call runs the schedule over micro-batches; in
    a single process it has all of them, and a call runs one after the other. Both give the same loss and gradients, and
    the same names of parameters: `stages.<number>.<name in the stage>`.

    Args:
        stages: creates each stage; those of other processes are not created. Stages take and give tensors whose first
            dimension is the batch. Their random initial weights depend on torch's seed and their number alone.
        loss: the mean over a batch, float32[], from the last stage's result and the targets.

    Raises:
        UnsupportedError: as many stages as the processes can't share.
    """

    def __init__(self, stages: Sequence[Callable[[], nn.Module]], loss: Loss) -> None:
        super().__init__()
        self.count = len(stages)
        self.loss = loss
        self.placement = _placement.get()
        own = range(self.count) if self.placement is None else _own_stages(self.count, self.placement)
        self.stages = nn.ModuleDict({str(number): _initialized(stages[number], number) for number in own})
        # By sizes of a batch; each schedule has buffers for its own.
        self._schedules: dict[tuple[Any, ...], _Schedule] = {}
        self._runners: dict[int, Callable[..., Any]] = {}

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, float32[], on every process. inputs, targets: [batch, ...], the same ones on every
        process of a pipeline.

        In training the gradients are computed here, and reach the parameters in the loss's backward.
        """
        if self.placement is None:
            for stage in self.stages.values():
                inputs = stage(inputs)
            return self.loss(inputs, targets)
        backward = torch.is_grad_enabled() and self.training
        key = (inputs.shape, targets.shape, backward)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._schedules[key] = _Schedule(self, self.placement, len(inputs), backward)
        if not backward:
            return schedule.evaluate(inputs, targets)
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        loss, gradients = schedule.train(inputs, targets, parameters)
        return _Computed.apply(loss, gradients, *parameters)

    def runner(self, number: int) -> Callable[..., Any]:
        """Runs a stage; the last one takes targets too and gives the loss."""
        assert self.placement is not None
        if number not in self._runners:
            stage = self.stages[str(number)]
            held = self.placement.schedule == GPIPE
            part = _StageWithLoss(stage, self.loss, held) if number == self.count - 1 else stage
            self._runners[number] = self.placement.compile(part, f"stage_{number}")
        return self._runners[number]

    @property
    def in_flight(self) -> int:
        """The most micro-batches of which this process kept what their backwards need, so far."""
        return max((schedule.in_flight for schedule in self._schedules.values() if schedule.backward), default=0)


class _Computed(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (scale,) = outputs
        if not ctx.gradients:
            raise SessionError(
                "a pipeline's loss was run backward a second time, and its gradients are given away",
                remedy="Run the forward again.",
            )
        factor = scale.item()
        scaled = [g if g is None or factor == 1 else g.mul_(scale) for g in ctx.gradients]
        # No other reference is left, so that parameters take them over without a copy.
        ctx.gradients.clear()
        return None, None, *scaled


class _StageWithLoss(nn.Module):
    """The last stage.

    A graph with a scalar result computes gradients at once. Where a backward comes long after its forward, `held`, a
    result of one element keeps activations until then instead of gradients, which are larger.
    """

    def __init__(self, stage: nn.Module, loss: Loss, held: bool) -> None:
        super().__init__()
        self.stage = stage
        self.loss = loss
        self._shape = (1,) if held else ()

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.stage(hidden), targets).reshape(self._shape)


class _Part(nn.Module):
    """What torch's schedules call for a micro-batch of a stage.

    The last one gives its share of the batch's mean loss. Micro-batches have the same size for the others; where the
    batch doesn't divide, the last stage leaves out the rows that were added.
    """

    def __init__(self, pipeline: Pipeline, number: int, batch: int) -> None:
        super().__init__()
        self.stage = pipeline.stages[str(number)]
        self._run = pipeline.runner(number)
        self._number = number
        self._is_last = number == pipeline.count - 1
        self._batch = batch
        self.in_flight = 0
        # What torch's stage keeps for backwards to come, by micro-batch.
        self.kept: Mapping[int, Any] = {}

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        rows: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """targets, rows: of the last stage. seed: int64[1], in training, which all that is random follows from."""
        self.in_flight = max(self.in_flight, len(self.kept) + 1)
        if seed is None:
            return self._result(hidden, targets, rows)
        with draw_from(torch.Generator().manual_seed(int(seed)), self._number):
            return self._result(hidden, targets, rows)

    def _result(self, hidden: Tensor, targets: Tensor | None, rows: Tensor | None) -> Tensor:
        if not self._is_last:
            return self._run(hidden)
        assert targets is not None
        assert rows is not None
        count = int(rows)
        whole = count == len(hidden)
        loss = self._run(*((hidden, targets) if whole else (hidden[:count], targets[:count])))
        return (loss * (count / self._batch)).reshape(1)


class _Schedule:
    """A schedule of torch's over the stages of a process, for batches of one size."""

    def __init__(self, pipeline: Pipeline, placement: Placement, batch: int, backward: bool) -> None:
        if batch < placement.micro_batches:
            raise UnsupportedError(
                f"a batch of {batch} rows, and micro_batches={placement.micro_batches}: each needs a row. Give larger "
                "batches or fewer micro-batches; drop_last=True leaves a short last batch out."
            )
        # Its import takes a second, and only pipelines want it.
        from torch.distributed import pipelining

        self._placement = placement
        self.backward = backward
        self._parts = [_Part(pipeline, int(number), batch) for number in pipeline.stages]
        stages = [
            pipelining.PipelineStage(part, int(number), pipeline.count, placement.device, group=placement.group)
            for number, part in zip(pipeline.stages, self._parts, strict=True)
        ]
        for part, stage in zip(self._parts, stages, strict=True):
            part.kept = saved_micro_batches(stage)
        self._is_first = stages[0].is_first
        self._is_last = stages[-1].is_last
        schedule = getattr(pipelining, SCHEDULES[placement.schedule])
        self._schedule = schedule(
            stages if placement.schedule == INTERLEAVED else stages[0],
            placement.micro_batches,
            # Each micro-batch gives its share, so they are summed up.
            loss_fn=_share if backward else None,
            scale_grads=False,
        )
        rows = _balanced(batch, placement.micro_batches)
        self._rows = torch.tensor(rows)
        self._order = _places(rows)

    @property
    def in_flight(self) -> int:
        return sum(part.in_flight for part in self._parts)

    def train(
        self, inputs: Tensor, targets: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The loss, and the gradient of each of this process's parameters."""
        accumulated = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        losses: list[Tensor] = []
        self._step(inputs, targets, losses)
        gradients = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, accumulated, strict=True):
            parameter.grad = gradient
        self._average(gradients)
        return self._shared(losses), gradients

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        args, kwargs = self._arguments(inputs, targets)
        outputs = self._schedule.step(*args, **kwargs)
        return self._shared([] if outputs is None else [outputs])

    def _step(self, inputs: Tensor, targets: Tensor, losses: list[Tensor]) -> None:
        args, kwargs = self._arguments(inputs, targets)
        target = kwargs["rows"] if self._is_last else None
        # One draw a step: a schedule runs its stages once more at its first step, to learn the shapes, and a resumed
        # run has its first step elsewhere.
        generator = torch.Generator().manual_seed(draw_seed())
        kwargs["seed"] = torch.randint(SEEDS, (len(self._rows),), generator=generator)
        self._schedule.step(*args, target=target, losses=losses, return_outputs=False, **kwargs)

    def _arguments(self, inputs: Tensor, targets: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What this process hands to its stages: the first one takes the inputs, the last one the targets."""
        args = (inputs[self._order],) if self._is_first else ()
        return args, {"targets": targets[self._order], "rows": self._rows} if self._is_last else {}

    def _shared(self, losses: Sequence[Tensor]) -> Tensor:
        """The batch's loss, which the process of the last stage knows, on every process of the pipeline; averaged over
        pipelines.
        """
        group, replicas = self._placement.group, self._placement.replicas
        total = torch.stack([loss.detach().sum() for loss in losses]).sum() if self._is_last else torch.zeros(())
        # Not the last rank's to send: of interleaved stages too the last one is on it, and others add zero.
        dist.all_reduce(total, group=group)
        dist.all_reduce(total, group=replicas)
        return total / replicas.size()

    def _average(self, gradients: Sequence[Tensor | None]) -> None:
        replicas = self._placement.replicas
        if replicas.size() == 1:
            return
        present = [gradient for gradient in gradients if gradient is not None]
        works = [dist.all_reduce(gradient, group=replicas, async_op=True) for gradient in present]
        for work, gradient in zip(works, present, strict=True):
            assert work is not None
            work.wait()
            gradient.div_(replicas.size())


def _share(output: Tensor, rows: Tensor) -> Tensor:
    return output.sum()


def _balanced(batch: int, parts: int) -> list[int]:
    """Sizes of so many parts of a batch, as equal as can be."""
    return [len(part) for part in torch.arange(batch).tensor_split(parts)]


def _places(sizes: Sequence[int]) -> Tensor:
    """Which rows of a batch its micro-batches take; a short one takes its last row again, to the size of the others."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return torch.tensor(
        [start + min(k, size - 1) for start, size in zip(starts, sizes, strict=True) for k in range(max(sizes))]
    )


def _own_stages(count: int, placement: Placement) -> range:
    """Those of a process: neighbours in turn, so that of several none is next to another."""
    size, schedule = placement.size, placement.schedule
    if schedule == INTERLEAVED:
        if count % size or count == size:
            raise UnsupportedError(
                f"{count} stages for {size} processes, and schedule='interleaved' gives each process the same number "
                f"of them, two or more. Make {2 * size} stages, or choose schedule='1f1b'."
            )
    elif count != size:
        raise UnsupportedError(
            f"{count} stages for the {size} processes of a pipeline, and schedule={schedule!r} gives each process one. "
            f"Make {size} stages, set pipeline_size={count}, or choose schedule='interleaved' for several a process."
        )
    return range(placement.rank, count, size)


def _initialized(stage: Callable[[], nn.Module], number: int) -> nn.Module:
    """A stage with initial weights that are the same whichever process makes it, and whichever others it makes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + number)
        return stage()
