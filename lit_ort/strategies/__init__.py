"""The Lightning strategies, one per file, and their registration with Lightning."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from lit_ort._compat.imports import when_imported
from lit_ort.strategies.compiled import CompiledStrategy
from lit_ort.strategies.ddp import ORTDDPStrategy
from lit_ort.strategies.pipeline_strategy import ORTPipelineStrategy
from lit_ort.strategies.single import ORTStrategy
from lit_ort.strategies.tensor import ORTTensorStrategy
from lit_ort.strategies.zero1 import ORTZero1Strategy

_DESCRIPTIONS = {
    "ORTStrategy": "One device, steps through ONNX Runtime",
    "ORTDDPStrategy": "Several processes, steps through ONNX Runtime, gradients combined by DistributedDataParallel",
    "ORTPipelineStrategy": "A model in stages on several processes, each stage through ONNX Runtime",
    "ORTTensorStrategy": "Large layers sharded over several processes, steps through ONNX Runtime",
    "ORTZero1Strategy": "As ort_ddp, with the optimizer's state sharded over the processes",
}


def register() -> None:
    """Registers the strategies with `lightning.pytorch`, and with `pytorch_lightning` once that is imported.

    If `pytorch_lightning` was imported here, Lightning would log under that package's name.
    """
    from lightning.pytorch.strategies import StrategyRegistry

    _register(StrategyRegistry, importlib.import_module(__name__))
    # That module registers its classes itself, because it can be what imports `pytorch_lightning`.
    when_imported("pytorch_lightning", partial(importlib.import_module, "lit_ort.strategies.on_pytorch_lightning"))


def register_in_pytorch_lightning(classes: Any) -> None:
    """Registers a module's strategies with `pytorch_lightning`."""
    package = importlib.import_module("pytorch_lightning.strategies")
    _register(package.StrategyRegistry, classes)
    for name in _DESCRIPTIONS:
        # Its Trainer then also accepts instances of the classes above, which have everything that it needs.
        package.Strategy.register(globals()[name])


def _register(registry: Any, classes: Any) -> None:
    for name, description in _DESCRIPTIONS.items():
        strategy = getattr(classes, name)
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
