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


@dataclass(frozen=True)
class MatmulFunctions:
    """The addresses of `gemm` and `gemm_batch` for a dtype."""

    gemm: int
    gemm_batch: int


def is_intel() -> bool:
    """Whether Intel made this CPU, which is assumed where torch doesn't know."""
    return "Intel" in torch.cpu.get_capabilities().get("cpu_name", "Intel")


def has_wide_units() -> bool:
    """Whether MKL uses half of this CPU's vector units, as on AMD's from family 26 on.

    On CPUs that Intel did not make, MKL computes 256 bits at a time. Family 26 is the first of AMD with AVX-VNNI, and
    the first with units of 512 bits.
    """
    return has_wide_vectors() and bool(torch.cpu.get_capabilities().get("avx_vnni"))


def has_wide_vectors() -> bool:
    """Whether MKL uses half of this CPU's vectors, as on AMD's with AVX-512, whose units can have 256 or 512 bits."""
    return not is_intel() and bool(torch.cpu.get_capabilities().get("avx512_f"))


def is_x86() -> bool:
    """Whether this CPU is an x86 one of 64 bits."""
    return torch.cpu.get_capabilities().get("architecture") == "x86_64"


def has_matrix_tiles() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 matrices (AMX)."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def bfloat16_instructions() -> str:
    """The instructions of this CPU for products of bfloat16 numbers, which torch's name of its vectors leaves out."""
    return " ".join(name for name in ("avx512_bf16", "amx_bf16") if torch.cpu.get_capabilities().get(name))


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
