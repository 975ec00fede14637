"""When torch's operators are faster than a region.

Measured on one thread of an AMD EPYC (family 26, AVX-512), times of a region to those of torch's operators: pointwise
operators 0.1 to 1.0, reductions of rows 0.7 to 1.0 and over rows 1.0, softmax and normalizations 0.4 to 0.9, copies 0.5
to 1.0; but a single GELU 1.6, its gradient 1.3, tanh 1.35, sin 1.2, exp of float64 1.4. Reductions of what is not
adjacent in memory take 0.3 to 1.0 of the same step with torch's operators (family 25, AVX-512, two threads).
"""

from __future__ import annotations

from lit_ort.regions.region import Apply, Reduce, Region
from lit_ort.regions.region_run import RegionRun
from lit_ort.regions.symbolic_size import Number, product

# Below so many points a call costs more than what is computed, and a region's costs less.
_SMALL = 4096
# Operators whose kernels are faster than their formulas, as long as nothing else is computed with them.
_FASTER_ALONE = frozenset({"exp", "sigmoid", "gelu", "gelu_tanh", "gelu_tanh_backward", "tanh", "sin", "cos"})
_FASTER_ALONE_IN_FLOAT64 = _FASTER_ALONE | {"gelu_backward", "expm1", "log", "log1p", "silu", "erf", "pow"}


def is_faster(region: Region, run: RegionRun[Number]) -> bool:
    """Whether a region is at least as fast as the operators that it consists of."""
    if product(run.sizes) < _SMALL:
        return True
    applied = [
        node for node in region.nodes if isinstance(node, Apply) and not node.operator.startswith(("cast", "round_to"))
    ]
    if len(applied) == 1 and not _reduces(region):
        (only,) = applied
        alone = _FASTER_ALONE_IN_FLOAT64 if only.dtype == "float64" else _FASTER_ALONE
        return only.operator not in alone
    return True


def _reduces(region: Region) -> bool:
    return bool(region.columns) or any(isinstance(node, Reduce) for node in region.nodes)
