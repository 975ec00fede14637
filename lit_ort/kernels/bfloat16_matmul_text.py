"""The LLVM texts of matmuls of bfloat16 factors, which are added in float32.

CPUs with AVX-512 BF16 multiply pairs of neighbours along the inner dimension. For others, factors are converted to
float32 when they are copied to panels.

Source: `VDPBF16PS` of Intel's manual, volume 2, for the order of pairs.
"""

from __future__ import annotations

from lit_ort.kernels.matmul_text import MatmulText, Row
from lit_ort.kernels.vector_memory import loaded
from lit_ort.kernels.vector_text import Text, Vector, type_text

_DOT_PRODUCT = "llvm.x86.avx512bf16.dpbf16ps.512"


def bfloat16_matmul_text(vector_bytes: int, has_pairs: bool, on_threads: str, most_threads: str | None) -> Text:
    """`gemm` and `gemm_batch` as `matmul_text` writes them, of bfloat16 factors; their results are float32.

    Args:
        vector_bytes: the width of the CPU's vectors.
        has_pairs: whether the CPU has AVX-512 BF16.
        on_threads, most_threads: as of `matmul_text`.
    """
    text = _PairsText if has_pairs else _ConvertedText
    return text("float32", vector_bytes).write(on_threads, most_threads)


class _ConvertedText(MatmulText):
    """Matmuls of factors whose elements are float32 in panels."""

    reads_in_place = False

    def factor_at(self, pointer: str, place: str | int) -> str:
        return self.text.value(f"getelementptr i16, ptr {pointer}, i64 {place}")

    def along_inner(self, source: str, mask: Vector) -> Vector:
        return loaded(self.text, source, "0", "bfloat16", self.lanes, mask)

    def across_inner(self, pointer: str, row: str, last: str, distance: str) -> Row:
        source = self.factor_at(pointer, self.op("mul", row, distance))
        return lambda place, mask: loaded(self.text, source, place, "bfloat16", self.lanes, mask)


class _PairsText(MatmulText):
    """Matmuls of factors of which panels have pairs of neighbours along the inner dimension."""

    unit, reads_in_place = 2, False

    def factor_at(self, pointer: str, place: str | int) -> str:
        return self.text.value(f"getelementptr i16, ptr {pointer}, i64 {place}")

    def along_inner(self, source: str, mask: Vector) -> Vector:
        return self._pairs(loaded(self.text, source, "0", "int16", 2 * self.lanes, mask))

    def inner_mask(self, count: str) -> Vector:
        return self.mask(count, 2 * self.lanes)

    def across_inner(self, pointer: str, row: str, last: str, distance: str) -> Row:
        """The last row has no second one, in whose place are zeros."""
        text, following = self.text, self.op("add", row, 1)
        has_second = self.test("slt", following, last)
        rows = row, self.choose(has_second, "i64", following, row)
        sources = [self.factor_at(pointer, self.op("mul", one, distance)) for one in rows]
        kept = Vector(text, text.value(f"sext i1 {has_second} to i16"), "int16", 0)

        def pairs(place: str, mask: Vector | None) -> Vector:
            first, second = (loaded(text, source, place, "int16", self.lanes, mask) for source in sources)
            kind, order = first.type, ", ".join(f"i32 {k % 2 * self.lanes + k // 2}" for k in range(2 * self.lanes))
            second = second & kept
            joined = f"shufflevector {kind} {first.name}, {kind} {second.name}, <{2 * self.lanes} x i32> <{order}>"
            return self._pairs(Vector(text, text.value(joined), "int16", 2 * self.lanes))

        return pairs

    def multiply_add(self, left: Vector, right: Vector, total: Vector) -> Vector:
        kind = f"<{2 * self.lanes} x bfloat>"
        pairs = [(kind, self.text.value(f"bitcast {one.type} {one.name} to {kind}")) for one in (right, left)]
        return total.made_of_call(_DOT_PRODUCT, total.type, (total.type, total.name), *pairs)

    def _pairs(self, elements: Vector) -> Vector:
        """Two elements of 16 bits as one of the panel's."""
        kind = type_text(self.dtype, self.lanes)
        name = self.text.value(f"bitcast {elements.type} {elements.name} to {kind}")
        return Vector(self.text, name, self.dtype, self.lanes)
