"""Computes the memory of a step from its graph, before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from lit_ort._compat.lightning import step_arguments
from lit_ort._compat.torch_fx import tree_leaves, tree_map
from lit_ort.backend.eager import autocast_for
from lit_ort.backend.tracing_settings import LogRecorder, dynamo_settings
from lit_ort.capture.inlined_checkpoints import inline_checkpoints
from lit_ort.capture.numbers import separate_numbers
from lit_ort.errors import OptionsError
from lit_ort.options import ORTOptions
from lit_ort.runtime.engines.choice import engine_of
from lit_ort.runtime.program import Signature
from lit_ort.runtime.report import GraphReport

MB = 1e6


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The result of `plan_memory`, readable when printed. Bytes are those of one run, without parameters and batch.

    Args:
        run_bytes: the peak, gradients included.
        gradient_bytes: the gradients' part of it, which stays until the next step.
        parameter_bytes: the parameters that the step reads.
        batch: the number of items in the batch that was planned, or None.
        item_bytes: the bytes that one more item adds, or None.
        report: the graph's report.
    """

    run_bytes: int
    gradient_bytes: int
    parameter_bytes: int
    batch: int | None
    item_bytes: float | None
    report: GraphReport

    def largest_batch(self, limit_bytes: float) -> int:
        """The largest number of items for which a run stays within a limit; 0 if a single item exceeds it.

        Every item is assumed to add the same number of bytes. Kernels depend on sizes, so plan again for a batch of a
        very different size.

        Raises:
            OptionsError: the plan was computed without `batch_dim`.
        """
        if self.batch is None or self.item_bytes is None:
            raise OptionsError(
                "The plan has no batch size. Pass batch_dim= to plan_memory, the dimension of the batch's items."
            )
        fixed = self.run_bytes - self.batch * self.item_bytes
        return max(0, int((limit_bytes - fixed) // max(self.item_bytes, 1.0)))

    def __str__(self) -> str:
        items = "" if self.batch is None else f" for a batch of {self.batch}"
        lines = [
            f"{self.report.name}: {self.run_bytes / MB:.0f} MB while it runs{items}, {self.gradient_bytes / MB:.0f} MB "
            f"of it gradients, beside {self.parameter_bytes / MB:.0f} MB of parameters"
        ]
        if self.item_bytes is not None:
            lines.append(f"one more item adds {self.item_bytes / MB:.2f} MB")
        return "\n".join(lines)


def plan_memory(
    step: Any, *arguments: Any, options: ORTOptions | None = None, batch_dim: int | None = None
) -> MemoryPlan:
    """Computes the memory of a step without running it.

    Args:
        step: a function or module that `torch.compile` accepts, or a LightningModule, for its `training_step`.
        arguments: the step's arguments; for a LightningModule the batch is enough.
        options: the backend's options.
        batch_dim: the batch dimension of the batch's tensors. With it the step is also planned for half of the items,
            and the difference is the bytes that one more item adds.

    Returns:
        the plan of the step's first graph, which is the whole step unless there is a graph break.

    Raises:
        CompileError: the graph can't run through ONNX Runtime.
        OptionsError: nothing was compiled, or the batch has fewer than two items along `batch_dim`.
    """
    options = ORTOptions() if options is None else options
    if hasattr(step, "training_step"):
        arguments = step_arguments(step.training_step, *arguments) if len(arguments) == 1 else arguments
    plan = _planned(step, arguments, options)
    if batch_dim is None:
        return plan
    items = _items(arguments, batch_dim)
    if items < 2:
        raise OptionsError(
            f"batch_dim={batch_dim}: the batch has {items} items along this dimension, and at least two are needed to "
            "compute what one adds. Pass the batch dimension, or leave batch_dim out."
        )
    half = _planned(step, tree_map(lambda part: _part(part, batch_dim, items), arguments), options)
    added = (plan.run_bytes - half.run_bytes) / (items - items // 2)
    return dataclasses.replace(plan, batch=items, item_bytes=added)


class _Planned(Exception):
    """Ends a step as soon as its graph is built."""

    def __init__(self, signature: Signature, report: GraphReport, tensors: Sequence[torch.Tensor]) -> None:
        self.signature, self.report, self.tensors = signature, report, tensors


def _planned(step: Any, arguments: Sequence[Any], options: ORTOptions) -> MemoryPlan:
    name = getattr(step, "__name__", type(step).__name__)
    is_module = hasattr(step, "training_step")
    logs = LogRecorder(step).attached() if is_module else nullcontext()

    def backend(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        from lit_ort.backend.build import build

        graph = separate_numbers(inline_checkpoints(graph_module))

        def build_and_end(*inputs: Any) -> Any:
            tensors, keys, _ = graph.arguments(inputs)
            compilation = build(graph, tensors, keys, options, name, engine_of(options.engine))
            raise _Planned(compilation.program.signature, compilation.report, tensors)

        return build_and_end

    try:
        with autocast_for(options.precision), dynamo_settings(name, strict=True), logs:
            torch.compile(step.training_step if is_module else step, backend=backend)(*arguments)
    except _Planned as planned:
        differentiable = [k for k, position in enumerate(planned.signature.gradients) if position is not None]
        parameters = [t for t in planned.tensors if isinstance(t, torch.nn.Parameter)]
        return MemoryPlan(
            run_bytes=planned.report.peak_bytes,
            gradient_bytes=sum(planned.tensors[k].nbytes for k in differentiable),
            parameter_bytes=sum(parameter.nbytes for parameter in parameters),
            batch=None,
            item_bytes=None,
            report=planned.report,
        )
    raise OptionsError(f"{name} has nothing to compile: it has no tensor operation. Pass the training step.")


def _items(arguments: Sequence[Any], batch_dim: int) -> int:
    sizes = [part.size(batch_dim) for part in tree_leaves(arguments) if _has(part, batch_dim)]
    return max(sizes, default=0)


def _part(part: Any, batch_dim: int, items: int) -> Any:
    """The first half of a tensor's items; any other value unchanged."""
    is_batch = _has(part, batch_dim) and part.size(batch_dim) == items
    return part.narrow(batch_dim, 0, items // 2).contiguous() if is_batch else part


def _has(part: Any, dimension: int) -> bool:
    return isinstance(part, torch.Tensor) and not isinstance(part, torch.nn.Parameter) and part.dim() > dimension
