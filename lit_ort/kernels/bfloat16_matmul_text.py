"""The LLVM texts of matmuls of bfloat16 factors, which are added in float32.

CPUs with AVX-512 BF16 multiply pairs of neighbours along the inner dimension. For others, factors are converted to
float32 when they are copied to panels.
"""

from __future__ import annotations

from lit_ort.kernels.bfloat16_pairs import as_pairs, loaded_pairs, multiply_add_pairs
from lit_ort.kernels.matmul_text import MatmulText, Row
from lit_ort.kernels.vector_memory import loaded
from lit_ort.kernels.vector_text import Text, Vector


def bfloat16_matmul_text(vector_bytes: int, has_pairs: bool, on_threads: str, most_threads: str | None) -> Text:
    """`gemm` and `gemm_batch` as `matmul_text` writes them, of bfloat16 factors; their results are float32.

    Args:
        vector_bytes: the width of the CPU's vectors.
        has_pairs: whether the CPU has AVX-512 BF16.
        on_threads, most_threads: as of `matmul_text`.
    """
    text = _PairsText if has_pairs else MatmulText
    return text("float32", vector_bytes, "bfloat16").write(on_threads, most_threads)


class _PairsText(MatmulText):
    """Matmuls of factors of which panels have pairs of neighbours along the inner dimension."""

    unit = 2

    def along_inner(self, source: str, mask: Vector) -> Vector:
        return as_pairs(loaded(self.text, source, "0", "int16", 2 * self.lanes, mask))

    def inner_mask(self, count: str) -> Vector:
        return self.mask(count, 2 * self.lanes)

    def across_inner(self, pointer: str, row: str, last: str, distance: str) -> Row:
        """The last row has no second one, in whose place are zeros."""
        following = self.op("add", row, 1)
        has_second = self.test("slt", following, last)
        rows = row, self.choose(has_second, "i64", following, row)
        sources = [self.factor_at(pointer, self.op("mul", one, distance)) for one in rows]
        return lambda place, mask: loaded_pairs(self.text, sources, place, self.lanes, (mask, mask), has_second)

    def multiply_add(self, left: Vector, right: Vector, total: Vector) -> Vector:
        return multiply_add_pairs(left, right, total)
