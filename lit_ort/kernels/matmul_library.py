"""The functions of matmuls: MKL's where it uses all vector units, compiled ones elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lit_ort._compat import torch_blas
from lit_ort._compat.openmp import find_openmp
from lit_ort._compat.torch_blas import MatmulFunctions
from lit_ort.kernels.kernel_arguments import DTYPES
from lit_ort.kernels.machine_code import Cpu, MachineCode
from lit_ort.kernels.matmul_text import matmul_text
from lit_ort.kernels.thread_pool import Runner, calls_of


class MatmulLibrary:
    """The functions of matmuls of this process, by dtype; compiled ones are made when one is first needed.

    Args:
        cpu: what to make code for.
        runner: computes the blocks of compiled matmuls.
        given: functions to use; None compiles them.
    """

    def __init__(self, cpu: Cpu, runner: Runner, given: Mapping[torch.dtype, MatmulFunctions] | None) -> None:
        self._cpu, self._runner, self._given = cpu, runner, given
        self._codes: dict[torch.dtype, MachineCode] = {}

    def functions(self, dtype: torch.dtype) -> MatmulFunctions:
        """The addresses of `gemm` and `gemm_batch`."""
        if self._given is not None:
            return self._given[dtype]
        code = self._codes.get(dtype)
        if code is None:
            on_threads, openmp = f"inttoptr (i64 {self._runner.address} to ptr)", find_openmp()
            most_threads = None if openmp is None else calls_of(openmp)["most_threads"]
            text = matmul_text(DTYPES[dtype], self._cpu.vector_bytes, on_threads, most_threads)
            # Addresses are those of the code that is kept, if several threads make one.
            code = self._codes.setdefault(dtype, MachineCode(str(text), self._cpu))
        return MatmulFunctions(*map(code.address, ("gemm", "gemm_batch")))


def matmul_library(cpu: Cpu, runner: Runner) -> MatmulLibrary:
    """The matmuls that are fast on this CPU."""
    return MatmulLibrary(cpu, runner, torch_blas.matmul_functions() if torch_blas.prefers_mkl() else None)
