"""The fusions, in the order they run. A new one is a file here (and one in `lit_ort.ops`) and a name in the list."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from lit_ort.fusions import attention, dropout, gelu, linear_cross_entropy, masked_assignments, recurrent_layers
from lit_ort.fusions.graph import FusionGraph
from lit_ort.runtime.report import PassReport

# Rewrites a graph in place; returns how often it fired and why it declined.
Run = Callable[[FusionGraph], PassReport]


@dataclasses.dataclass(frozen=True)
class Fusion:
    """One pattern of the forward and what takes its place.

    Args:
        name: what `disable_passes` calls it.
        run: rewrites a graph in place.
        required: whether numbers are right only with it.
    """

    name: str
    run: Run
    required: bool = False


FUSIONS: tuple[Fusion, ...] = (
    Fusion(recurrent_layers.NAME, recurrent_layers.separate_recurrent_layers, required=True),
    Fusion(masked_assignments.NAME, masked_assignments.write_masked_assignments),
    Fusion(linear_cross_entropy.NAME, linear_cross_entropy.fuse_linear_cross_entropy),
    Fusion(attention.NAME, attention.fuse_attention),
    Fusion(dropout.NAME, dropout.fuse_dropout),
    Fusion(gelu.NAME, gelu.fuse_gelu),
)


def names() -> tuple[str, ...]:
    """Every fusion, in order."""
    return tuple(fusion.name for fusion in FUSIONS)


def required_names() -> tuple[str, ...]:
    """The fusions that `disable_passes` may not name."""
    return tuple(fusion.name for fusion in FUSIONS if fusion.required)


def apply(graph: FusionGraph, disabled: Iterable[str]) -> tuple[PassReport, ...]:
    """Runs the fusions in order, without those named in `disabled`."""
    skipped = frozenset(disabled)
    reports = tuple(fusion.run(graph) for fusion in FUSIONS if fusion.name not in skipped)
    graph.graph.lint()
    graph.module.recompile()
    return reports
