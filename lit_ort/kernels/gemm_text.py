"""The LLVM texts of kernels that call the matmul of BLAS."""

from __future__ import annotations

from lit_ort.kernels.kernel_text import KernelText

# A factor of a matmul: the address of a matrix, the distance of its rows, and whether the transpose is meant.
Factor = tuple[str, str, bool]


class GemmText(KernelText):
    """A text that is being written, with the function `multiply`.

    Args:
        dtype: of the elements.
        vector_bytes: the width of the CPU's vectors.
        gemm: the address of the matmul of BLAS.
    """

    def __init__(self, dtype: str, vector_bytes: int, gemm: int) -> None:
        super().__init__(dtype, vector_bytes)
        kind = "float" if dtype == "float32" else "double"
        self.text.functions["multiply"] = _MULTIPLY.format(kind=kind, gemm=f"inttoptr (i64 {gemm} to ptr)")

    def multiply(
        self, left: Factor, right: Factor, result: str, sizes: tuple[str, str, str], is_added: str = "false"
    ) -> None:
        """A matmul: of `sizes` rows and columns of the result, and the inner size.

        The interface is Fortran's, whose matrices are stored by columns: the transposes are multiplied, the right one
        first.
        """
        rows, columns, inner = sizes
        forms = [f"i8 {ord('T' if transposed else 'N')}" for _, _, transposed in (right, left)]
        numbers = [f"i64 {number}" for number in (columns, rows, inner, right[1], left[1], columns)]
        matrices = [f"ptr {pointer}" for pointer in (right[0], left[0], result)]
        self.text.line(f"call void @multiply({', '.join((*forms, *numbers, *matrices, f'i1 {is_added}'))})")


# Numbers are passed by their addresses, as Fortran does.
_FORMS, _NUMBERS = ("right_form", "left_form"), ("columns", "rows", "inner", "right_row", "left_row", "row")
_BOXED = {**dict.fromkeys(_FORMS, "i8"), **dict.fromkeys(_NUMBERS, "i64")}
_BOXES = "\n".join(
    f"  %{name}_at = alloca {kind}\n  store {kind} %{name}, ptr %{name}_at" for name, kind in _BOXED.items()
)
_MULTIPLY = f"""
define internal void @multiply({", ".join(f"{kind} %{name}" for name, kind in _BOXED.items())}, ptr %right, ptr %left,
    ptr %result, i1 %is_added) noinline {{{{
{_BOXES}
  %one = alloca {{kind}}
  store {{kind}} 1.0, ptr %one
  %beta = select i1 %is_added, {{kind}} 1.0, {{kind}} 0.0
  %beta_at = alloca {{kind}}
  store {{kind}} %beta, ptr %beta_at
  call void {{gemm}}(ptr %right_form_at, ptr %left_form_at, ptr %columns_at, ptr %rows_at, ptr %inner_at, ptr %one,
    ptr %right, ptr %right_row_at, ptr %left, ptr %left_row_at, ptr %beta_at, ptr %result, ptr %row_at)
  ret void
}}}}
"""
