"""Lightning's side: one strategy a file, and their names in Lightning's registries."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from lit_ort.strategies.compiled import CompiledStrategy
from lit_ort.strategies.ddp import ORTDDPStrategy
from lit_ort.strategies.pipeline import ORTPipelineStrategy
from lit_ort.strategies.single import ORTStrategy
from lit_ort.strategies.tensor import ORTTensorStrategy
from lit_ort.strategies.zero1 import ORTZero1Strategy

_DESCRIPTIONS = {
    "ORTStrategy": "One device, steps through ONNX Runtime",
    "ORTDDPStrategy": "Several processes, steps through ONNX Runtime, gradients combined by DistributedDataParallel",
    "ORTPipelineStrategy": "A model in stages on several processes, each stage through ONNX Runtime",
    "ORTTensorStrategy": "Parts of every large layer on several processes, steps through ONNX Runtime",
    "ORTZero1Strategy": "As ort_ddp, with the optimizer's state sharded among the processes",
}


def register() -> None:
    """Makes the strategies' names known to `lightning.pytorch` and, where installed, to `pytorch_lightning`."""
    from lightning.pytorch.strategies import StrategyRegistry

    _register(StrategyRegistry, importlib.import_module(__name__))
    if importlib.util.find_spec("pytorch_lightning") is not None:
        registry = importlib.import_module("pytorch_lightning.strategies").StrategyRegistry
        _register(registry, importlib.import_module("lit_ort.strategies.on_pytorch_lightning"))


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
