"""Runs a function as soon as a package is imported."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(package: str, action: Callable[[], object]) -> None:
    """Calls `action` after a package is imported, or immediately if it already is."""
    if package in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(package, action))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one package with the finders behind it, until the package is loaded."""

    def __init__(self, package: str, action: Callable[[], object]) -> None:
        self._package = package
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package or self not in sys.meta_path:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
        # A search for a package, as by `importlib.util.find_spec`, doesn't load it.
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec

    def _loaded(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._action()


class _Loader(importlib.abc.Loader):
    """Loads a package with its original loader, then calls an action."""

    def __init__(self, original: importlib.abc.Loader, action: Callable[[], object]) -> None:
        self._original = original
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None, "the import system sets a module's spec"
        # Resources and reloads need the original loader.
        spec.loader = module.__loader__ = self._original
        self._original.exec_module(module)
        self._action()
