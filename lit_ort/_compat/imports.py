"""Does something as soon as a package is imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(package: str, action: Callable[[], None]) -> None:
    """Calls `action` once a package is imported: now, if it is."""
    if package in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(package, action))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one package, once, by the other finders."""

    def __init__(self, package: str, action: Callable[[], None]) -> None:
        self._package = package
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._action)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a package as its own loader does, and calls an action behind it."""

    def __init__(self, own: importlib.abc.Loader, action: Callable[[], None]) -> None:
        self._own = own
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None, "the import system gives a module its spec"
        # As if it had never been here: resources and reloads ask the loader itself.
        spec.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        self._action()
