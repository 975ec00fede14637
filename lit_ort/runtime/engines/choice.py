"""Selects the engine that is installed."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import threading
from pathlib import Path

from lit_ort.errors import EngineError, OptionsError
from lit_ort.options import AUTO, STOCK, TRAINING
from lit_ort.runtime.engines.engine_interface import Engine
from lit_ort.runtime.engines.stock.library import library_in
from lit_ort.runtime.engines.stock.stock_engine import StockEngine

# Distributions that install the module onnxruntime.
_TRAINING_BUILDS = ("onnxruntime-training-cpu", "onnxruntime-training")
_STOCK_BUILDS = ("onnxruntime", "onnxruntime-gpu")
_TO_INSTALL = {
    TRAINING: "pip uninstall -y onnxruntime onnxruntime-gpu; pip install --force-reinstall --no-deps "
    "onnxruntime-training-cpu==1.19.2",
    STOCK: "pip uninstall -y onnxruntime-training-cpu onnxruntime-training; pip install --force-reinstall --no-deps "
    "onnxruntime",
}


# ONNX Runtime's environment is shared by the process and accepts one allocator, so only one engine is created.
_CREATION = threading.Lock()


def engine_of(name: str) -> Engine:
    """The engine for a value of `ORTOptions.engine`; the process has one.

    Raises:
        OptionsError: another engine is installed.
        EngineError: ONNX Runtime is not installed, two packages share its module, or its library can't be used.
    """
    assert name in (AUTO, TRAINING, STOCK)
    kind, version, folder = installed_package()
    if name not in (kind, AUTO):
        raise OptionsError(
            f"engine={name!r}, but {version} is installed, which is engine={kind!r}. Omit engine, or: "
            f"{_TO_INSTALL[name]}"
        )
    with _CREATION:
        return _engine(kind, version, folder)


@functools.cache
def _engine(kind: str, version: str, folder: Path) -> Engine:
    if kind == TRAINING:
        # This import loads ONNX Runtime.
        from lit_ort.runtime.engines.training_engine import TrainingEngine

        return TrainingEngine(version)
    path = library_in(folder)
    if path is None:
        raise EngineError(f"{version} has no shared library in {folder / 'capi'}. Reinstall it: {_TO_INSTALL[STOCK]}")
    return StockEngine(version, path)


@functools.cache
def installed_package() -> tuple[str, str, Path]:
    """The kind of engine, the package with its version, and the package's folder, without importing it.

    Raises:
        EngineError: no package or more than one is installed.
    """
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError(
            "ONNX Runtime is not installed, but lit_ort needs it. Up to Python 3.12: "
            "pip install onnxruntime-training-cpu==1.19.2; otherwise: pip install onnxruntime"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    packages = [
        (distribution.name, distribution.version)
        for distribution in importlib.metadata.distributions(path=[str(folder.parent)])
        if distribution.name in (*_TRAINING_BUILDS, *_STOCK_BUILDS)
    ]
    if len(packages) > 1:
        names = " and ".join(f"{name} {version}" for name, version in packages)
        raise EngineError(
            f"{names} are installed. They share the module onnxruntime, and one has overwritten the other's files. "
            f"Keep one of them: {_TO_INSTALL[TRAINING]}; or: {_TO_INSTALL[STOCK]}"
        )
    if not packages:
        raise EngineError(f"{folder} is not part of a package of ONNX Runtime. Install one: {_TO_INSTALL[STOCK]}")
    ((name, version),) = packages
    return TRAINING if name in _TRAINING_BUILDS else STOCK, f"{name} {version}", folder
