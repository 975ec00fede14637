"""Which engine is installed."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import threading
from pathlib import Path

from lit_ort.errors import EngineError, OptionsError
from lit_ort.options import AUTO, ENGINES, STOCK, TRAINING
from lit_ort.runtime.engines.engine import Engine
from lit_ort.runtime.engines.stock.engine import StockEngine
from lit_ort.runtime.engines.stock.library import library_in

# All of these install the module onnxruntime.
_TRAINING_BUILDS = ("onnxruntime-training-cpu", "onnxruntime-training")
_STOCK_BUILDS = ("onnxruntime", "onnxruntime-gpu")
_TO_INSTALL = {
    TRAINING: "pip uninstall -y onnxruntime onnxruntime-gpu; pip install --force-reinstall --no-deps "
    "onnxruntime-training-cpu==1.19.2",
    STOCK: "pip uninstall -y onnxruntime-training-cpu onnxruntime-training; pip install --force-reinstall --no-deps "
    "onnxruntime",
}


# ONNX Runtime's environment belongs to the process, and takes one allocator.
_MAKING = threading.Lock()


def engine_of(name: str) -> Engine:
    """The engine of `ORTOptions.engine`, one for the process.

    Raises:
        EngineError: it is not installed, or two packages share the module onnxruntime, or its library can't be used.
    """
    assert name in ENGINES
    kind, version, folder = _installed()
    if name not in (kind, AUTO):
        raise OptionsError(
            f"engine={name!r}, and {version} is installed, which is engine={kind!r}. Leave engine out, or: "
            f"{_TO_INSTALL[name]}"
        )
    with _MAKING:
        return _engine(kind, version, folder)


def installed_kind() -> str:
    """`training` or `stock`, the build of ONNX Runtime that is installed. Raises EngineError as `engine_of` does."""
    return _installed()[0]


@functools.cache
def _engine(kind: str, version: str, folder: Path) -> Engine:
    if kind == TRAINING:
        # Importing it loads ONNX Runtime.
        from lit_ort.runtime.engines.training import TrainingEngine

        return TrainingEngine(version)
    path = library_in(folder)
    if path is None:
        raise EngineError(
            f"{version} has no shared library in {folder / 'capi'}. Install it again: {_TO_INSTALL[STOCK]}"
        )
    return StockEngine(version, path)


@functools.cache
def _installed() -> tuple[str, str, Path]:
    """The kind of engine, the package with its version, and the package's folder; nothing is imported for it."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError(
            "ONNX Runtime is not installed. Up to Python 3.12: pip install onnxruntime-training-cpu==1.19.2; "
            "otherwise: pip install onnxruntime"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = [
        (distribution.name, distribution.version)
        for distribution in importlib.metadata.distributions(path=[str(folder.parent)])
        if distribution.name in (*_TRAINING_BUILDS, *_STOCK_BUILDS)
    ]
    if len(found) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found)
        raise EngineError(
            f"{both} are installed, and share the module onnxruntime, of which one has overwritten the other's files. "
            f"Keep one of them: {_TO_INSTALL[TRAINING]}; or: {_TO_INSTALL[STOCK]}"
        )
    if not found:
        raise EngineError(f"{folder} belongs to no package of ONNX Runtime's. Install one: {_TO_INSTALL[STOCK]}")
    ((name, version),) = found
    return TRAINING if name in _TRAINING_BUILDS else STOCK, f"{name} {version}", folder
