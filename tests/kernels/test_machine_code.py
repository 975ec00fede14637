"""The CPUs that code is made for."""

from __future__ import annotations

import pytest

from lit_ort.errors import KernelError
from lit_ort.kernels.machine_code import cpu_of

X86 = "x86_64-unknown-linux-gnu"
AVX2 = {"avx2": True, "fma": True, "f16c": True}


def test_the_widest_vectors_are_chosen() -> None:
    wide = dict.fromkeys(("avx512f", "avx512bw", "avx512dq", "avx512vl"), True)
    assert cpu_of("znver5", {**AVX2, **wide}, X86).vector_bytes == 64
    assert cpu_of("znver3", AVX2, X86).vector_bytes == 32
    assert cpu_of("znver3", {**AVX2, **wide, "avx512bw": False}, X86).vector_bytes == 32
    assert cpu_of("neoverse-n1", {}, "aarch64-unknown-linux-gnu").vector_bytes == 16


def test_a_cpu_without_what_kernels_need_is_refused() -> None:
    with pytest.raises(KernelError, match="nehalem .* lacks avx2, fma, which kernels need"):
        cpu_of("nehalem", {"f16c": True}, X86)
