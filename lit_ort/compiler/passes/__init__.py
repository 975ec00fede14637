"""The rewrites of a graph, in the order they run. A new one is a file here and a name in its tuple.

Numbers stay: with every pass on, a training graph agrees with ONNX Runtime's plain one to 1e-5. The passes of precision
round numbers, and run on graphs that are in bf16-mixed, or have parts that are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from lit_ort.compiler.passes.attention import Attention
from lit_ort.compiler.passes.attention_expansion import AttentionExpansion
from lit_ort.compiler.passes.base import GraphPass
from lit_ort.compiler.passes.bf16_gradients import Bf16Gradients
from lit_ort.compiler.passes.bf16_products import Bf16Products
from lit_ort.compiler.passes.bf16_values import Bf16Values
from lit_ort.compiler.passes.cross_entropy import CrossEntropy
from lit_ort.compiler.passes.cross_entropy_gradient import CrossEntropyGradient
from lit_ort.compiler.passes.embedding_gradient import EmbeddingGradient
from lit_ort.compiler.passes.gradient_outputs import GradientOutputs
from lit_ort.compiler.passes.large_gemm import LargeGemm
from lit_ort.compiler.passes.linear_cross_entropy import LinearCrossEntropy
from lit_ort.compiler.passes.linear_to_gemm import LinearToGemm
from lit_ort.compiler.passes.memory_order import MemoryOrder
from lit_ort.compiler.passes.optimizer_updates import OptimizerUpdates
from lit_ort.compiler.passes.recompute import Recompute
from lit_ort.compiler.passes.tall_gemm import TallGemm
from lit_ort.compiler.passes.tied_embedding import TiedEmbedding
from lit_ort.compiler.passes.torch_dropout import TorchDropout
from lit_ort.compiler.passes.torch_gelu import TorchGelu
from lit_ort.compiler.passes.torch_layer_norm import TorchLayerNorm
from lit_ort.compiler.passes.unit_product import UnitProduct
from lit_ort.compiler.passes.unread_gradients import UnreadGradients
from lit_ort.errors import OptionsError
from lit_ort.inspect import PassReport

# On the forward model, before the gradient builder reads it.
FORWARD_PASSES: tuple[GraphPass, ...] = (
    Attention(),
    AttentionExpansion(),
    LinearToGemm(),
    LinearCrossEntropy(),
    CrossEntropy(),
    GradientOutputs(),
)
# On what will run: the training model, or the forward model where nobody wants gradients.
TRAINING_PASSES: tuple[GraphPass, ...] = (
    TorchDropout(),
    UnitProduct(),
    CrossEntropyGradient(),
    UnreadGradients(),
    EmbeddingGradient(),
    TiedEmbedding(),
    TorchGelu(),
    TorchLayerNorm(),
    LargeGemm(),
    TallGemm(),
)
# After the others of each kind.
FORWARD_PRECISION_PASSES: tuple[GraphPass, ...] = (Bf16Products(),)
TRAINING_PRECISION_PASSES: tuple[GraphPass, ...] = (Bf16Gradients(), Bf16Values())
# On what will run, when all that computes is there.
MEMORY_PASSES: tuple[GraphPass, ...] = (Recompute(),)
# Where the optimizer steps inside a run.
UPDATE_PASSES: tuple[GraphPass, ...] = (OptimizerUpdates(),)
ORDER_PASSES: tuple[GraphPass, ...] = (MemoryOrder(),)
_ALL = (
    *FORWARD_PASSES,
    *FORWARD_PRECISION_PASSES,
    *TRAINING_PASSES,
    *TRAINING_PRECISION_PASSES,
    *MEMORY_PASSES,
    *UPDATE_PASSES,
    *ORDER_PASSES,
)


def names() -> tuple[str, ...]:
    """Every pass, in order."""
    return tuple(graph_pass.name for graph_pass in _ALL)


def optional_names() -> tuple[str, ...]:
    """The passes that `disable_passes` may name."""
    return tuple(p.name for p in _ALL if not p.required)


def require_names(disabled: Iterable[str]) -> None:
    """Checks `disable_passes`.

    Raises:
        OptionsError: an unknown name, or a pass that graphs can't do without.
    """
    for name in disabled:
        if name not in names():
            raise OptionsError(f"disable_passes has {name!r}, which is no pass. The passes are {', '.join(names())}.")
        if name not in optional_names():
            raise OptionsError(f"disable_passes has {name!r}, which every gradient needs. Leave it on.")


def apply(passes: Sequence[GraphPass], model: ir.Model, disabled: Sequence[str]) -> tuple[PassReport, ...]:
    """Runs `passes` in order on `model`, in place, without those named in `disabled`."""
    return tuple(graph_pass.apply(model) for graph_pass in passes if graph_pass.name not in disabled)
