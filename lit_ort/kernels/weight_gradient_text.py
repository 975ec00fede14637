"""The LLVM text of the gradient of a convolution's weight, of images with channels last.

It is the matmul of the transposed gradient, [outputs, pixels], and the patches that the pixels read, [pixels, patch].
Patches are read from the images while panels of the right factor are packed, so that they are never in memory as a
whole. Elements of a patch that are adjacent in an image are a run: rows of the kernel or, if it is dilated, its pixels.

Source: Chellapilla, Puri and Simard 2006 (patches as the rows of a matrix).
"""

from __future__ import annotations

from lit_ort.kernels import weight_gradient_arguments as words
from lit_ort.kernels.matmul_text import INNER, VECTORS, MatmulText
from lit_ort.kernels.vector_memory import loaded, stored
from lit_ort.kernels.vector_text import Text, Vector
from lit_ort.kernels.window_places import places_inside, shift_of


def weight_gradient_text(dtype: str, vector_bytes: int) -> Text:
    """`block(arguments, number)`, which computes a part of a weight's gradient.

    Args:
        dtype: of all values.
        vector_bytes: the width of the CPU's vectors.
    """
    text = _WeightGradientText(dtype, vector_bytes)
    text.write_block("")
    return text.text


class _WeightGradientText(MatmulText):
    def pack_right(self, start: str, depth: str, first: str, last: str) -> None:
        text, run = self.text, self.word(words.RUN)
        final = self.op("sub", last, self.lanes)
        with text.loop(first, last, self.columns) as tile:
            panel = self.at("%panel", self.op("mul", self.op("sub", tile.index, first), INNER))
            element = self.op("urem", tile.index, run)
            with self.branch(self.test("sle", self.op("add", element, self.columns), run)) as otherwise:
                self._pack_columns(start, depth, tile.index, panel, VECTORS)
                otherwise()
                for number in range(VECTORS):
                    # What follows the last vector is that one again, which is not stored.
                    column = self.minimum(self.op("add", tile.index, number * self.lanes), final)
                    self._pack_columns(start, depth, column, self.at(panel, number * self.lanes), 1)

    def _pack_columns(self, start: str, depth: str, column: str, target: str, vectors: int) -> None:
        """Vectors of neighbouring elements of each pixel's patch, which are in one run."""
        text, height, width = self.text, self.word(words.HEIGHT), self.word(words.OUT_WIDTH)
        run, element = (self.op(name, column, self.word(words.RUN)) for name in ("udiv", "urem"))
        across = self.word(words.RUNS_ACROSS)
        row, offset = self.op("udiv", run, across), self.op("urem", run, across)
        down = shift_of(self, row, words.ROW_DILATION, words.ROW_PADDING)
        right = shift_of(self, offset, words.COLUMN_DILATION, words.COLUMN_PADDING)
        first = self.op("add", self.op("mul", right, self.word(words.CHANNELS)), element)
        inside = self._pixels_inside(first, vectors)
        end = self.op("add", start, depth)
        with text.loop(self.op("udiv", start, width), self.divided_up(end, width), 1) as line:
            begin = self.op("mul", line.index, width)
            pixels = self.maximum(start, begin), self.minimum(end, self.op("add", begin, width))
            image, place = (self.op(name, line.index, self.word(words.OUT_HEIGHT)) for name in ("udiv", "urem"))
            read = self.op("add", self.op("mul", place, self.word(words.ROW_STRIDE)), down)
            source_row = self.op("add", self.op("mul", image, height), read)
            source = self.at("%right", self.op("mul", source_row, self.word(words.ROW_ELEMENTS)))
            with self.branch(self.test("ult", read, height)) as otherwise:
                low, high = (
                    self.maximum(pixels[0], self.minimum(pixels[1], self.op("add", begin, bound))) for bound in inside
                )
                for ends, is_inside in (((pixels[0], low), False), ((low, high), True), ((high, pixels[1]), False)):
                    place = self.op("add", first, self.op("mul", self.op("sub", ends[0], begin), self._distance))
                    goal = self.op("mul", self.op("sub", ends[0], start), self.columns)
                    self._copy(ends, (source, place), (target, goal), vectors, is_inside)
                otherwise()
                goal = self.op("mul", self.op("sub", pixels[0], start), self.columns)
                self._copy(pixels, None, (target, goal), vectors, True)

    @property
    def _distance(self) -> str:
        return self.word(words.PIXEL_DISTANCE)

    def _pixels_inside(self, first: str, vectors: int) -> tuple[str, str]:
        """Of a row of pixels, the first one that reads no element before an image's row, and the first that reads one
        behind it; the latter is not before the former."""
        left = self.op("sub", self.word(words.ROW_ELEMENTS), self.op("add", first, vectors * self.lanes))
        low, high = places_inside(self, first, self._distance, left)
        return low, self.maximum(low, high)

    def _copy(
        self,
        pixels: tuple[str, str],
        source: tuple[str, str] | None,
        target: tuple[str, str],
        vectors: int,
        is_inside: bool,
    ) -> None:
        """Copies what some pixels read, from places of a row; zeros without a row, and beyond its ends."""
        text, zero = self.text, self.text.literal(0.0, self.dtype, self.lanes)
        places = [Vector(text, place, "int64", 0) for place in (source[1] if source else "0", target[1])]
        with text.loop(*pixels, 1, places) as pixel:
            place, goal = pixel.current
            for number in range(vectors):
                value = zero
                if source is not None:
                    at = (place + number * self.lanes).name
                    mask = None if is_inside else self._inside(at)
                    value = loaded(text, source[0], at, self.dtype, self.lanes, mask)
                stored(text, target[0], (goal + number * self.lanes).name, self.dtype, value, None)
            pixel.carry([place + Vector(text, self._distance, "int64", 0), goal + self.columns])

    def _inside(self, place: str) -> Vector:
        """Which of the elements from a place on are in a row."""
        places = self.text.indices(place, self.lanes)
        return places.ge(0) & places.lt(Vector(self.text, self.word(words.ROW_ELEMENTS), "int64", 0))
