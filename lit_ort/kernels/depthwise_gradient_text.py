"""The LLVM text of the gradient of a depthwise convolution's weight, of images with channels last.

The gradient of each element of the kernel is a sum over pixels, of vectors of channels.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_ort.kernels import matmul_arguments as matmul
from lit_ort.kernels import weight_gradient_arguments as words
from lit_ort.kernels.kernel_text import KernelText
from lit_ort.kernels.thread_pool import DENORMALS
from lit_ort.kernels.vector_memory import loaded, stored
from lit_ort.kernels.vector_text import Text, Vector
from lit_ort.kernels.window_places import places_inside, shift_of

# The vectors of channels that a block computes: as many sums as are needed to keep the units busy.
VECTORS = 4


def depthwise_gradient_text(dtype: str, vector_bytes: int) -> Text:
    """`block(arguments, number)`, which computes the gradients of some channels from some images.

    Args:
        dtype: of all values.
        vector_bytes: the width of the CPU's vectors.
    """
    text = _DepthwiseGradientText(dtype, vector_bytes)
    text.text.functions["denormals"] = DENORMALS
    text.text.function("block", "void @block(ptr %args, i64 %block)", text.block)
    return text.text


class _DepthwiseGradientText(KernelText):
    def block(self) -> None:
        text = self.text
        state = text.effect("call i32 @without_denormals()")
        first = self.op("mul", self.op("udiv", "%block", self.word(words.PARTS)), VECTORS * self.lanes)
        left = self.op("sub", self.word(words.CHANNELS), first)
        with self.branch(self.test("sge", left, VECTORS * self.lanes)) as otherwise:
            self._images(first, [None] * VECTORS)
            otherwise()
            self._images(first, [self.mask(self.op("sub", left, number * self.lanes)) for number in range(VECTORS)])
        text.line(f"call void @restore(i32 {state})")
        text.line("ret void")

    def _images(self, first: str, masks: Sequence[Vector | None]) -> None:
        text, channels = self.text, self.word(words.CHANNELS)
        pixels = self.op("mul", self.word(words.OUT_HEIGHT), self.word(words.OUT_WIDTH))
        elements = self.op("mul", self.word(words.HEIGHT), self.word(words.ROW_ELEMENTS))
        parts = self.word(words.PARTS)
        part = self.op("urem", "%block", parts)
        some = [self.op("mul", self.word(matmul.COUNT), one) for one in (part, self.op("add", part, 1))]
        taps = self.op("mul", self.word(words.KERNEL_HEIGHT), self.word(words.KERNEL_WIDTH))
        zero = text.literal(0.0, self.dtype, self.lanes)
        # A part may have no images.
        with text.loop("0", taps, 1) as tap:
            number = self.op("add", self.op("mul", part, taps), tap.index)
            result = self.at(self.word(matmul.RESULT, "ptr"), self.op("add", self.op("mul", number, channels), first))
            for vector, mask in enumerate(masks):
                stored(text, result, str(vector * self.lanes), self.dtype, zero, mask)
        with text.loop(self.op("udiv", some[0], parts), self.op("udiv", some[1], parts), 1) as image:
            grad = self.at(self.word(matmul.LEFT, "ptr"), self.op("mul", self.op("mul", image.index, pixels), channels))
            images = self.at(self.word(matmul.RIGHT, "ptr"), self.op("mul", image.index, elements))
            with (
                text.loop("0", self.word(words.KERNEL_HEIGHT), 1) as row,
                text.loop("0", self.word(words.KERNEL_WIDTH), 1) as column,
            ):
                tap = self.op("add", self.op("mul", row.index, self.word(words.KERNEL_WIDTH)), column.index)
                number = self.op("add", self.op("mul", part, taps), tap)
                place = self.op("add", self.op("mul", number, channels), first)
                result = self.at(self.word(matmul.RESULT, "ptr"), place)
                sums = self._read(result, "0", masks)
                for vector, total in enumerate(
                    self._summed(grad, images, first, (row.index, column.index), sums, masks)
                ):
                    stored(text, result, str(vector * self.lanes), self.dtype, total, masks[vector])

    def _summed(
        self,
        grad: str,
        images: str,
        first: str,
        tap: tuple[str, str],
        sums: list[Vector],
        masks: Sequence[Vector | None],
    ) -> list[Vector]:
        """Sums over the pixels of an image, of an element of the kernel."""
        text, channels = self.text, self.word(words.CHANNELS)
        down = shift_of(self, tap[0], words.ROW_DILATION, words.ROW_PADDING)
        right = shift_of(self, tap[1], words.COLUMN_DILATION, words.COLUMN_PADDING)
        step = self.word(words.PIXEL_DISTANCE)
        width = self.op("udiv", self.word(words.ROW_ELEMENTS), channels)
        rows = self._inside(down, self.word(words.ROW_STRIDE), self.word(words.HEIGHT), self.word(words.OUT_HEIGHT))
        columns = self._inside(right, self.op("udiv", step, channels), width, self.word(words.OUT_WIDTH))
        with text.loop(*rows, 1, sums) as row:
            read = self.op("add", self.op("mul", row.index, self.word(words.ROW_STRIDE)), down)
            source = self.at(images, self.op("mul", read, self.word(words.ROW_ELEMENTS)))
            line = self.op("mul", row.index, self.word(words.OUT_WIDTH))
            of_grad = self.op("add", self.op("mul", self.op("add", line, columns[0]), channels), first)
            start = self.op("add", self.op("mul", right, channels), first)
            place = self.op("add", self.op("mul", columns[0], step), start)
            places = [Vector(text, one, "int64", 0) for one in (of_grad, place)]
            with text.loop(*columns, 1, [*places, *row.current]) as pixel:
                at_grad, at_image, *current = pixel.current
                left, values = self._read(grad, at_grad.name, masks), self._read(source, at_image.name, masks)
                totals = [one.fma(other, total) for one, other, total in zip(left, values, current, strict=True)]
                steps = [Vector(text, one, "int64", 0) for one in (channels, step)]
                pixel.carry([at_grad + steps[0], at_image + steps[1], *totals])
            row.carry(pixel.current[2:])
        return row.current

    def _inside(self, shift: str, stride: str, size: str, count: str) -> tuple[str, str]:
        """The first of `count` places that reads inside of `size`, and the first that reads behind it."""
        low, high = places_inside(self, shift, stride, self.op("sub", self.op("sub", size, 1), shift))
        return low, self.minimum(high, count)

    def _read(self, pointer: str, place: str, masks: Sequence[Vector | None]) -> list[Vector]:
        start = self.at(pointer, place)
        return [
            loaded(self.text, start, str(number * self.lanes), self.dtype, self.lanes, mask)
            for number, mask in enumerate(masks)
        ]
