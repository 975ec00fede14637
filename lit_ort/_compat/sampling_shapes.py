"""Shapes of operators of distributions, for which torch 2.13 has none: it can't trace them for sizes that change."""

from __future__ import annotations

import functools
import operator

import torch

_LIBRARY = torch.library.Library("aten", "IMPL")


def _broadcast(*tensors: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    return functools.reduce(operator.add, tensors, torch.empty_like(tensors[0]))


def add_sampling_shapes() -> None:
    """Adds the shapes that torch lacks."""
    for name in ("_sample_dirichlet", "binomial", "_dirichlet_grad", "_standard_gamma_grad"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _LIBRARY.impl(name, _broadcast, "Meta")
