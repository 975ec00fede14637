"""Shapes of operators of distributions, for which torch 2.13 has none: it can't trace them for sizes that change."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("aten", "IMPL")


def _broadcast(first: torch.Tensor, *others: torch.Tensor | torch.Generator | None) -> torch.Tensor:
    """The results are contiguous in any order of memory of the arguments."""
    shapes = (other.shape for other in others if isinstance(other, torch.Tensor))
    return first.new_empty(torch.broadcast_shapes(first.shape, *shapes))


def add_sampling_shapes() -> None:
    """Adds the shapes that torch lacks."""
    for name in ("_sample_dirichlet", "binomial", "_dirichlet_grad", "_standard_gamma_grad"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _LIBRARY.impl(name, _broadcast, "Meta")
