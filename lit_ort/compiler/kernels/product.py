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
# oneDNN's result comes in memory of its own; so many rows at a time that it stays below this.
BYTES_AT_A_TIME = 2**23


def product(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None = None
) -> torch.Tensor:
    """left @ right (+ added) in `out`. left: [M, K], right: [K, N], out: [M, N], added: what broadcasts to [M, N]."""
    if not_intel() and _pays(left, right) and (added is None or added.dim() == 1):
        rows = max(1, BYTES_AT_A_TIME // (right.shape[1] * left.itemsize))
        for start in range(0, len(left), rows):
            part = slice(start, start + rows)
            out[part] = torch.ops.mkldnn._linear_pointwise(left[part], right.t(), added, "none", [], "")
        return out
    return torch.mm(left, right, out=out) if added is None else torch.addmm(added, left, right, out=out)


def _pays(left: torch.Tensor, right: torch.Tensor) -> bool:
    large = right.numel() >= LARGE_FACTOR and 2.0 * len(left) * right.numel() >= LARGE_PRODUCT
    return large and left.dtype == torch.float32 and left.stride(1) == 1


@functools.cache
def not_intel() -> bool:
    """Whether oneDNN is there, on a CPU of another maker's than MKL's."""
    return torch.backends.mkldnn.is_available() and "Intel" not in torch.cpu.get_capabilities().get("cpu_name", "Intel")
