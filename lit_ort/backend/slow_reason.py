"""Predicts from a graph's operators whether it can be faster than in eager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from lit_ort.fusions import fusion_pipeline as fusions
from lit_ort.lower.work import flop_of
from lit_ort.ops.matmul import Gain, onednn_gain
from lit_ort.runtime.report import PassReport

# FLOP of matmuls below which a run's overhead of 0.2 ms matters: 2 ms on two cores.
LEAST_WORK = 3e8
SMALL = (
    "below eager's: its matmuls are {work:.2g} GFLOP, too few to compensate for the 0.2 ms by which a run's overhead "
    "exceeds that of eager's calls. Use larger batches."
)
ALL_BY_TORCH = "about eager's: its matmuls and convolutions are torch's own kernels, and nothing in it could be fused"
_MATMULS = ("aten.mm.default", "aten.addmm.default")
# Passes that replace operators by faster ones.
_GAINS = frozenset(
    {
        *fusions.names(),
        *("embedding_gradient", "grouped_matmuls", "image_convolutions", "memory_format", "patch_convolutions"),
    }
)


def expected_speed(
    graphs: Iterable[fx.Graph], torch_operators: Mapping[str, int], passes: Iterable[PassReport]
) -> str | None:
    """Why a step of a graph takes as long as in eager, or longer; None if something in it is faster.

    Args:
        graphs: its phases.
        torch_operators: counts of the operators that torch nodes call.
        passes: the reports of its fusions and passes.
    """
    work = sum(flop_of(node) for graph in graphs for node in graph.nodes)
    if work < LEAST_WORK:
        return SMALL.format(work=work / 1e9)
    gains = any(report.fired for report in passes if report.name in _GAINS)
    own = any(name.startswith("lit_ort.") for name in torch_operators)
    matmuls = onednn_gain() is Gain.MUCH and any(name in torch_operators for name in _MATMULS)
    return None if gains or own or matmuls else ALL_BY_TORCH
