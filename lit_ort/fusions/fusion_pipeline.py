"""The list of fusions, in the order in which they run.

A new fusion is a file in this folder, an entry in the list, and often an operator in `lit_ort.ops`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from lit_ort.fusions import (
    fuse_attention,
    fuse_dropout,
    fuse_gelu,
    fuse_linear_cross_entropy,
    fuse_masked_assignments,
    fuse_pointwise_convolutions,
    fuse_recurrent_layers,
    fuse_window_convolutions,
)
from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.runtime.report import PassReport

# Rewrites a graph in place. The report has the number of rewrites and the reasons for declined matches.
Run = Callable[[FusionGraph], PassReport]


@dataclasses.dataclass(frozen=True)
class Fusion:
    """One fusion.

    Args:
        name: its name in `disable_passes` and in reports.
        run: rewrites a graph in place.
        required: whether results are wrong without it.
    """

    name: str
    run: Run
    required: bool = False


FUSIONS: tuple[Fusion, ...] = (
    Fusion(fuse_recurrent_layers.NAME, fuse_recurrent_layers.separate_recurrent_layers, required=True),
    Fusion(fuse_masked_assignments.NAME, fuse_masked_assignments.write_masked_assignments),
    Fusion(fuse_pointwise_convolutions.NAME, fuse_pointwise_convolutions.write_pointwise_convolutions),
    Fusion(fuse_window_convolutions.NAME, fuse_window_convolutions.write_window_convolutions),
    Fusion(fuse_linear_cross_entropy.NAME, fuse_linear_cross_entropy.fuse_linear_cross_entropy),
    Fusion(fuse_attention.NAME, fuse_attention.fuse_attention),
    Fusion(fuse_dropout.NAME, fuse_dropout.fuse_dropout),
    Fusion(fuse_gelu.NAME, fuse_gelu.fuse_gelu),
)


def names() -> tuple[str, ...]:
    """The names of all fusions, in order."""
    return tuple(fusion.name for fusion in FUSIONS)


def required_names() -> tuple[str, ...]:
    """The names of the fusions that `disable_passes` can't disable."""
    return tuple(fusion.name for fusion in FUSIONS if fusion.required)


def apply(graph: FusionGraph, disabled: Iterable[str]) -> tuple[PassReport, ...]:
    """Runs the fusions in order, except for those in `disabled`."""
    skipped = frozenset(disabled)
    reports = tuple(fusion.run(graph) for fusion in FUSIONS if fusion.name not in skipped)
    graph.graph.lint()
    graph.module.recompile()
    return reports
