"""Train PyTorch Lightning models through ONNX Runtime: `import lit_ort`, then `Trainer(strategy="ort")`."""

from __future__ import annotations

from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.explanation import explain
from lit_ort.backend.memory_plan import MemoryPlan, plan_memory
from lit_ort.benchmark import Benchmark, benchmark
from lit_ort.checkpoint_io import AtomicCheckpointIO
from lit_ort.distributed.pipeline import Pipeline
from lit_ort.errors import (
    CaptureError,
    CheckpointError,
    CompileError,
    ConvertError,
    ExportError,
    LitOrtError,
    LitOrtWarning,
    OptionsError,
    RankError,
    SessionError,
    UnsupportedError,
    VerificationError,
)
from lit_ort.export import Exported, ExportedTraining, export, export_training, load_training_checkpoint
from lit_ort.options import ORTOptions
from lit_ort.precision import ORTPrecision
from lit_ort.strategies import (
    CompiledStrategy,
    ORTDDPStrategy,
    ORTPipelineStrategy,
    ORTStrategy,
    ORTTensorStrategy,
    ORTZero1Strategy,
    register,
)
from lit_ort.version import __version__

__all__ = [
    "AtomicCheckpointIO",
    "Benchmark",
    "CaptureError",
    "CheckpointError",
    "CompileError",
    "CompiledStrategy",
    "ConvertError",
    "ExportError",
    "Exported",
    "ExportedTraining",
    "LitOrtError",
    "LitOrtWarning",
    "MemoryPlan",
    "ORTBackend",
    "ORTDDPStrategy",
    "ORTOptions",
    "ORTPipelineStrategy",
    "ORTPrecision",
    "ORTStrategy",
    "ORTTensorStrategy",
    "ORTZero1Strategy",
    "OptionsError",
    "Pipeline",
    "RankError",
    "SessionError",
    "UnsupportedError",
    "VerificationError",
    "__version__",
    "benchmark",
    "explain",
    "export",
    "export_training",
    "load_training_checkpoint",
    "plan_memory",
]

register()
