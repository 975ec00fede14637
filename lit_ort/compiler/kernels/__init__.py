"""torch kernels that may stand in a graph in place of ONNX Runtime's own, one group a file."""

from __future__ import annotations

from lit_ort.compiler.kernels.gemm import GEMM_KERNELS
from lit_ort.runtime.aten import Kernel

KERNELS: tuple[Kernel, ...] = GEMM_KERNELS
