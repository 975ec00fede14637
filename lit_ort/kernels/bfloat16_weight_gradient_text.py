"""The LLVM text of the gradient of a convolution's weight, of bfloat16 images and gradients, whose result is float32.

Two neighbouring pixels are a pair: those of the gradient are copied as pairs, and those of images are joined when they
are read. The CPU needs AVX-512 BF16.
"""

from __future__ import annotations

from lit_ort.kernels import matmul_arguments as matmul
from lit_ort.kernels import weight_gradient_arguments as words
from lit_ort.kernels.bfloat16_pairs import loaded_pairs, multiply_add_pairs
from lit_ort.kernels.vector_memory import stored
from lit_ort.kernels.vector_text import Text, Vector
from lit_ort.kernels.weight_gradient_text import WeightGradientText, tile_heights

_FACTOR = "bfloat16"


def bfloat16_weight_gradient_text(vector_bytes: int) -> Text:
    """`block(arguments, number)`, which computes a part of a weight's gradient.

    Args:
        vector_bytes: the width of the CPU's vectors.
    """
    return _PairsText("float32", vector_bytes).write(tile_heights(vector_bytes))


class _PairsText(WeightGradientText):
    unit = 2

    def panel(self) -> str:
        pairs = self.op("mul", self.word(words.LINES), self._pairs_of_line())
        elements = self.op("add", self.op("mul", pairs, self.word(matmul.ROWS)), self.lanes)
        return self.text.effect(f"alloca i8, i64 {self.op('mul', elements, self.size)}, align 64")

    def pack(self, panel: str, first: str, last: str) -> None:
        """Copies pairs of pixels, one after the other; the last one of a line with an odd number is with zeros."""
        text, outputs, width = self.text, self.word(matmul.ROWS), self.word(words.OUT_WIDTH)
        pairs = self._pairs_of_line()
        with text.loop(first, last, 1) as line, text.loop("0", pairs, 1) as pair:
            number = self.op("mul", pair.index, 2)
            pixel = self.op("add", self.op("mul", line.index, width), number)
            has_second = self.test("slt", self.op("add", number, 1), width)
            numbers = pixel, self.choose(has_second, "i64", self.op("add", pixel, 1), pixel)
            left = self.word(matmul.LEFT, "ptr")
            sources = [self.at(left, self.op("mul", one, outputs), _FACTOR) for one in numbers]
            place = self.op("add", self.op("mul", self.op("sub", line.index, first), pairs), pair.index)
            target = self.at(panel, self.op("mul", place, outputs))
            # What is written behind the outputs of a pair is written again by the next one.
            with text.loop("0", outputs, self.lanes) as output:
                mask = self.mask(self.op("sub", outputs, output.index))
                pairs_of_outputs = loaded_pairs(text, sources, output.index, self.lanes, (mask, mask), has_second)
                stored(text, target, output.index, self.dtype, pairs_of_outputs, None)

    def grad(self, line: str) -> str:
        pairs = self.op("mul", self.op("sub", line, "%first_line"), self._pairs_of_line())
        return self.at("%panel", self.op("add", self.op("mul", pairs, self.word(matmul.ROWS)), "%output"))

    def image_at(self, place: str) -> str:
        return self.at(self.word(matmul.RIGHT, "ptr"), place, _FACTOR)

    def pixels(self, images: str, place: str, number: str | None) -> Vector:
        distance = self.word(words.PIXEL_DISTANCE)
        sources = images, self.at(images, distance, _FACTOR)
        if number is None:
            return loaded_pairs(self.text, sources, place, self.lanes)
        is_pixel = self.test("slt", self.op("add", number, 1), self.word(words.OUT_WIDTH))
        second = self.inside(self.op("add", place, distance))
        second = second & Vector(self.text, is_pixel, "bool", 0).splat(self.lanes)
        return loaded_pairs(self.text, sources, place, self.lanes, (self.inside(place), second))

    def multiply_add(self, left: Vector, right: Vector, total: Vector) -> Vector:
        return multiply_add_pairs(left, right, total)

    def _pairs_of_line(self) -> str:
        return self.divided_up(self.word(words.OUT_WIDTH), 2)
