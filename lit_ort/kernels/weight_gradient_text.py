"""The LLVM text of the gradient of a convolution's weight, of images with channels last.

It is the matmul of the transposed gradient, [outputs, pixels], and the patches that the pixels read, [pixels, patch]. A
tile of the result, some outputs and some elements of patches, stays in registers while pixels are added, which are read
where they are. Elements of a patch that are adjacent in an image are a run: rows of the kernel or, if it is dilated,
its pixels.

Source: Georganas et al. 2018, Anatomy of High-Performance Deep Learning Convolutions (gradients of weights as outer
products of pixels).
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_ort.kernels import matmul_arguments as matmul
from lit_ort.kernels import weight_gradient_arguments as words
from lit_ort.kernels.kernel_text import KernelText
from lit_ort.kernels.matmul_text import CHECKS_STACK, ROWS, VECTORS
from lit_ort.kernels.thread_pool import DENORMALS
from lit_ort.kernels.vector_memory import loaded, stored
from lit_ort.kernels.vector_text import Text, Vector
from lit_ort.kernels.window_places import places_inside, shift_of


def weight_gradient_text(dtype: str, vector_bytes: int) -> Text:
    """`block(arguments, number)`, which computes a part of a weight's gradient.

    Args:
        dtype: of all values.
        vector_bytes: the width of the CPU's vectors.
    """
    return WeightGradientText(dtype, vector_bytes).write(tile_heights(vector_bytes))


def tile_heights(vector_bytes: int) -> tuple[int, ...]:
    """The outputs that a tile can have, of which the first ones are faster."""
    largest = ROWS[vector_bytes]
    return largest, largest - largest // 3, 1


class WeightGradientText(KernelText):
    """The text of gradients of weights that is being written.

    Attributes:
        unit: the pixels that are added at a time.
    """

    unit = 1

    def write(self, heights: Sequence[int]) -> Text:
        """Writes `block`, with tiles of these numbers of outputs."""
        text = self.text
        text.functions["denormals"] = DENORMALS
        for height in heights:
            for vectors in range(1, VECTORS + 1):
                ranges = "i64 %first_line, i64 %last_line, i64 %run, i64 %element, i64 %output, i64 %channel"
                head = f"internal void @{_tile_name(height, vectors)}(ptr %args, ptr %panel, {ranges})"
                text.function(_tile_name(height, vectors), head, _Tile(self, height, vectors).write, "noinline")
        text.function("block", "void @block(ptr %args, i64 %block)", lambda: self._block(heights), CHECKS_STACK)
        return text

    # What a tile reads.

    def panel(self) -> str:
        """Memory for what a thread copies of some lines of the gradient, if it does."""
        return "null"

    def pack(self, panel: str, first: str, last: str) -> None:
        """Copies the gradient of some lines."""

    def grad(self, line: str) -> str:
        """The address of the gradient of a line's first pixels, of a tile's first output."""
        outputs = self.op("mul", self.op("mul", line, self.word(words.OUT_WIDTH)), self.word(matmul.ROWS))
        return self.at(self.word(matmul.LEFT, "ptr"), self.op("add", outputs, "%output"))

    def image_at(self, place: str) -> str:
        """The address of an element of the images."""
        return self.at(self.word(matmul.RIGHT, "ptr"), place)

    def pixels(self, images: str, place: str, number: str | None) -> Vector:
        """Elements of pixels; zeros beyond an image's row.

        Args:
            images: the address of the row.
            place: of the first element in the row.
            number: of the first pixel in its line; None if all of them are inside of an image.
        """
        mask = None if number is None else self.inside(place)
        return loaded(self.text, images, place, self.dtype, self.lanes, mask)

    def inside(self, place: str) -> Vector:
        """Which elements from a place on are in a row of an image."""
        places = self.text.indices(place, self.lanes)
        return places.ge(0) & places.lt(Vector(self.text, self.word(words.ROW_ELEMENTS), "int64", 0))

    def multiply_add(self, left: Vector, right: Vector, total: Vector) -> Vector:
        """The total and the products of some pixels."""
        return left.fma(right, total)

    # A block.

    def _block(self, heights: Sequence[int]) -> None:
        """Some units: pairs of a tile of outputs and of neighbouring vectors of a run."""
        text, state, panel = self.text, self.text.effect("call i32 @without_denormals()"), self.panel()
        count, (first, last) = self.word(matmul.COUNT), self.share(self.word(words.UNITS), 1)
        # Without lines, the result is zero.
        with text.loop("0", self.maximum(count, 1), self.word(words.LINES)) as lines:
            end = self.minimum(count, self.op("add", lines.index, self.word(words.LINES)))
            self.pack(panel, lines.index, end)
            with text.loop(first, last, 1) as unit:
                tiles, run = self.word(words.TILE_COUNT), self.word(words.RUN)
                tile, columns = self.op("urem", unit.index, tiles), self.op("udiv", unit.index, tiles)
                width = self.divided_up(run, VECTORS * self.lanes)
                element = self.op("mul", self.op("urem", columns, width), VECTORS * self.lanes)
                positions = words.TILE_OUTPUT, words.TILE_HEIGHT, words.TILE_CHANNEL
                output, height, channel = (self._of_tile(tile, position) for position in positions)
                is_whole = self.test("sge", self.op("sub", run, element), VECTORS * self.lanes)
                places = f"i64 {self.op('udiv', columns, width)}, i64 {element}, i64 {output}, i64 {channel}"
                for one in heights:
                    with self.branch(self.test("eq", height, one)):
                        names = [f"@{_tile_name(one, vectors)}" for vectors in (VECTORS, 1)]
                        function = self.choose(is_whole, "ptr", *names)
                        lines_of_tile = f"ptr {panel}, i64 {lines.index}, i64 {end}"
                        text.line(f"call void {function}(ptr %args, {lines_of_tile}, {places})")
        text.line(f"call void @restore(i32 {state})")
        text.line("ret void")

    def _of_tile(self, number: str, position: int) -> str:
        place = self.op("add", self.op("mul", number, words.TILE_WORDS), position)
        slot = self.text.value(f"getelementptr i64, ptr {self.word(words.TILES, 'ptr')}, i64 {place}")
        return self.text.value(f"load i64, ptr {slot}, align 8")


class _Tile:
    """A tile of some outputs and some vectors of a run, of the pixels of some lines."""

    def __init__(self, kernel: WeightGradientText, height: int, vectors: int) -> None:
        self._kernel, self._text = kernel, kernel.text
        self._height, self._vectors = height, vectors

    def write(self) -> None:
        text, k = self._text, self._kernel
        zero, width = text.literal(0.0, k.dtype, k.lanes), k.word(words.OUT_WIDTH)
        across = k.word(words.RUNS_ACROSS)
        row, offset = k.op("udiv", "%run", across), k.op("urem", "%run", across)
        down = shift_of(k, row, words.ROW_DILATION, words.ROW_PADDING)
        right = shift_of(k, offset, words.COLUMN_DILATION, words.COLUMN_PADDING)
        first = k.op("add", k.op("mul", right, k.word(words.CHANNELS)), k.op("add", "%channel", "%element"))
        low, high = (k.minimum(end, width) for end in self._pixels_inside(first))
        low, count = (k.divided_up(end, k.unit) for end in (low, width))
        high = k.maximum(k.op("udiv", high, k.unit), low)
        with text.loop("%first_line", "%last_line", 1, [zero] * (self._height * self._vectors)) as line:
            image, place = (k.op(name, line.index, k.word(words.OUT_HEIGHT)) for name in ("udiv", "urem"))
            read = k.op("add", k.op("mul", place, k.word(words.ROW_STRIDE)), down)
            source = k.op("add", k.op("mul", image, k.word(words.HEIGHT)), read)
            images, grad = k.image_at(k.op("mul", source, k.word(words.ROW_ELEMENTS))), k.grad(line.index)
            # Lines that read no row of their image have no pixels.
            is_inside = k.test("ult", read, k.word(words.HEIGHT))
            ends = [k.choose(is_inside, "i64", end, 0) for end in (low, high, count)]
            pixels = [Vector(text, one, "int64", 0) for one in ("0", first)]
            carried = [*pixels, *line.current]
            for start, end, is_whole in zip(["0", *ends[:2]], ends, (False, True, False), strict=True):
                with text.loop(start, end, 1, carried) as pixel:
                    number = None if is_whole else k.op("mul", pixel.index, k.unit)
                    pixel.carry(self._added(grad, images, pixel.current, number))
                carried = pixel.current
            line.carry(carried[len(pixels) :])
        self._store(line.current)
        text.line("ret void")

    def _pixels_inside(self, first: str) -> tuple[str, str]:
        """Of a line of pixels, the first one that reads no element before an image's row, and the first that reads one
        behind it; the latter is not before the former."""
        k = self._kernel
        left = k.op("sub", k.word(words.ROW_ELEMENTS), k.op("add", first, self._vectors * k.lanes))
        low, high = places_inside(k, first, k.word(words.PIXEL_DISTANCE), left)
        return low, k.maximum(low, high)

    def _added(self, grad: str, images: str, current: Sequence[Vector], number: str | None) -> list[Vector]:
        """The places behind some pixels, and the sums with them.

        Args:
            grad, images: the addresses of what a line reads.
            current: the places of the pixels, and the sums.
            number: of the first pixel in its line; None if all of them are inside of an image.
        """
        k, (of_grad, place), totals = self._kernel, current[:2], current[2:]
        vectors = [k.pixels(images, (place + vector * k.lanes).name, number) for vector in range(self._vectors)]
        sums: list[Vector] = []
        for output in range(self._height):
            factor = loaded(self._text, k.at(grad, of_grad.name), str(output), k.dtype, 0, None).splat(k.lanes)
            added = totals[output * self._vectors : (output + 1) * self._vectors]
            sums += [k.multiply_add(factor, vector, total) for vector, total in zip(vectors, added, strict=True)]
        numbers = k.word(matmul.ROWS), k.op("mul", k.word(words.PIXEL_DISTANCE), k.unit)
        steps = (Vector(self._text, number, "int64", 0) for number in numbers)
        return [*(one + step for one, step in zip((of_grad, place), steps, strict=True)), *sums]

    def _store(self, totals: Sequence[Vector]) -> None:
        """Stores the sums of the first lines, and adds those of others."""
        k, text = self._kernel, self._text
        column = k.op("add", k.op("mul", "%run", k.word(words.RUN)), "%element")
        for output in range(self._height):
            row = k.op("mul", k.op("add", "%output", output), k.word(matmul.RESULT_ROW))
            result = k.at(k.word(matmul.RESULT, "ptr"), k.op("add", row, column))
            for number in range(self._vectors):
                total, place = totals[output * self._vectors + number], str(number * k.lanes)
                with k.branch(k.test("eq", "%first_line", 0)) as otherwise:
                    stored(text, result, place, k.dtype, total, None)
                    otherwise()
                    earlier = loaded(text, result, place, k.dtype, k.lanes, None)
                    stored(text, result, place, k.dtype, earlier + total, None)


def _tile_name(height: int, vectors: int) -> str:
    return f"tile_{height}_{vectors}"
