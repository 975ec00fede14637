"""The words that the machine code of weights' gradients reads, behind those of a matmul."""

from __future__ import annotations

from lit_ort.kernels import matmul_arguments

_FIRST_WORD = matmul_arguments.WORDS
# Of images: their height, the elements of a row, and the channels of a pixel. Of the gradient: its height and width.
HEIGHT, ROW_ELEMENTS, CHANNELS, OUT_HEIGHT, OUT_WIDTH = range(_FIRST_WORD, _FIRST_WORD + 5)
# Of the kernel, in pixels, and the elements between what neighbouring pixels read.
ROW_STRIDE, ROW_PADDING, COLUMN_PADDING, ROW_DILATION, COLUMN_DILATION = range(_FIRST_WORD + 5, _FIRST_WORD + 10)
PIXEL_DISTANCE = _FIRST_WORD + 10
# The elements of a run, up to a whole vector, and the runs of a row of the kernel.
RUN, RUNS_ACROSS = _FIRST_WORD + 11, _FIRST_WORD + 12
# The pairs of a tile of outputs and of vectors that are computed at a time; the lines of pixels that are added at a
# time; the address of the tiles, and their number.
UNITS, LINES, TILES, TILE_COUNT = range(_FIRST_WORD + 13, _FIRST_WORD + 17)
# Of a depthwise convolution: the size of its kernel, and the parts of its images.
KERNEL_HEIGHT, KERNEL_WIDTH, PARTS = range(_FIRST_WORD + 17, _FIRST_WORD + 20)
WORDS = _FIRST_WORD + 20

# The words of a tile: its first output, how many it has, and the first channel of its group.
TILE_OUTPUT, TILE_HEIGHT, TILE_CHANNEL = range(3)
TILE_WORDS = 3
