"""The LLVM text of convolutions of images with channels last, and of the gradients of their images.

A tile of the result, some pixels and some channels, stays in registers while the elements of the kernel and the
channels of the images are added. Its pixels are read where they are, by an address for each; those outside of an image
are read from zeros. The weight's columns of a tile are copied first, and used for all pixels of a thread.

Source: Dukhan 2019, The Indirect Convolution Algorithm (an address for each pixel instead of a matrix of patches).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lit_ort.kernels import convolution_arguments as words
from lit_ort.kernels import matmul_arguments as matmul
from lit_ort.kernels.matmul_text import CHECKS_STACK, SUMMED, VECTORS, MatmulText
from lit_ort.kernels.thread_pool import DENORMALS
from lit_ort.kernels.vector_memory import loaded
from lit_ort.kernels.vector_text import Text, Vector

# The words of a pixel of a tile: the address, the row and the column that it reads first; the address of its result.
_PIXEL_WORDS = {"read": 0, "row": 1, "column": 2, "write": 3}


def convolution_text(dtype: str, vector_bytes: int) -> Text:
    """`block(arguments, number)`, which computes a part of a convolution.

    Args:
        dtype: of all values.
        vector_bytes: the width of the CPU's vectors.
    """
    return ConvolutionText(dtype, vector_bytes).write_convolution()


class ConvolutionText(MatmulText):
    """The text of convolutions that is being written."""

    def write_convolution(self) -> Text:
        """Writes `block`."""
        text = self.text
        ranges = "ptr %args, ptr %right, ptr %panel, i64 %start, i64 %depth, i64 %first, i64 %last"
        text.function("pack", f"internal void @pack({ranges})", self._pack, "noinline")
        tile = "ptr %args, ptr %pixels, ptr %taps, i64 %tap_count, ptr %panel, i64 %start, i64 %depth"
        for vectors in range(1, VECTORS + 1):
            head = f"internal void @tile_{vectors}({tile}, i64 %rows, i64 %columns)"
            text.function(f"tile_{vectors}", head, functools.partial(self._sum_taps, vectors), "noinline")
        return self.write_grids()

    def write_grids(self) -> Text:
        """Writes `block`, which calls `grid` for its part of each grid."""
        text = self.text
        text.functions["denormals"] = DENORMALS
        grid = "ptr %args, ptr %grid, ptr %panel, i64 %first, i64 %last, i64 %first_column, i64 %last_column"
        text.function("grid", f"internal void @grid({grid})", self.grid, "noinline")
        text.function("block", "void @block(ptr %args, i64 %block)", self._grids, CHECKS_STACK)
        return text

    def _pack(self) -> None:
        self.pack_right("%start", "%depth", "%first", "%last")
        self.text.line("ret void")

    def table(self, pointer: str, position: int, kind: str = "i64") -> str:
        """A word of a table, which nothing writes while the function runs."""
        place = self.text.value(f"getelementptr i64, ptr {pointer}, i64 {position}")
        return self.text.value(f"load {kind}, ptr {place}, align 8")

    # A block.

    def _grids(self) -> None:
        text = self.text
        state = text.effect("call i32 @without_denormals()")
        depth = self.op("add", self.word(words.CHANNEL_STEP), self.lanes)
        elements = self.op("mul", self.op("mul", depth, self.word(words.MOST_TAPS)), self.columns)
        panel = text.effect(f"alloca i8, i64 {self.op('mul', elements, self.size)}, align 64")
        columns, by_rows = self.word(matmul.COLUMNS), self.test("eq", self.word(matmul.AXIS), matmul.BY_ROWS)
        own_columns = self.share(columns, self.columns)
        with text.loop("0", self.word(words.GRID_COUNT), 1) as loop:
            place = self.op("mul", loop.index, words.GRID_WORDS)
            grid = text.value(f"getelementptr i64, ptr {self.word(words.GRIDS, 'ptr')}, i64 {place}")
            pixels = self.op("mul", self.table(grid, words.GRID_HEIGHT), self.table(grid, words.GRID_WIDTH))
            pixels = self.op("mul", pixels, self.word(matmul.COUNT))
            own = self.share(pixels, self.rows)
            pairs = (own[0], "0"), (own[1], pixels), ("0", own_columns[0]), (columns, own_columns[1])
            bounds = [f"i64 {self.choose(by_rows, 'i64', *pair)}" for pair in pairs]
            text.line(f"call void @grid(ptr %args, ptr {grid}, ptr {panel}, {', '.join(bounds)})")
        text.line(f"call void @restore(i32 {state})")
        text.line("ret void")

    def grid(self) -> None:
        """Some pixels and channels of a grid."""
        text, channels, step = self.text, self.word(matmul.INNER), self.word(words.CHANNEL_STEP)
        taps, count = self.table("%grid", words.TAPS, "ptr"), self.table("%grid", words.TAP_COUNT)
        pixels = self.pixels()
        with (
            text.loop("0", channels, step) as outer,
            text.loop("%first_column", "%last_column", self.columns) as column,
        ):
            depth = self.minimum(self.op("sub", channels, outer.index), step)
            last = self.minimum(self.op("add", column.index, self.columns), "%last_column")
            with text.loop("0", count, 1) as tap:
                right = self.at(self.word(matmul.RIGHT, "ptr"), self.tap(taps, tap.index, words.TAP_WEIGHT))
                panel = self._panel_of(tap.index, depth)
                ranges = f"i64 {outer.index}, i64 {depth}, i64 {column.index}, i64 {last}"
                text.line(f"call void @pack(ptr %args, ptr {right}, ptr {panel}, {ranges})")
            width = self.op("sub", last, column.index)
            tile = self.choose(self.test("sgt", width, self.lanes), "ptr", f"@tile_{VECTORS}", "@tile_1")
            with self.each_tile_of_pixels(pixels, outer.index, column.index) as rows:
                given = f"ptr %args, ptr {pixels}, ptr {taps}, i64 {count}, ptr %panel"
                text.line(f"call void {tile}({given}, i64 {outer.index}, i64 {depth}, i64 {rows}, i64 {width})")
        text.line("ret void")

    def tap(self, taps: str, number: str, position: int) -> str:
        """A word of an element of the kernel."""
        place = self.op("mul", number, words.TAP_WORDS)
        return self.table(self.text.value(f"getelementptr i64, ptr {taps}, i64 {place}"), position)

    def _panel_of(self, tap: str, depth: str) -> str:
        return self.at("%panel", self.op("mul", self.op("mul", tap, depth), self.columns))

    # The pixels of a tile.

    def pixels(self) -> str:
        """Memory for the words of a tile's pixels."""
        return self.text.effect(f"alloca i64, i64 {len(_PIXEL_WORDS) * self.rows}, align 64")

    @contextmanager
    def each_tile_of_pixels(self, pixels: str, start: str, column: str) -> Iterator[str]:
        """A loop over tiles, which writes the words of their pixels: the number of pixels up to the last one.

        Args:
            pixels: the memory of the words.
            start: the channel that is read first.
            column: the channel of the result that is computed first.
        """
        width, height = self.table("%grid", words.GRID_WIDTH), self.table("%grid", words.GRID_HEIGHT)
        line = self.op("udiv", "%first", width)
        first = self.op("udiv", line, height), self.op("urem", line, height), self.op("urem", "%first", width)
        vectors = [Vector(self.text, name, "int64", 0) for name in first]
        with self.text.loop("%first", "%last", self.rows, vectors) as tile:
            tile.carry(self._put_pixels(pixels, tile.current, start, column))
            yield self.op("sub", "%last", tile.index)

    def _put_pixels(self, pixels: str, pixel: Sequence[Vector], start: str, column: str) -> list[Vector]:
        """Writes the words of a tile's pixels. Returns the image, the row and the column of the pixel behind them."""
        width, height = self.table("%grid", words.GRID_WIDTH), self.table("%grid", words.GRID_HEIGHT)
        image, row, line = (vector.name for vector in pixel)
        for number in range(self.rows):
            for name, (kind, value) in self._words_of_pixel(image, row, line, start, column).items():
                place = number * len(_PIXEL_WORDS) + _PIXEL_WORDS[name]
                slot = self.text.value(f"getelementptr i64, ptr {pixels}, i64 {place}")
                self.text.line(f"store {kind} {value}, ptr {slot}, align 8")
            line, row = self._wrapped(self.op("add", line, 1), width, row)
            row, image = self._wrapped(row, height, image)
        return [Vector(self.text, name, "int64", 0) for name in (image, row, line)]

    def _wrapped(self, number: str, count: str, carried: str) -> tuple[str, str]:
        """A number, or 0 if it has reached `count`, and another one, which then is larger by 1."""
        is_end = self.test("eq", number, count)
        raised = self.op("add", carried, self.text.value(f"zext i1 {is_end} to i64"))
        return self.choose(is_end, "i64", 0, number), raised

    def _words_of_pixel(self, image: str, row: str, line: str, start: str, column: str) -> dict[str, tuple[str, str]]:
        # Tiles may end behind the last image.
        source = self.minimum(image, self.op("sub", self.word(matmul.COUNT), 1))
        down = self.op("mul", row, self.word(words.ROW_STRIDE))
        right = self.op("mul", line, self.word(words.COLUMN_STRIDE))
        place = self.op("add", self.op("mul", source, self.word(words.HEIGHT)), down)
        place = self.op("add", self.op("mul", place, self.word(words.WIDTH)), right)
        place = self.op("add", self.op("mul", place, self.word(words.PIXEL)), start)
        goal = self.op("add", self.table("%grid", words.GRID_PLACE), column)
        steps = (image, words.RESULT_IMAGE), (row, words.RESULT_LINE), (line, words.RESULT_PIXEL)
        for number, step in steps:
            goal = self.op("add", goal, self.op("mul", number, self.word(step)))
        read, write = self.at(self.word(matmul.LEFT, "ptr"), place), self.at(self.word(matmul.RESULT, "ptr"), goal)
        return {"read": ("ptr", read), "row": ("i64", down), "column": ("i64", right), "write": ("ptr", write)}

    def pixel(self, number: int, name: str, kind: str = "i64") -> str:
        """A word of a pixel of a tile."""
        return self.table("%pixels", number * len(_PIXEL_WORDS) + _PIXEL_WORDS[name], kind)

    def addresses(self, tap: str, start: str) -> list[str]:
        """Where the pixels of a tile read for an element of the kernel, from a channel on."""
        positions = words.TAP_DOWN, words.TAP_RIGHT, words.TAP_PLACE
        down, right, place = (self.tap("%taps", tap, position) for position in positions)
        height, width, zeros = self.word(words.HEIGHT), self.word(words.WIDTH), self.word(words.ZEROS, "ptr")
        addresses = []
        for number in range(self.rows):
            row, column = self.op("add", self.pixel(number, "row"), down), self.pixel(number, "column")
            column = self.op("add", column, right)
            is_inside = self.text.value(f"and i1 {self.test('ult', row, height)}, {self.test('ult', column, width)}")
            address = self.at(self.pixel(number, "read", "ptr"), place)
            addresses.append(self.choose(is_inside, "ptr", address, zeros))
        return addresses

    # A tile.

    def _sum_taps(self, vectors: int) -> None:
        text, zero = self.text, self.text.literal(0.0, self.dtype, self.lanes)
        step = self.word(words.TAP_STEP)
        # Without elements of the kernel, the result is zero.
        with (
            text.loop("0", self.maximum("%tap_count", 1), step) as some,
            text.loop("0", "%depth", SUMMED) as part,
        ):
            last_tap = self.minimum("%tap_count", self.op("add", some.index, step))
            last = self.minimum("%depth", self.op("add", part.index, SUMMED))
            with text.loop(some.index, last_tap, 1, [zero] * (self.rows * vectors)) as tap:
                addresses = self.addresses(tap.index, part.index)
                panel = self._panel_of(tap.index, "%depth")
                with text.loop(part.index, last, 1, tap.current) as loop:
                    loop.carry(self._added(loop.index, addresses, panel, loop.current))
                tap.carry(loop.current)
            earlier = self.op("or", self.op("or", "%start", some.index), part.index)
            is_added = text.value(f"zext i1 {self.test('ne', earlier, 0)} to i64")
            self.store_tile(tap.current, is_added)
        text.line("ret void")

    def _added(self, k: str, addresses: Sequence[str], panel: str, totals: Sequence[Vector]) -> list[Vector]:
        right, result = self.at(panel, self.op("mul", k, self.columns)), []
        count = len(totals) // self.rows
        vectors = [self.vector(self.at(right, number * self.lanes)) for number in range(count)]
        for row, address in enumerate(addresses):
            factor = loaded(self.text, address, k, self.dtype, 0, None).splat(self.lanes)
            added = totals[row * count : (row + 1) * count]
            pairs = zip(vectors, added, strict=True)
            result += [self.multiply_add(factor, vector, total) for vector, total in pairs]
        return result

    def result_rows(self) -> list[str]:
        return [self.pixel(number, "write", "ptr") for number in range(self.rows)]
