"""Lightning's side: one strategy a file, and their names in Lightning's registries."""

from __future__ import annotations

import importlib
import importlib.util

from lit_ort.strategies.compiled import CompiledStrategy
from lit_ort.strategies.single import ORTStrategy

DESCRIPTION = "One device, steps through ONNX Runtime"


def register() -> None:
    """Makes `Trainer(strategy="ort")` known to `lightning.pytorch` and, where installed, to `pytorch_lightning`."""
    from lightning.pytorch.strategies import StrategyRegistry

    StrategyRegistry.register("ort", ORTStrategy, description=DESCRIPTION, override=True)
    if importlib.util.find_spec("pytorch_lightning") is not None:
        module = importlib.import_module("lit_ort.strategies.single_pytorch_lightning")
        registry = importlib.import_module("pytorch_lightning.strategies").StrategyRegistry
        registry.register("ort", module.ORTStrategy, description=DESCRIPTION, override=True)


__all__ = ["CompiledStrategy", "ORTStrategy", "register"]
