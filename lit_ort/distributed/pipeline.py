"""Pipeline parallelism: a model split into stages; each process stores and runs only its own stages.

Source: Huang et al., GPipe, 2019 (arXiv:1811.06965); Narayanan et al., PipeDream, 2019, and Megatron-LM, 2021
(arXiv:2104.04473), for the 1F1B schedule and the interleaved one with several stages for each process. The schedules
are those of torch.distributed.pipelining.
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
from lit_ort.distributed.loss_weights import Weight, weight_of
from lit_ort.errors import OptionsError, SessionError, UnsupportedError
from lit_ort.runtime.random import SEEDS, SeedSource, draw_from, draw_seed, seeded

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
    """The role of a process in pipeline-parallel training.

    Args:
        group: the processes of its pipeline, in the order of stages.
        replicas: the processes with the same stages, one of each pipeline; their gradients are averaged.
        schedule: one of `SCHEDULES`.
        micro_batches: the number of micro-batches of a batch.
        device: the device of the process's stages.
        compile: compiles a stage; it receives the stage and its name.
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
    """Raises OptionsError for an unknown schedule."""
    if schedule not in SCHEDULES:
        raise OptionsError(f"schedule={schedule!r} is not one of {tuple(SCHEDULES)}. Choose one of them.")


_placement: ContextVar[Placement | None] = ContextVar("lit_ort_placement", default=None)


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Makes pipelines that are created in this context keep only the stages of this process."""
    token = _placement.set(placement)
    try:
        yield
    finally:
        _placement.reset(token)


class Pipeline(nn.Module):
    """A sequence of stages and a loss of the last stage's output. Must be created in `configure_model`.

    Under `strategy="ort_pipeline"`, each process has its own stages, and a call runs the schedule over micro-batches.
    In a single process it has all stages, and a call runs them in sequence. Loss, gradients and names of parameters
    (`stages.<number>.<name in the stage>`) are the same in both cases.

    Args:
        stages: functions that create the stages; stages of other processes are not created. The input and the output of
            a stage are tensors whose first dimension is the batch. The random initial weights of a stage depend only on
            torch's seed and the stage's number.
        loss: returns the mean over a batch, float32[], from the last stage's output and the targets. It has no
            parameters.
        weight: returns how much targets weigh in the mean, a number. None counts rows, and for torch's cross entropies
            the targets that aren't ignored, with the weights of their classes. Pass it if your own loss leaves out
            targets, such as those of padding: `lambda targets: (targets != 0).sum()`.

    Raises:
        UnsupportedError: the number of stages doesn't fit the number of processes.
        OptionsError: the loss is not a mean.
    """

    def __init__(self, stages: Sequence[Callable[[], nn.Module]], loss: Loss, weight: Weight | None = None) -> None:
        super().__init__()
        self.count = len(stages)
        self.loss = loss
        self.weight = weight or weight_of(loss)
        self.placement = _placement.get()
        own = range(self.count) if self.placement is None else _own_stages(self.count, self.placement)
        self.stages = nn.ModuleDict({str(number): _initialized(stages[number], number) for number in own})
        # By the shapes of a batch; each schedule has buffers for its shapes.
        self._schedules: dict[tuple[Any, ...], _Schedule] = {}
        self._runners: dict[int, Callable[..., Any]] = {}

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of a batch, float32[], on every process.

        In training, the gradients are computed here and accumulated into the parameters in the backward of the loss.

        Args:
            inputs, targets: [batch, ...], the same on every process of a pipeline.
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
        if not parameters:
            # Lightning calls the loss's backward in all processes.
            parameters, gradients = [torch.zeros((), requires_grad=True)], [None]
        return _LossWithGradients.apply(loss, gradients, *parameters)

    def runner(self, number: int) -> Callable[..., Any]:
        """Returns the compiled stage; the last stage also accepts targets and returns the loss."""
        assert self.placement is not None
        if number not in self._runners:
            stage = self.stages[str(number)]
            delayed = self.placement.schedule == GPIPE
            module = _StageWithLoss(stage, self.loss, delayed) if number == self.count - 1 else stage
            self._runners[number] = self.placement.compile(module, f"stage_{number}")
        return self._runners[number]

    @property
    def in_flight(self) -> int:
        """The largest number of micro-batches so far whose saved tensors this process kept at the same time."""
        return max((schedule.in_flight for schedule in self._schedules.values() if schedule.backward), default=0)


class _LossWithGradients(torch.autograd.Function):
    """A loss whose gradients are already computed."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (scale,) = outputs
        if not ctx.gradients:
            raise SessionError(
                "backward() was called a second time on a pipeline's loss, but its gradients are already freed",
                remedy="Run the forward again.",
            )
        factor = scale.item()
        scaled = [g if g is None or factor == 1 else g.mul_(scale) for g in ctx.gradients]
        # Without another reference, autograd stores the gradients in the parameters without a copy.
        ctx.gradients.clear()
        return None, None, *scaled


