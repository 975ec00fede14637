"""A float32 matrix product by whichever of torch's libraries is the faster one at it.

torch gives them to MKL, which on CPUs that are not Intel's takes up to 1.5 times as long as oneDNN where the second
factor is large (`benchmarks/RESULTS.md`); oneDNN packs a transposed left factor slowly.
"""

from __future__ import annotations

import functools

import torch

# Elements of the second factor and operations from which oneDNN is the faster one, with its copy.
LARGE_FACTOR = 2**18
LARGE_PRODUCT = 1e8
# oneDNN's result and what it works in are memory of its own, which grows with the rows; with many it gains less.
MOST_ROWS = 1024


def product(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None = None
) -> torch.Tensor:
    """left @ right (+ added) in `out`. left: [M, K], right: [K, N], out: [M, N], added: what broadcasts to [M, N]."""
    if not_intel() and _pays(left, right) and (added is None or added.shape == right.shape[1:]):
        return out.copy_(torch.ops.mkldnn._linear_pointwise(left, right.t(), added, "none", [], ""))
    return torch.mm(left, right, out=out) if added is None else torch.addmm(added, left, right, out=out)


def _pays(left: torch.Tensor, right: torch.Tensor) -> bool:
    large = right.numel() >= LARGE_FACTOR and 2.0 * len(left) * right.numel() >= LARGE_PRODUCT
    return large and len(left) <= MOST_ROWS and left.dtype == torch.float32 and left.stride(1) == 1


@functools.cache
def not_intel() -> bool:
    """Whether oneDNN is there, on a CPU of another maker's than MKL's."""
    return torch.backends.mkldnn.is_available() and "Intel" not in torch.cpu.get_capabilities().get("cpu_name", "Intel")
