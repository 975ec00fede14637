"""Merges and splits weights and optimizer state of processes that each have a part of the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lit_ort.errors import UnsupportedError

State = dict[str, Any]


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all processes, on the group's first process; an empty list on the others. A collective call."""
    is_first = group.rank() == 0
    values: list[Any] | None = [None] * group.size() if is_first else None
    dist.gather_object(value, values, dst=dist.get_global_rank(group, 0), group=group)
    return values or []


def in_order(names: Sequence[str]) -> list[str]:
    """Sort names of parameters as in a single process: by pipeline, in the given order, and stage.

    Names outside of pipelines stay together, in the place of the first of them.
    """
    stages = {name: _stage_of(name) for name in names}
    pipelines = dict.fromkeys(pipeline for pipeline, _ in stages.values())
    places = {pipeline: place for place, pipeline in enumerate(pipelines)}
    return sorted(names, key=lambda name: (places[stages[name][0]], stages[name][1]))


def _stage_of(name: str) -> tuple[str, int]:
    """The name of a parameter's pipeline and the number of its stage; an empty name and -1 without one."""
    words = name.split(".")
    for k, (word, number) in enumerate(itertools.pairwise(words)):
        if word == "stages" and number.isdigit():
            return ".".join(words[: k + 1]), int(number)
    return "", -1


def merged_weights(parts: Sequence[State]) -> State:
    whole = {name: value for part in parts for name, value in part.items()}
    return {name: whole[name] for name in in_order(list(whole))}


def names_by_group(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """The names of the parameters in each parameter group of an optimizer."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def merged_names(parts: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """The parameter groups of a single process, from those of all processes.

    Raises:
        UnsupportedError: the processes have different numbers of groups.
    """
    counts = sorted({len(groups) for groups in parts})
    if len(counts) > 1:
        raise UnsupportedError(
            f"the optimizer has {counts[0]} parameter groups in one process and {counts[-1]} in another, so they can't "
            "be merged into one checkpoint. Create the same groups in each process, including empty ones."
        )
    return [in_order([name for groups in parts for name in groups[k]]) for k in range(counts[0])]


def merged_optimizer(states: Sequence[State], names: Sequence[Sequence[Sequence[str]]]) -> State:
    """The optimizer state of a single process, from the states of all processes and the names of their parameters."""
    by_name: dict[str, Any] = {}
    for state, groups in zip(states, names, strict=True):
        order = [name for group in groups for name in group]
        by_name.update({order[position]: value for position, value in state["state"].items()})
    whole = merged_names(names)
    positions = {name: k for k, name in enumerate(name for group in whole for name in group)}
    param_groups = [
        {**settings, "params": [positions[name] for name in group]}
        for settings, group in zip(states[0]["param_groups"], whole, strict=True)
    ]
    return {"state": {positions[name]: value for name, value in by_name.items()}, "param_groups": param_groups}


def part_of_optimizer(state: Mapping[str, Any], whole: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> State:
    """One process's part of a merged optimizer state.

    Args:
        state: the merged state.
        whole, own: the names of the parameters by group, of all processes and of this one.
    """
    positions = {name: k for k, name in enumerate(name for group in whole for name in group)}
    order = [name for group in own for name in group]
    part = {k: state["state"][positions[name]] for k, name in enumerate(order) if positions[name] in state["state"]}
    own_positions = {name: k for k, name in enumerate(order)}
    groups = [
        {**settings, "params": [own_positions[name] for name in group]}
        for settings, group in zip(state["param_groups"], own, strict=True)
    ]
    return {"state": part, "param_groups": groups}