class _StageWithLoss(nn.Module):
    """The last stage with the loss.

    A graph with a scalar result computes its gradients in the forward. If the backward runs long after the forward
    (`delayed`), a result of shape [1] is returned instead: then the activations are kept until the backward, which are
    smaller than the gradients.
    """

    def __init__(self, stage: nn.Module, loss: Loss, delayed: bool) -> None:
        super().__init__()
        self.stage = stage
        self.loss = loss
        self._shape = (1,) if delayed else ()

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.stage(hidden), targets).reshape(self._shape)


class _ScheduledStage(nn.Module):
    """A stage as torch's schedules call it, once for each micro-batch.

    The last stage returns the micro-batch's share of the batch's mean loss. Micro-batches must have the same size, so
    if the batch size is not divisible, rows are added, which the last stage ignores.
    """

    def __init__(self, pipeline: Pipeline, number: int) -> None:
        super().__init__()
        self.stage = pipeline.stages[str(number)]
        self._run = pipeline.runner(number)
        self._number = number
        self._is_last = number == pipeline.count - 1
        # Before the first call, which is torch's for the shapes, with values of no meaning.
        self._buffers_before: list[Tensor] | None = None
        self.in_flight = 0
        # The values that torch's stage saved for pending backwards, by micro-batch.
        self.saved: Mapping[int, Any] = {}

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        rows: Tensor | None = None,
        share: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Runs the stage on one micro-batch.

        Args:
            hidden: the inputs of the batch or the previous stage's output.
            targets: for the last stage.
            rows: for the last stage: int64[1], the number of the micro-batch's rows that were not added.
            share: for the last stage: float[1], the micro-batch's weight in the batch's mean loss.
            seed: in training: int64[1], the seed of all random numbers.
        """
        self.in_flight = max(self.in_flight, len(self.saved) + 1)
        self._keep_buffers()
        if seed is None:
            return self._result(hidden, targets, rows, share)
        source = SeedSource(torch.Generator().manual_seed(int(seed)), self._number)
        with seeded(int(seed), self._number, hidden.device), draw_from(source):
            return self._result(hidden, targets, rows, share)

    def _keep_buffers(self) -> None:
        """Undoes what the first call has written into buffers, such as statistics of batch normalizations."""
        if self._buffers_before is None:
            self._buffers_before = [buffer.clone() for buffer in self.stage.buffers()]
        elif self._buffers_before:
            for buffer, before in zip(self.stage.buffers(), self._buffers_before, strict=True):
                buffer.detach().copy_(before)
            self._buffers_before = []

    def _result(self, hidden: Tensor, targets: Tensor | None, rows: Tensor | None, share: Tensor | None) -> Tensor:
        if not self._is_last:
            return self._run(hidden)
        assert targets is not None
        assert rows is not None
        assert share is not None
        count = int(rows)
        if not float(share):
            # The mean over no targets is not a number.
            return _zero_of(hidden[:count])
        is_full = count == len(hidden)
        loss = self._run(*((hidden, targets) if is_full else (hidden[:count], targets[:count])))
        return (loss * float(share)).reshape(1)


class _Schedule:
    """One of torch's schedules over the stages of a process, for batches of one shape."""

    def __init__(self, pipeline: Pipeline, placement: Placement, batch: int, backward: bool) -> None:
        if batch < placement.micro_batches:
            raise UnsupportedError(
                f"a batch has {batch} rows, but micro_batches={placement.micro_batches}, and each micro-batch needs a "
                "row. Use larger batches or fewer micro-batches; drop_last=True drops a short last batch."
            )
        # This import takes a second, and only pipelines need it.
        from torch.distributed import pipelining

        self._placement = placement
        self.backward = backward
        self._weight = pipeline.weight
        self._stage_modules = [_ScheduledStage(pipeline, int(number)) for number in pipeline.stages]
        stages = [
            pipelining.PipelineStage(module, int(number), pipeline.count, placement.device, group=placement.group)
            for number, module in zip(pipeline.stages, self._stage_modules, strict=True)
        ]
        for module, stage in zip(self._stage_modules, stages, strict=True):
            module.saved = saved_micro_batches(stage)
        self._is_first = stages[0].is_first
        self._is_last = stages[-1].is_last
        schedule = getattr(pipelining, SCHEDULES[placement.schedule])
        try:
            self._schedule = schedule(
                stages if placement.schedule == INTERLEAVED else stages[0],
                placement.micro_batches,
                # The losses of micro-batches are shares of the mean, so their sum is the batch's loss.
                loss_fn=_share if backward else None,
                scale_grads=False,
            )
        except ValueError as error:
            raise UnsupportedError(
                f"schedule={placement.schedule!r} with micro_batches={placement.micro_batches} and {pipeline.count} "
                f"stages: {error}. Use another number of micro-batches, such as {2 * pipeline.count}."
            ) from error
        rows = _balanced(batch, placement.micro_batches)
        self._rows = torch.tensor(rows)
        self._order = _row_indices(rows)

    @property
    def in_flight(self) -> int:
        return sum(module.in_flight for module in self._stage_modules)

    def train(
        self, inputs: Tensor, targets: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the loss, and the gradient of each of this process's parameters."""
        accumulated = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        losses: list[Tensor] = []
        self._step(inputs, targets, losses)
        gradients = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, accumulated, strict=True):
            parameter.grad = gradient
        self._average(gradients, parameters)
        return self._shared(losses), gradients

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        args, kwargs = self._arguments(inputs, targets)
        outputs = self._schedule.step(*args, **kwargs)
        return self._shared([] if outputs is None else [outputs])

    def _step(self, inputs: Tensor, targets: Tensor, losses: list[Tensor]) -> None:
        args, kwargs = self._arguments(inputs, targets)
        target = kwargs["rows"] if self._is_last else None
        # One draw for each step, independent of the number of runs of a stage: at its first step, a schedule runs the
        # stages once more to infer shapes, and a resumed run has another first step.
        generator = torch.Generator().manual_seed(draw_seed())
        kwargs["seed"] = torch.randint(SEEDS, (len(self._rows),), generator=generator)
        self._schedule.step(*args, target=target, losses=losses, return_outputs=False, **kwargs)

    def _arguments(self, inputs: Tensor, targets: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The arguments of the schedule: the inputs for the first stage, the targets for the last one."""
        args = (inputs[self._order],) if self._is_first else ()
        if not self._is_last:
            return args, {}
        return args, {"targets": targets[self._order], "rows": self._rows, "share": self._shares(targets)}

    def _shares(self, targets: Tensor) -> Tensor:
        """The weight of each micro-batch in the mean loss, float64[micro-batches]."""
        weights = [float(self._weight(part)) for part in targets.split(self._rows.tolist())]
        return torch.tensor(weights, dtype=torch.float64) / sum(weights)

    def _shared(self, losses: Sequence[Tensor]) -> Tensor:
        """Sends the batch's loss from the last stage's process to all processes; averaged over pipelines."""
        group, replicas = self._placement.group, self._placement.replicas
        total = torch.stack([loss.detach().sum() for loss in losses]).sum() if self._is_last else torch.zeros(())
        # The process of the last stage contributes the loss, and all others contribute zero.
        dist.all_reduce(total, group=group)
        dist.all_reduce(total, group=replicas)
        return total / replicas.size()

    def _average(self, gradients: list[Tensor | None], parameters: Sequence[Tensor]) -> None:
        """Averages the gradients of the parameters over the replicas, in place."""
        replicas = self._placement.replicas
        if replicas.size() == 1:
            return
        # A parameter can be unused in some of the replicas alone.
        is_used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
        dist.all_reduce(is_used, dist.ReduceOp.MAX, group=replicas)
        for k in is_used.nonzero().flatten().tolist():
            gradients[k] = torch.zeros_like(parameters[k]) if gradients[k] is None else gradients[k]
        present = [gradient for gradient in gradients if gradient is not None]
        works = [dist.all_reduce(gradient, group=replicas, async_op=True) for gradient in present]
        for work, gradient in zip(works, present, strict=True):
            assert work is not None
            work.wait()
            gradient.div_(replicas.size())


def _zero_of(hidden: Tensor) -> Tensor:
    """Zero, float[1], whose gradients are zeros."""
    wide = hidden.float() if hidden.dtype in (torch.bfloat16, torch.float16) else hidden
    return ((wide * 0.0).sum() + torch.zeros((), requires_grad=True)).reshape(1)


def _share(output: Tensor, rows: Tensor) -> Tensor:
    return output.sum()


def _balanced(batch: int, parts: int) -> list[int]:
    """The sizes of the parts of a batch, as equal as possible."""
    return [len(part) for part in torch.arange(batch).tensor_split(parts)]


def _row_indices(sizes: Sequence[int]) -> Tensor:
    """The indices of a batch's rows, by micro-batch; a short micro-batch repeats its last row to the common size."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return torch.tensor(
        [start + min(k, size - 1) for start, size in zip(starts, sizes, strict=True) for k in range(max(sizes))]
    )


def _own_stages(count: int, placement: Placement) -> range:
    """The numbers of a process's stages, assigned round-robin."""
    size, schedule = placement.size, placement.schedule
    if schedule == INTERLEAVED:
        if count % size or count == size:
            raise UnsupportedError(
                f"there are {count} stages for {size} processes, but schedule='interleaved' needs the same number of "
                f"stages for each process, two or more. Create {2 * size} stages, or use schedule='1f1b'."
            )
    elif count != size:
        raise UnsupportedError(
            f"there are {count} stages for the {size} processes of a pipeline, but schedule={schedule!r} needs one "
            f"stage for each process. Create {size} stages, set pipeline_size={count}, or use schedule='interleaved' "
            "for several stages for each process."
        )
    return range(placement.rank, count, size)


def _initialized(stage: Callable[[], nn.Module], number: int) -> nn.Module:
    """Creates a stage with initial weights that depend only on torch's seed and the stage's number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + number)
        return stage()
