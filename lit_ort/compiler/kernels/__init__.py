"""torch kernels that may stand in a graph in place of ONNX Runtime's own, one group a file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lit_ort.compiler.kernels.attention import ATTENTION_KERNELS
from lit_ort.compiler.kernels.bf16 import BF16_KERNELS
from lit_ort.compiler.kernels.dropout import DROPOUT_KERNELS
from lit_ort.compiler.kernels.embedding import EMBEDDING_KERNELS
from lit_ort.compiler.kernels.gelu import GELU_KERNELS
from lit_ort.compiler.kernels.gemm import GEMM_KERNELS
from lit_ort.compiler.kernels.layer_norm import LAYER_NORM_KERNELS
from lit_ort.compiler.kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY_KERNELS
from lit_ort.compiler.kernels.ordering import ORDERING_KERNELS
from lit_ort.runtime.aten import Kernel

_ALL: tuple[Kernel, ...] = (
    *ATTENTION_KERNELS,
    *BF16_KERNELS,
    *DROPOUT_KERNELS,
    *EMBEDDING_KERNELS,
    *GELU_KERNELS,
    *GEMM_KERNELS,
    *LAYER_NORM_KERNELS,
    *LINEAR_CROSS_ENTROPY_KERNELS,
    *ORDERING_KERNELS,
)
KERNELS: Mapping[str, Kernel] = MappingProxyType({kernel.name: kernel for kernel in _ALL})
