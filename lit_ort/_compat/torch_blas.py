"""The matmul functions of MKL, which torch's library for x86 CPUs contains, by their addresses.

The interface is Fortran's with 64-bit integers. Source: `gemm` and `gemm_batch` of the oneMKL reference.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_PREFIXES = {torch.float32: "S", torch.float64: "D"}
# AMD's CPUs that have AVX2 and compute 256 bits at a time, by LLVM's names.
_UNITS_OF_256_BITS = frozenset({"znver2", "znver3", "znver4"})


@dataclass(frozen=True)
class MatmulFunctions:
    """The addresses of `gemm` and `gemm_batch` for a dtype."""

    gemm: int
    gemm_batch: int


@functools.cache
def is_mkl_fast() -> bool:
    """Whether MKL's matmuls are as fast here as ONNX Runtime's, or faster.

    On two cores of an Intel Xeon (family 6, model 207) they reach 220 to 260 GFLOP/s, ONNX Runtime's 180 to 205. On
    CPUs that Intel did not make, MKL uses vectors of 256 bits: all of the units of AMD's up to family 25, on which both
    reach 115 to 140, and half of those of later ones.
    """
    is_intel = "Intel" in torch.cpu.get_capabilities().get("cpu_name", "")
    return (is_intel or _llvm_name() in _UNITS_OF_256_BITS) and matmul_functions() is not None


def _llvm_name() -> str | None:
    """LLVM's name of this CPU; None without llvmlite, without which there are no sessions that call MKL."""
    try:
        from llvmlite import binding
    except ImportError:
        return None
    return binding.get_host_cpu_name()


@functools.cache
def matmul_functions() -> Mapping[torch.dtype, MatmulFunctions] | None:
    """MKL's matmuls, by dtype; None if torch has none."""
    library = torch_library() if torch.backends.mkl.is_available() else None
    if library is None:
        return None
    try:
        return {
            dtype: MatmulFunctions(*(_address(library, f"{prefix}{name}") for name in ("GEMM_64", "GEMM_BATCH_64")))
            for dtype, prefix in _PREFIXES.items()
        }
    except AttributeError:
        # Another build of torch does not export them.
        return None


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def torch_library() -> ctypes.CDLL | None:
    """Torch's library. A symbol is also looked for in those that it needs, so OpenMP is the one that torch calls."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return ctypes.CDLL(str(path)) if path.exists() else None
