"""The block of arguments that the machine code of an output layer with its cross entropy reads, all 64-bit words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from lit_ort.kernels.kernel_arguments import FINISH_FUNCTION, LINE

_FIRST_WORD = FINISH_FUNCTION + 1
# Sizes; the most rows of a chunk; the ignored label, and whether the loss is the mean.
ROWS, WIDTH, CLASSES, CHUNK, IGNORED, IS_MEAN = range(_FIRST_WORD, _FIRST_WORD + 6)
# Of a run: the first row of the current chunk among those that are counted, and the number of its rows; what
# losses are divided by; a label that is no class.
FIRST, COUNT, TOTAL, BAD_LABEL = range(_FIRST_WORD + 6, _FIRST_WORD + 10)

INPUTS: tuple[str, ...] = ("hidden", "weight", "bias", "labels", "class_weight")
GRADIENTS: tuple[str, ...] = ("of_hidden", "of_weight", "of_bias")
_NAMES = (*INPUTS, "loss", *GRADIENTS, "scratch")
_PARTS = ("logits", "differences", "rows", "losses", "places", "ones")
# The position of the word of each tensor's address, or 0; where each part of the working memory begins.
TENSORS: Mapping[str, int] = MappingProxyType({name: k for k, name in enumerate(_NAMES, BAD_LABEL + 1)})
BUFFERS: Mapping[str, int] = MappingProxyType({name: k for k, name in enumerate(_PARTS, BAD_LABEL + 1 + len(_NAMES))})
# The words of addresses follow these.
WORDS = BAD_LABEL + 1 + len(_NAMES) + len(_PARTS)

# Into so many blocks the rows of a chunk are cut at most; results don't depend on it.
MOST_BLOCKS = 16
# Of the logits of a chunk. The gradient of the weight is read and written once for each chunk, so a few large chunks
# are faster than many small ones.
CHUNK_BYTES = 80_000_000


def chunk_rows(rows: int, classes: int, itemsize: int) -> int:
    """The number of rows of a chunk, for the fewest equal chunks whose logits have at most `CHUNK_BYTES`."""
    chunks = max(1, math.ceil(rows * classes * itemsize / CHUNK_BYTES))
    return max(1, math.ceil(rows / chunks))


def buffer_offsets(
    chunk: int, rows: int, width: int, classes: int, itemsize: int, factor_size: int
) -> tuple[dict[str, int], int]:
    """Where each part of the working memory begins, in bytes, and the size of all.

    Args:
        chunk: the rows of a chunk.
        rows, width, classes: the sizes of the layer.
        itemsize, factor_size: the bytes of an element of the logits, and of a factor of matmuls. If they are equal, the
            gradients of the logits take the place of the logits.
    """
    sizes = {
        "logits": chunk * classes * itemsize,
        "differences": 0 if factor_size == itemsize else chunk * classes * factor_size,
        "rows": chunk * width * itemsize,
        "losses": chunk * 8,
        # The number of a row is written before it is known whether the row is counted.
        "places": (rows + 1) * 8,
        "ones": chunk * factor_size,
    }
    offsets, end = dict[str, int](), 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // LINE) * LINE
    if factor_size == itemsize:
        offsets["differences"] = offsets["logits"]
    return offsets, end
