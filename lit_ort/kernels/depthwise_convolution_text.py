"""The LLVM text of convolutions of each channel, of images with channels last, and of the gradients of their images.

As for other convolutions, pixels are read by their addresses; vectors are of channels, and the weight is read where it
is. The addresses of a tile's pixels are found once for all of its channels.
"""

from __future__ import annotations

from lit_ort.kernels import convolution_arguments as words
from lit_ort.kernels import matmul_arguments as matmul
from lit_ort.kernels.convolution_text import ConvolutionText
from lit_ort.kernels.matmul_text import VECTORS
from lit_ort.kernels.vector_memory import loaded, stored
from lit_ort.kernels.vector_text import Text, Vector

# Pixels of a tile.
PIXELS = 4


def depthwise_convolution_text(dtype: str, vector_bytes: int) -> Text:
    """`block(arguments, number)`, which computes a part of a convolution of each channel.

    Args:
        dtype: of all values.
        vector_bytes: the width of the CPU's vectors.
    """
    return _DepthwiseText(dtype, vector_bytes).write_convolution()


class _DepthwiseText(ConvolutionText):
    def __init__(self, dtype: str, vector_bytes: int) -> None:
        super().__init__(dtype, vector_bytes)
        self.rows = PIXELS

    def write_convolution(self) -> Text:
        tile = "ptr %args, ptr %pixels, ptr %taps, i64 %tap_count, ptr %panel"
        columns = "i64 %rows, i64 %first_column, i64 %last_column"
        self.text.function("tile", f"internal void @tile({tile}, {columns})", self._sum_channels, "noinline")
        return self.write_grids()

    def grid(self) -> None:
        text, pixels = self.text, self.pixels()
        taps, count = self.table("%grid", words.TAPS, "ptr"), self.table("%grid", words.TAP_COUNT)
        with self.each_tile_of_pixels(pixels, "0", "0") as rows:
            given = f"ptr %args, ptr {pixels}, ptr {taps}, i64 {count}, ptr %panel"
            text.line(f"call void @tile({given}, i64 {rows}, i64 %first_column, i64 %last_column)")
        text.line("ret void")

    def _sum_channels(self) -> None:
        """Some channels of a tile; its panel is memory for the addresses of its pixels, of each tap."""
        text = self.text
        with text.loop("0", "%tap_count", 1) as tap:
            for number, address in enumerate(self.addresses(tap.index, "0")):
                text.line(f"store ptr {address}, ptr {self._slot(tap.index, number)}, align 8")
        columns = self.columns
        whole = self.op("sub", "%last_column", columns - 1)
        with text.loop("%first_column", whole, columns) as column:
            self._sum_taps_of(column.index, [None] * VECTORS)
        done = self.op("mul", self.op("udiv", self.op("sub", "%last_column", "%first_column"), columns), columns)
        first = self.op("add", "%first_column", done)
        with self.branch(self.test("slt", first, "%last_column")):
            left = self.op("sub", "%last_column", first)
            counts = [self.op("sub", left, number * self.lanes) for number in range(VECTORS)]
            self._sum_taps_of(first, list(map(self.mask, counts)))
        text.line("ret void")

    def _slot(self, tap: str, number: int) -> str:
        place = self.op("add", self.op("mul", tap, self.rows), number)
        return self.text.value(f"getelementptr ptr, ptr %panel, i64 {place}")

    def _sum_taps_of(self, column: str, masks: list[Vector | None]) -> None:
        text, zero = self.text, self.text.literal(0.0, self.dtype, self.lanes)
        with text.loop("0", "%tap_count", 1, [zero] * (self.rows * VECTORS)) as tap:
            weight = self.op("add", self.tap("%taps", tap.index, words.TAP_WEIGHT), column)
            factors = self._vectors(self.word(matmul.RIGHT, "ptr"), weight, masks)
            sums = []
            for number in range(self.rows):
                # Memory that the loop before has written.
                address = text.effect(f"load ptr, ptr {self._slot(tap.index, number)}, align 8")
                values = self._vectors(address, column, masks)
                totals = tap.current[number * VECTORS : (number + 1) * VECTORS]
                sums += [one.fma(value, total) for one, value, total in zip(factors, values, totals, strict=True)]
            tap.carry(sums)
        for number in range(self.rows):
            with self.branch(self.test("sgt", "%rows", number)):
                result = self.at(self.pixel(number, "write", "ptr"), column)
                for at, mask in enumerate(masks):
                    total = tap.current[number * VECTORS + at]
                    stored(text, result, str(at * self.lanes), self.dtype, total, mask)

    def _vectors(self, pointer: str, place: str, masks: list[Vector | None]) -> list[Vector]:
        start = self.at(pointer, place)
        return [
            loaded(self.text, start, str(number * self.lanes), self.dtype, self.lanes, mask)
            for number, mask in enumerate(masks)
        ]
