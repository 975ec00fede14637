"""The Lightning strategies, one per file, and their registration with Lightning."""

from __future__ import annotations

import importlib

from lit_ort._compat.imports import when_imported
from lit_ort._compat.lightning import LIGHTNING, PYTORCH_LIGHTNING
from lit_ort.strategies.compiled import CompiledStrategy
from lit_ort.strategies.ddp import ORTDDPStrategy
from lit_ort.strategies.either_package import register_as_subclasses
from lit_ort.strategies.pipeline_strategy import ORTPipelineStrategy
from lit_ort.strategies.single import ORTStrategy
from lit_ort.strategies.tensor import ORTTensorStrategy
from lit_ort.strategies.zero1 import ORTZero1Strategy

_DESCRIPTIONS = {
    ORTStrategy: "One device, steps through ONNX Runtime",
    ORTDDPStrategy: "Several processes, steps through ONNX Runtime, gradients combined by DistributedDataParallel",
    ORTPipelineStrategy: "A model in stages on several processes, each stage through ONNX Runtime",
    ORTTensorStrategy: "Large layers sharded over several processes, steps through ONNX Runtime",
    ORTZero1Strategy: "As ort_ddp, with the optimizer's state sharded over the processes",
}


def register() -> None:
    """Registers the strategies with `lightning.pytorch`, and with `pytorch_lightning` once that is imported.

    If `pytorch_lightning` was imported here, Lightning would log under that package's name.
    """
    _register(LIGHTNING)
    when_imported(PYTORCH_LIGHTNING, _register_in_pytorch_lightning)


def _register_in_pytorch_lightning() -> None:
    register_as_subclasses()
    _register(PYTORCH_LIGHTNING)


def _register(package: str) -> None:
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    for strategy, description in _DESCRIPTIONS.items():
        registry.register(strategy.strategy_name, strategy, description=description, override=True)


__all__ = [
    "CompiledStrategy",
    "ORTDDPStrategy",
    "ORTPipelineStrategy",
    "ORTStrategy",
    "ORTTensorStrategy",
    "ORTZero1Strategy",
    "register",
]
