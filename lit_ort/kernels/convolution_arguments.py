"""The words that the machine code of convolutions reads, behind those of a matmul, and its tables."""

from __future__ import annotations

from lit_ort.kernels import matmul_arguments

_FIRST_WORD = matmul_arguments.WORDS
# Of the images that are read: their height and width, and the pixels between what neighbouring results read.
HEIGHT, WIDTH, ROW_STRIDE, COLUMN_STRIDE = range(_FIRST_WORD, _FIRST_WORD + 4)
# The elements between neighbouring images, rows and pixels of the result's grids.
RESULT_IMAGE, RESULT_LINE, RESULT_PIXEL = range(_FIRST_WORD + 4, _FIRST_WORD + 7)
# How many channels are added at a time, and of how many elements of the kernel; the most elements of a grid.
CHANNEL_STEP, TAP_STEP, MOST_TAPS = range(_FIRST_WORD + 7, _FIRST_WORD + 10)
# The address of zeros, of as many elements as an image has channels; of the grids, and their number.
ZEROS, GRIDS, GRID_COUNT = range(_FIRST_WORD + 10, _FIRST_WORD + 13)
# The channels of a pixel of the images, of all groups.
PIXEL = _FIRST_WORD + 13
WORDS = _FIRST_WORD + 14

# The words of a grid: its pixels are evenly spaced in the result, and read the same elements of the kernel and the same
# group of channels. The address and the number of these elements, the grid's height and width, and the place of its
# first pixel in an image of the result.
TAPS, TAP_COUNT, GRID_HEIGHT, GRID_WIDTH, GRID_PLACE = range(5)
GRID_WORDS = 5
# The words of an element of the kernel: by how many rows and columns, and elements, what it reads is away, and where it
# is in the weight.
TAP_DOWN, TAP_RIGHT, TAP_PLACE, TAP_WEIGHT = range(4)
TAP_WORDS = 4

# The parts that a depthwise convolution's weight gradient is cut into at most, of about so many channels.
_MOST_PARTS, _CHANNELS_OF_PART = 16, 64


def image_blocks(channels: int) -> int:
    """Into how many parts, of some images each, the gradient of a depthwise convolution's weight is cut."""
    return max(1, _MOST_PARTS // -(-channels // _CHANNELS_OF_PART))


def is_depthwise(outputs: int, channels: int, groups: int) -> bool:
    """Whether each channel is convolved by itself, to one channel."""
    return 1 < groups == channels == outputs
