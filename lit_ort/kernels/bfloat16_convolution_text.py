"""The LLVM text of convolutions of bfloat16 images and weights, and of gradients of images, whose results are float32.

Two neighbouring channels are a pair, which the kernel reads as one channel of 32 bits; a pixel has half as many of
them. The CPU needs AVX-512 BF16.
"""

from __future__ import annotations

from lit_ort.kernels.bfloat16_pairs import loaded_pairs, multiply_add_pairs
from lit_ort.kernels.convolution_text import ConvolutionText
from lit_ort.kernels.matmul_text import Row
from lit_ort.kernels.vector_text import Text, Vector


def bfloat16_convolution_text(vector_bytes: int) -> Text:
    """`block(arguments, number)`, which computes a part of a convolution.

    Args:
        vector_bytes: the width of the CPU's vectors.
    """
    return _PairsText("float32", vector_bytes).write_convolution()


class _PairsText(ConvolutionText):
    def across_inner(self, pointer: str, row: str, last: str, distance: str) -> Row:
        """Of a gradient, in which the weights of two outputs are a pair. `distance` is in elements of 16 bits."""
        first = self.op("mul", self.op("mul", row, 2), distance)
        starts = first, self.op("add", first, distance)
        sources = [self.at(pointer, start, "bfloat16") for start in starts]
        return lambda place, mask: loaded_pairs(self.text, sources, place, self.lanes, (mask, mask))

    def multiply_add(self, left: Vector, right: Vector, total: Vector) -> Vector:
        return multiply_add_pairs(left, right, total)
