"""Runs a schedule of regions and library calls by torch, or with kernels: for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from lit_ort.regions.element_types import MEMORY_DTYPES
from lit_ort.regions.form_regions import RegionCall, Schedule
from lit_ort.regions.graph_values import LibraryCall
from lit_ort.regions.interpret_region import interpret
from lit_ort.regions.symbolic_size import value_of
from lit_ort.regions.value_expressions import Read, Value

Run = Callable[[RegionCall, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


def by_reference(call: RegionCall, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    interpret(call.region, call.run.map(value_of), inputs, outputs)


def graph_of(function: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    """The graph of a function, decomposed to core operators."""
    return make_fx(function, dict(core_aten_decompositions()), tracing_mode="fake")(*args)  # type: ignore[arg-type]


def with_gradients(function: Callable[..., torch.Tensor], count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function's loss and the gradients of its first arguments."""

    def step(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = function(*args)
        return (loss, *torch.autograd.grad(loss, args[:count]))

    return step


def regions(schedule: Schedule) -> list[RegionCall]:
    """The calls of regions."""
    return [step for step in schedule.steps if isinstance(step, RegionCall)]


def run_schedule(
    schedule: Schedule, args: Sequence[torch.Tensor], run: Run = by_reference
) -> list[torch.Tensor | None]:
    """The outputs of a schedule."""
    known: dict[Value, torch.Tensor] = {}
    given = iter(args)
    for node, value in schedule.values.inputs.items():
        is_attribute = node.op == "get_attr"
        known[value] = getattr(node.graph.owning_module, str(node.target)) if is_attribute else next(given)
    for step in schedule.steps:
        if isinstance(step, RegionCall):
            outputs = [
                torch.full(tuple(map(value_of, value.shape)), 7).to(MEMORY_DTYPES[value.dtype])
                for value in step.outputs
            ]
            run(step, [known[value] for value in step.inputs], outputs)
            known.update(zip(step.outputs, outputs, strict=True))
        else:
            _call(step, known)
    return [None if read is None else _seen(read, known) for read in schedule.values.outputs]


def _seen(read: Read, known: dict[Value, torch.Tensor]) -> torch.Tensor:
    assert read.value is not None
    base = known[read.value]
    shape, strides = (tuple(map(value_of, numbers)) for numbers in (read.view.shape, read.view.strides))
    return base.as_strided(shape, strides, base.storage_offset() + value_of(read.view.offset))


def _call(step: LibraryCall, known: dict[Value, torch.Tensor]) -> None:
    def given(arg: Any) -> Any:
        return _seen(step.arguments[arg], known) if isinstance(arg, fx.Node) else arg

    args, kwargs = fx.node.map_aggregate((step.node.args, step.node.kwargs), given)  # type: ignore[arg-type]
    result = step.node.target(*args, **kwargs)  # type: ignore[operator]
    for position, value in step.results.items():
        tensor = result if position is None else result[position]
        assert tuple(tensor.stride()) == value.view.strides, step.node
        known[value] = tensor
