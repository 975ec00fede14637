"""The functions of matmuls: MKL's or compiled ones, whichever are faster; of bfloat16 factors, compiled ones.

MKL's are used if torch has them, but for large matrices on AMD's CPUs with AVX-512, of whose vectors MKL uses half. On
two cores of an AMD EPYC with AVX-512 (family 25, model 17), steps of eight models take 0.90 to 0.96 of the time with
MKL's; MKL is three to ten times as fast for one row or one column, and 1.3 to 4 times for batches of matrices from
48 x 48 x 16 down to 8 x 8 x 16. On one with AVX2 (model 1) both reach 110 to 140 GFLOP/s for 512 x 256 x 1024.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lit_ort._compat import torch_blas
from lit_ort._compat.openmp import find_openmp
from lit_ort._compat.torch_blas import MatmulFunctions
from lit_ort.kernels.bfloat16_matmul_text import bfloat16_matmul_text
from lit_ort.kernels.kernel_arguments import DTYPES
from lit_ort.kernels.machine_code import Cpu, MachineCode
from lit_ort.kernels.matmul_text import matmul_text
from lit_ort.kernels.thread_pool import Runner, calls_of
from lit_ort.kernels.vector_text import Text

# The fewest rows and columns of large matrices, and the fewest multiplications of one in a batch.
_FEWEST_ROWS = 8
_FEWEST_OF_BATCH = 2**18


class MatmulLibrary:
    """The functions of matmuls of this process, by dtype; compiled ones are made when one is first needed.

    Args:
        cpu: what to make code for.
        runner: computes the blocks of compiled matmuls.
        given: functions to use; None compiles them.
        compiles_large: whether those for large matrices are compiled in any case.
    """

    def __init__(
        self,
        cpu: Cpu,
        runner: Runner,
        given: Mapping[torch.dtype, MatmulFunctions] | None,
        compiles_large: bool = False,
    ) -> None:
        self._cpu, self._runner, self._given, self._compiles_large = cpu, runner, given, compiles_large
        self._codes: dict[torch.dtype, MachineCode] = {}

    def functions(self, dtype: torch.dtype, is_large: bool = True) -> MatmulFunctions:
        """The addresses of `gemm` and `gemm_batch`, for large matrices or others; see `is_large`."""
        if self._given is not None and dtype in self._given and not (is_large and self._compiles_large):
            return self._given[dtype]
        code = self._codes.get(dtype)
        if code is None:
            on_threads, openmp = f"inttoptr (i64 {self._runner.address} to ptr)", find_openmp()
            most_threads = None if openmp is None else calls_of(openmp)["most_threads"]
            text = _text(dtype, self._cpu, on_threads, most_threads)
            # Addresses are those of the code that is kept, if several threads make one.
            code = self._codes.setdefault(dtype, MachineCode(str(text), self._cpu))
        return MatmulFunctions(*map(code.address, ("gemm", "gemm_batch")))


def _text(dtype: torch.dtype, cpu: Cpu, on_threads: str, most_threads: str | None) -> Text:
    if dtype == torch.bfloat16:
        return bfloat16_matmul_text(cpu.vector_bytes, cpu.multiplies_bfloat16, on_threads, most_threads)
    return matmul_text(DTYPES[dtype], cpu.vector_bytes, on_threads, most_threads)


def matmul_library(cpu: Cpu, runner: Runner) -> MatmulLibrary:
    """The matmuls that are fast on this CPU."""
    return MatmulLibrary(cpu, runner, torch_blas.matmul_functions(), torch_blas.has_wide_vectors())


def is_large(count: int, rows: int, columns: int, inner: int) -> bool:
    """Whether the matrices of a matmul are large, for the choice of its functions."""
    return min(rows, columns) >= _FEWEST_ROWS and (count == 1 or rows * columns * inner >= _FEWEST_OF_BATCH)
