"""Float32 matmuls with the faster of torch's two libraries, MKL and oneDNN.

Torch uses MKL for float32 matmuls. On CPUs not made by Intel, MKL does not reach the speed of the vector units: 180
GFLOP/s on two cores of an AMD EPYC of family 26 (Zen 5), where oneDNN reaches 280 to 410. With vector units of half
that width (family 25), MKL takes 1.05 to 1.25 times oneDNN's time if the left factor is not transposed (64 to 4,096
rows, factors of 256 x 256 to 3,072 x 768), and also if it is transposed and the result is wide. oneDNN allocates its
results, so it computes parts whose results stay in the cache until they are copied. It is slow in two cases:

- A transposed left factor with a tall result, such as a weight's gradient g^T x (28,782 x 700 times 700 x 200: 115
  GFLOP/s; MKL 170). (x^T g)^T is the same matmul at 270, including its copy.
- Parts of a transposed factor whose rows are not adjacent in memory: below 1 GFLOP/s. oneDNN is not used for them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator

import torch

from lit_ort._compat.torch_blas import has_wide_units, is_intel
from lit_ort._compat.torch_ops import onednn_linear

# Elements of the result of a part: 4 MB.
PART_ELEMENTS = 2**20
# The number of rows of a part from which oneDNN reaches its full speed.
PART_ROWS = 64
# If oneDNN is much faster, it is used from this number of FLOPs. For a transposed left factor, which is not divided
# into parts, it is used from this inner size and up to this number of elements of the result, which has to be copied.
FAST_MATMUL = 1.6e7
FAST_INNER, FAST_RESULT = 64, 2**21
TALL_INNER, TALL_RESULT = 128, 2**23
# If oneDNN is a little faster, it is used from this number of FLOPs; for a transposed left factor, only if the result
# has this many columns for each row.
LITTLE_MATMUL, LITTLE_WIDTH = 1.5e8, 3


class Gain(enum.Enum):
    """How much faster than MKL oneDNN is on this CPU."""

    NONE = enum.auto()
    LITTLE = enum.auto()
    MUCH = enum.auto()


class Method(enum.Enum):
    """How a matmul is computed: with MKL, with oneDNN, or with oneDNN as the transpose of the transposed matmul."""

    MKL = enum.auto()
    DIRECT = enum.auto()
    TRANSPOSED = enum.auto()


def matmul(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    added: torch.Tensor | None = None,
    *,
    accumulate: bool = False,
) -> torch.Tensor:
    """Computes left @ right, optionally plus `added`, into `out`, and returns `out`.

    Args:
        left: float[M, K]. right: float[K, N]. out: float[M, N], with any strides.
        added: a tensor that can be broadcast to [M, N].
        accumulate: whether the matmul is added to `out`; not together with `added`.
    """
    assert added is None or not accumulate
    method = method_of(left, right)
    if method is Method.DIRECT and (added is None or added.shape == right.shape[1:]):
        return _direct(left, right, out, added, accumulate)
    if method is Method.TRANSPOSED and added is None:
        return _put(out, onednn_linear(right.t(), left, None).t(), accumulate)
    if accumulate:
        return torch.addmm(out, left, right, out=out)
    return torch.mm(left, right, out=out) if added is None else torch.addmm(added, left, right, out=out)


def method_of(left: torch.Tensor, right: torch.Tensor) -> Method:
    """The fastest method for factors with these shapes and strides."""
    gain = onednn_gain()
    if gain is Gain.NONE or left.dtype != torch.float32 or not (_dense(left) and _dense(right)):
        return Method.MKL
    (rows, inner), columns = left.shape, right.shape[1]
    operations, elements = 2.0 * rows * inner * columns, rows * columns
    if operations < (LITTLE_MATMUL if gain is Gain.LITTLE else FAST_MATMUL):
        return Method.MKL
    if left.is_contiguous():
        return Method.DIRECT if _divisible(right, rows) else Method.MKL
    if gain is Gain.LITTLE and columns < LITTLE_WIDTH * rows:
        return Method.MKL
    if rows > columns and inner >= TALL_INNER and elements <= TALL_RESULT:
        return Method.TRANSPOSED
    return Method.DIRECT if inner >= FAST_INNER and elements <= FAST_RESULT else Method.MKL


def workspace_bytes(left: torch.Tensor, right: torch.Tensor) -> int:
    """The memory that a matmul needs besides its result."""
    method, elements = method_of(left, right), left.shape[0] * right.shape[1]
    if method is Method.MKL:
        return 0
    is_divided = method is Method.DIRECT and left.is_contiguous()
    return 4 * (min(elements, PART_ELEMENTS) if is_divided else elements)


@functools.cache
def onednn_gain() -> Gain:
    """How much faster than MKL oneDNN is on this CPU, from the CPU's vendor and its vector units."""
    if not torch.backends.mkldnn.is_available() or is_intel():
        return Gain.NONE
    return Gain.MUCH if has_wide_units() else Gain.LITTLE


def _direct(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None, accumulate: bool
) -> torch.Tensor:
    rows, columns = out.shape
    if not left.is_contiguous():
        _put(out, onednn_linear(left, right.t(), added), accumulate)
    elif columns > rows and right.t().is_contiguous():
        for part in _parts(columns, PART_ELEMENTS // rows):
            bias = None if added is None else added[part]
            _put(out[:, part], onednn_linear(left, right.t()[part], bias), accumulate)
    else:
        for part in _parts(rows, PART_ELEMENTS // columns):
            _put(out[part], onednn_linear(left[part], right.t(), added), accumulate)
    return out


def _put(out: torch.Tensor, part: torch.Tensor, accumulate: bool) -> torch.Tensor:
    return out.add_(part) if accumulate else out.copy_(part)


def _parts(whole: int, most: int) -> Iterator[slice]:
    """Divides `whole` into the fewest equal parts with at most `most` each; the last part can be smaller."""
    count = -(-whole // max(1, most))
    size = -(-whole // max(1, count))
    return (slice(start, min(start + size, whole)) for start in range(0, whole, max(1, size)))


def _dense(factor: torch.Tensor) -> bool:
    return factor.is_contiguous() or factor.t().is_contiguous()


def _divisible(right: torch.Tensor, rows: int) -> bool:
    """Whether the result can be divided into parts that have enough rows, or enough columns if it is wide."""
    if right.shape[1] > rows and right.t().is_contiguous():
        return rows <= PART_ELEMENTS // PART_ROWS
    return min(rows, PART_ELEMENTS // max(1, right.shape[1])) >= min(rows, PART_ROWS)
