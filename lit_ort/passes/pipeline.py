"""The passes over a phase of the joint graph, in the order they run.

A new one is a file here and a name in the list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import fx

from lit_ort._compat.devices import CPU, is_cpu
from lit_ort.errors import OptionsError
from lit_ort.passes.canonicalize import canonicalize
from lit_ort.passes.embedding_gradient import fuse_embedding_gradients
from lit_ort.passes.memory_format import order_channels
from lit_ort.passes.merge_equal import merge_equal
from lit_ort.passes.slice_gradients import join_slice_gradients
from lit_ort.passes.unused_gradients import trim_unused_gradients
from lit_ort.runtime.report import PassReport


@dataclasses.dataclass(frozen=True)
class Pass:
    """One transformation of an FX graph, in place.

    Args:
        name: what `disable_passes` calls it.
        run: returns how many places it rewrote, or a report.
        required: whether lowering can't do without it.
        only_cpu: whether it writes operators that the project has for the CPU alone, or is about its kernels.
    """

    name: str
    run: Callable[[fx.GraphModule], int | PassReport]
    required: bool = False
    only_cpu: bool = False


PASSES: tuple[Pass, ...] = (
    Pass("canonicalize", canonicalize, required=True),
    Pass("merge_equal", merge_equal),
    Pass("unused_gradients", trim_unused_gradients),
    Pass("slice_gradients", join_slice_gradients, only_cpu=True),
    Pass("embedding_gradient", fuse_embedding_gradients, only_cpu=True),
    Pass("memory_format", order_channels, only_cpu=True),
)


def names() -> tuple[str, ...]:
    """Every pass, in order."""
    return tuple(one.name for one in PASSES)


def apply(module: fx.GraphModule, disabled: Iterable[str], device: torch.device = CPU) -> tuple[PassReport, ...]:
    """Runs the passes in order on a graph, in place, without those named in `disabled` or not for its device."""
    skipped = {*disabled, *(one.name for one in PASSES if one.only_cpu and not is_cpu(device))}
    return tuple(_applied(one, module) for one in PASSES if one.name not in skipped)


def _applied(one: Pass, module: fx.GraphModule) -> PassReport:
    outcome = one.run(module)
    module.graph.lint()
    return outcome if isinstance(outcome, PassReport) else PassReport(one.name, outcome)


def require_names(disabled: Iterable[str], fusions: Iterable[str], required: Iterable[str] = ()) -> None:
    """Checks `disable_passes`.

    Args:
        fusions: names of the fusions, which may be left out too.
        required: those of them that may not.

    Raises:
        OptionsError: an unknown name, or a pass that graphs can't do without.
    """
    known = (*fusions, *names())
    needed = {*required, *(one.name for one in PASSES if one.required)}
    for name in disabled:
        if name not in known:
            raise OptionsError(f"disable_passes has {name!r}, which is no pass. The passes are {', '.join(known)}.")
        if name in needed:
            raise OptionsError(f"disable_passes has {name!r}, which every graph needs. Leave it on.")
