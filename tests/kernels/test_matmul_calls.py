"""Matmuls of MKL by their addresses, and compiled ones."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random

import pytest
import torch

from lit_ort._compat.openmp import find_openmp
from lit_ort._compat.torch_blas import MatmulFunctions, matmul_functions
from lit_ort.kernels.kernel_arguments import sum_dtype
from lit_ort.kernels.machine_code import host_cpu
from lit_ort.kernels.matmul_calls import Matmul, MatmulArguments, MatmulCode
from lit_ort.kernels.matmul_library import MatmulLibrary, is_large
from lit_ort.kernels.thread_pool import Runner

OPENMP = find_openmp()
SIZES = [(1, 1, 1, 1), (1, 3, 5, 7), (1, 128, 256, 64), (4, 3, 5, 7), (8, 64, 64, 32), (2, 3, 5, 0), (1, 300, 400, 1)]


@pytest.fixture(scope="module", params=["MKL", "compiled"])
def code(request: pytest.FixtureRequest) -> MatmulCode:
    given = matmul_functions() if request.param == "MKL" else None
    if request.param == "MKL" and (given is None or OPENMP is None):
        pytest.skip("torch has no MKL")
    runner = Runner(host_cpu(), OPENMP)
    return MatmulCode(MatmulLibrary(host_cpu(), runner, given), host_cpu(), runner)


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


EDGES = (1, 2, 5, 6, 7, 12, 13, 16, 17, 31, 33, 97, 255, 257, 300)


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_compiled_matmuls(dtype: torch.dtype, vector_bytes: int) -> None:
    """Sizes around those of tiles and panels, in all forms; nothing beyond the result is written."""
    cpu = dataclasses.replace(host_cpu(), vector_bytes=vector_bytes)
    library = MatmulLibrary(cpu, Runner(cpu, OPENMP), None)
    gemm = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(library.functions(dtype).gemm)
    draw, number = random.Random(0), ctypes.c_double if dtype == torch.float64 else ctypes.c_float
    for _ in range(60):
        rows, columns, inner = draw.choice(EDGES), draw.choice(EDGES), draw.choice((0, *EDGES))
        is_left, is_right, beta = draw.random() < 0.5, draw.random() < 0.5, float(draw.random() < 0.5)
        left = torch.randn((inner, rows) if is_left else (rows, inner), dtype=dtype)
        right = torch.randn((columns, inner) if is_right else (inner, columns), dtype=dtype)
        memory = torch.full((rows + 2, columns + 3), torch.nan, dtype=sum_dtype(dtype))
        result = memory[1:-1, :columns]
        if beta:
            result.normal_()
        factors = [x.t() if is_t else x for x, is_t in ((left, is_left), (right, is_right))]
        expected = factors[0].to(result.dtype) @ factors[1].to(result.dtype) + (result if beta else 0)
        forms = [ctypes.c_char(b"T" if transposed else b"N") for transposed in (is_right, is_left)]
        lengths = [max(1, tensor.shape[1]) for tensor in (right, left, memory)]
        sizes = [ctypes.c_int64(size) for size in (columns, rows, inner, *lengths)]
        one, added = number(1.0), number(beta)
        values = [*forms, *sizes[:3], one, right, sizes[3], left, sizes[4], added, result, sizes[5]]
        gemm(*(v.data_ptr() if isinstance(v, torch.Tensor) else ctypes.addressof(v) for v in values))
        tolerance = 1e-13 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance * (inner + 1) ** 0.5)
        assert memory[0].isnan().all()
        assert memory[-1].isnan().all()
        assert memory[:, columns:].isnan().all()


def test_bfloat16_matmuls_with_and_without_an_instruction_for_them() -> None:
    cpu = host_cpu()
    without = dataclasses.replace(cpu, features=cpu.features.replace("+avx512bf16", "-avx512bf16"))
    assert not without.multiplies_bfloat16
    left, right = torch.randn(70, 131).bfloat16(), torch.randn(131, 90).bfloat16()
    for machine in (cpu, without):
        runner = Runner(machine, OPENMP)
        code = MatmulCode(MatmulLibrary(machine, runner, None), machine, runner)
        result = torch.empty(70, 90)
        arguments = MatmulArguments(code, Matmul(torch.bfloat16, 1, 70, 90, 131, (False, False)))
        words = (ctypes.c_int64 * 3).from_address(arguments.tensors)
        words[:] = [tensor.data_ptr() for tensor in (left, right, result)]
        code.runner.run(arguments.address)
        torch.testing.assert_close(result, left.float() @ right.float(), rtol=1e-5, atol=1e-5)


def test_compiled_matmuls_of_few_matrices_and_many_threads() -> None:
    """A batch of fewer matrices than threads."""
    runner = Runner(host_cpu(), OPENMP)
    code = MatmulCode(MatmulLibrary(host_cpu(), runner, None), host_cpu(), runner)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        test_a_matmul(code, (3, 60, 70, 80), torch.float32)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("sizes", "is_compiled"),
    [((1, 64, 64, 64), True), ((1, 1, 512, 512), False), ((1, 512, 4, 64), False), ((32, 48, 48, 16), False)],
)
def test_large_matrices_are_compiled_where_mkl_uses_half_of_the_vectors(
    sizes: tuple[int, int, int, int], is_compiled: bool
) -> None:
    given = MatmulFunctions(1, 2)
    runner = Runner(host_cpu(), OPENMP)
    library = MatmulLibrary(host_cpu(), runner, {torch.float32: given}, compiles_large=True)
    assert (library.functions(torch.float32, is_large(*sizes)) != given) is is_compiled
    only_given = MatmulLibrary(host_cpu(), runner, {torch.float32: given})
    assert only_given.functions(torch.float32, is_large(*sizes)) == given
