"""A float32 matrix product by whichever of torch's libraries is the faster one at it.

torch gives float32 products to MKL, which on CPUs that are not Intel's runs below the speed of their vector units:
180 GFLOP/s on two cores of an AMD EPYC of family 26 (Zen 5) where oneDNN has 280 to 410. With vector units of half that
width (family 25) MKL takes 1.05 to 1.25 times oneDNN's time with a left factor that is not transposed (64 to 4,096
rows, factors of 256 x 256 to 3,072 x 768), and with a transposed one where the result is wide. oneDNN returns memory of
its own, so that it works on parts whose results stay in a cache until they are copied. Two things it is slow at:

- a transposed left factor with a tall result, such as a weight's gradient g^T x (28,782 x 700 times 700 x 200: 115
  GFLOP/s; MKL 170). (x^T g)^T is the same at 270, with its copy.
- parts of a transposed factor whose rows don't follow each other in memory: below 1 GFLOP/s, so it never gets them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator

import torch

from lit_ort._compat.torch_ops import onednn_linear

# Elements of a part's result: 4 MB.
PART_ELEMENTS = 2**20
# Rows of a part from which oneDNN has its speed.
PART_ROWS = 64
# Where oneDNN is much faster: operations from which this shows, and for a transposed left factor, which is one part,
# the inner size and the elements of the result up to which copying it costs less than is gained.
FAST_PRODUCT = 1.6e7
FAST_INNER, FAST_RESULT = 64, 2**21
TALL_INNER, TALL_RESULT = 128, 2**23
# Where it is a little faster: operations from which this shows, and for a transposed left factor, how many columns the
# result has for each row.
LITTLE_PRODUCT, LITTLE_WIDTH = 1.5e8, 3


class Gain(enum.Enum):
    """How much faster than MKL oneDNN is on this CPU."""

    NONE = enum.auto()
    LITTLE = enum.auto()
    MUCH = enum.auto()


class Way(enum.Enum):
    """How a product is computed: by MKL, by oneDNN, or by oneDNN as the transposed product of transposed factors."""

    MKL = enum.auto()
    DIRECT = enum.auto()
    TRANSPOSED = enum.auto()


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    added: torch.Tensor | None = None,
    *,
    accumulate: bool = False,
) -> torch.Tensor:
    """left @ right (+ added) in `out`.

    Args:
        left: float[M, K]. right: float[K, N]. out: float[M, N], of any strides.
        added: what broadcasts to [M, N].
        accumulate: adds to what `out` holds; not together with `added`.
    """
    assert added is None or not accumulate
    way = way_of(left, right)
    if way is Way.DIRECT and (added is None or added.shape == right.shape[1:]):
        return _direct(left, right, out, added, accumulate)
    if way is Way.TRANSPOSED and added is None:
        return _put(out, onednn_linear(right.t(), left, None).t(), accumulate)
    if accumulate:
        return torch.addmm(out, left, right, out=out)
    return torch.mm(left, right, out=out) if added is None else torch.addmm(added, left, right, out=out)


def way_of(left: torch.Tensor, right: torch.Tensor) -> Way:
    """The fastest way for factors of these shapes and strides."""
    gain = onednn_gain()
    if gain is Gain.NONE or left.dtype != torch.float32 or not (_dense(left) and _dense(right)):
        return Way.MKL
    (rows, inner), columns = left.shape, right.shape[1]
    operations, elements = 2.0 * rows * inner * columns, rows * columns
    if operations < (LITTLE_PRODUCT if gain is Gain.LITTLE else FAST_PRODUCT):
        return Way.MKL
    if left.is_contiguous():
        return Way.DIRECT if _divisible(right, rows) else Way.MKL
    if gain is Gain.LITTLE and columns < LITTLE_WIDTH * rows:
        return Way.MKL
    if rows > columns and inner >= TALL_INNER and elements <= TALL_RESULT:
        return Way.TRANSPOSED
    return Way.DIRECT if inner >= FAST_INNER and elements <= FAST_RESULT else Way.MKL


def workspace_bytes(left: torch.Tensor, right: torch.Tensor) -> int:
    """What a product takes beside its result."""
    way, elements = way_of(left, right), left.shape[0] * right.shape[1]
    if way is Way.MKL:
        return 0
    divided = way is Way.DIRECT and left.is_contiguous()
    return 4 * (min(elements, PART_ELEMENTS) if divided else elements)


@functools.cache
def onednn_gain() -> Gain:
    """What oneDNN gains over MKL on this CPU, from its maker and its vector units."""
    features = torch.cpu.get_capabilities()
    if not torch.backends.mkldnn.is_available() or "Intel" in features.get("cpu_name", "Intel"):
        return Gain.NONE
    # AMD's family 26 is the first one with AVX-VNNI, and the first one with vector units of the full 512 bits.
    return Gain.MUCH if features.get("avx512_f") and features.get("avx_vnni") else Gain.LITTLE


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
    """As few parts as have at most `most` each, all but the last one of a size."""
    count = -(-whole // max(1, most))
    size = -(-whole // max(1, count))
    return (slice(start, min(start + size, whole)) for start in range(0, whole, max(1, size)))


def _dense(factor: torch.Tensor) -> bool:
    return factor.is_contiguous() or factor.t().is_contiguous()


def _divisible(right: torch.Tensor, rows: int) -> bool:
    """Whether parts of the result have enough rows, or columns where these can be divided."""
    if right.shape[1] > rows and right.t().is_contiguous():
        return rows <= PART_ELEMENTS // PART_ROWS
    return min(rows, PART_ELEMENTS // max(1, right.shape[1])) >= min(rows, PART_ROWS)
