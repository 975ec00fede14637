"""The list of passes over a phase of the joint graph, in the order in which they run.

A new pass is a file in this folder and an entry in the list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import fx

from lit_ort._compat.devices import CPU, is_cpu
from lit_ort.errors import OptionsError
from lit_ort.passes.bfloat16_matmuls import multiply_bfloat16
from lit_ort.passes.canonicalize import canonicalize
from lit_ort.passes.channels_last import order_channels
from lit_ort.passes.cumulative_sums import sum_in_blocks
from lit_ort.passes.embedding_gradient import fuse_embedding_gradients
from lit_ort.passes.fuse_regions import fuse_regions
from lit_ort.passes.grouped_matmuls import multiply_groups
from lit_ort.passes.image_convolutions import convolve_images
from lit_ort.passes.in_place_writes import write_in_place
from lit_ort.passes.indexed_sums import add_in_order
from lit_ort.passes.merge_equal import merge_equal
from lit_ort.passes.patch_convolutions import multiply_patches
from lit_ort.passes.slice_gradients import join_slice_gradients
from lit_ort.passes.slice_reads import look_past_writes
from lit_ort.passes.time_convolutions import convolve_over_time
from lit_ort.passes.unused_gradients import trim_unused_gradients
from lit_ort.passes.weight_norms import write_weight_norms
from lit_ort.passes.written_gradients import add_before_writes
from lit_ort.runtime.report import PassReport


@dataclasses.dataclass(frozen=True)
class Pass:
    """One in-place transformation of an FX graph.

    Args:
        name: its name in `disable_passes` and in reports.
        run: transforms a graph; returns the number of rewrites, or a report.
        required: whether lowering depends on it.
        only_cpu: whether it is for the CPU only, because its operators or the kernels that it optimizes are.
    """

    name: str
    run: Callable[[fx.GraphModule], int | PassReport]
    required: bool = False
    only_cpu: bool = False


PASSES: tuple[Pass, ...] = (
    Pass("canonicalize", canonicalize, required=True),
    Pass("cumulative_sums", sum_in_blocks, only_cpu=True),
    Pass("merge_equal", merge_equal),
    Pass("unused_gradients", trim_unused_gradients),
    Pass("written_gradients", add_before_writes),
    Pass("slice_reads", look_past_writes),
    Pass("slice_gradients", join_slice_gradients, only_cpu=True),
    Pass("indexed_sums", add_in_order, only_cpu=True),
    Pass("embedding_gradient", fuse_embedding_gradients, only_cpu=True),
    Pass("weight_norms", write_weight_norms, only_cpu=True),
    Pass("time_convolutions", convolve_over_time, only_cpu=True),
    Pass("memory_format", order_channels, only_cpu=True),
    Pass("patch_convolutions", multiply_patches, only_cpu=True),
    Pass("image_convolutions", convolve_images, only_cpu=True),
    Pass("grouped_matmuls", multiply_groups, only_cpu=True),
    Pass("bfloat16_matmuls", multiply_bfloat16, only_cpu=True),
    Pass("regions", fuse_regions, only_cpu=True),
    # The other passes assume that no operator writes in place.
    Pass("in_place_writes", write_in_place, only_cpu=True),
)


def names() -> tuple[str, ...]:
    """The names of all passes, in order."""
    return tuple(graph_pass.name for graph_pass in PASSES)


def apply(module: fx.GraphModule, disabled: Iterable[str], device: torch.device = CPU) -> tuple[PassReport, ...]:
    """Runs the passes on a graph, in order, except for those in `disabled` and those that are not for its device."""
    skipped = {*disabled, *(graph_pass.name for graph_pass in PASSES if graph_pass.only_cpu and not is_cpu(device))}
    return tuple(_run(graph_pass, module) for graph_pass in PASSES if graph_pass.name not in skipped)


def _run(graph_pass: Pass, module: fx.GraphModule) -> PassReport:
    outcome = graph_pass.run(module)
    module.graph.lint()
    return outcome if isinstance(outcome, PassReport) else PassReport(graph_pass.name, outcome)


def require_names(disabled: Iterable[str], fusions: Iterable[str], required: Iterable[str] = ()) -> None:
    """Checks the names in `disable_passes`.

    Args:
        disabled: the names.
        fusions: the names of all fusions, which can be disabled too.
        required: the names of the fusions that can't be disabled.

    Raises:
        OptionsError: a name is unknown, or is that of a required pass.
    """
    known = (*fusions, *names())
    all_required = {*required, *(graph_pass.name for graph_pass in PASSES if graph_pass.required)}
    for name in disabled:
        if name not in known:
            raise OptionsError(f"disable_passes has {name!r}, which is not a pass. The passes are {', '.join(known)}.")
        if name in all_required:
            raise OptionsError(f"disable_passes has {name!r}, which is required for every graph. Remove it.")
