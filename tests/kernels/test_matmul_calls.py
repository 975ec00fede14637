"""Matmuls of MKL by their addresses."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from lit_ort._compat.torch_blas import matmul_functions
from lit_ort.kernels.machine_code import host_cpu
from lit_ort.kernels.matmul_calls import Matmul, MatmulArguments, MatmulCode
from lit_ort.kernels.thread_pool import Runner, find_openmp

FUNCTIONS, OPENMP = matmul_functions(), find_openmp()
pytestmark = pytest.mark.skipif(FUNCTIONS is None or OPENMP is None, reason="torch has no MKL")
SIZES = [(1, 1, 1, 1), (1, 3, 5, 7), (1, 128, 256, 64), (4, 3, 5, 7), (8, 64, 64, 32), (2, 3, 5, 0), (1, 300, 400, 1)]


@pytest.fixture(scope="module")
def code() -> MatmulCode:
    assert FUNCTIONS is not None
    assert OPENMP is not None
    return MatmulCode(FUNCTIONS, host_cpu(), Runner(host_cpu(), OPENMP))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_matmul(code: MatmulCode, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    count, rows, columns, inner = sizes
    for is_left, is_right in itertools.product((False, True), repeat=2):
        transposed = is_left, is_right
        for added in (None, False, True) if count == 1 else (None,):
            left, right = (torch.randn(count, *size, dtype=dtype) for size in ((rows, inner), (inner, columns)))
            memory = [x.mT.contiguous() if is_t else x for x, is_t in zip((left, right), transposed, strict=True)]
            if added is not None:
                memory.append(torch.randn((rows, columns) if added else (columns,), dtype=dtype))
            # Old contents are not read, not even NaN.
            result = torch.full((count, rows, columns), torch.nan, dtype=dtype)
            arguments = MatmulArguments(code, Matmul(dtype, count, rows, columns, inner, transposed, added))
            words = (ctypes.c_int64 * (len(memory) + 1)).from_address(arguments.tensors)
            words[:] = [tensor.data_ptr() for tensor in (*memory, result)]
            code.runner.run(arguments.address)
            torch.testing.assert_close(result, left @ right + (0 if added is None else memory[-1]))
