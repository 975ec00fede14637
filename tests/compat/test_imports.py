"""A function runs when a package is loaded, and a search for the package changes nothing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lit_ort._compat.imports import when_imported

PACKAGE = "package_of_this_test"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    (tmp_path / f"{PACKAGE}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield []
    sys.modules.pop(PACKAGE, None)
    assert sys.meta_path == finders


def noting(calls: list[str], name: str) -> Callable[[], None]:
    return lambda: calls.append(f"{name} {sys.modules[PACKAGE].value}")


def test_it_runs_after_the_import(calls: list[str]) -> None:
    when_imported(PACKAGE, noting(calls, "first"))
    when_imported(PACKAGE, noting(calls, "second"))
    assert calls == []
    importlib.import_module(PACKAGE)
    assert sorted(calls) == ["first 1", "second 1"]
    importlib.import_module(PACKAGE)
    when_imported(PACKAGE, noting(calls, "third"))
    assert calls[2:] == ["third 1"]


def test_a_search_does_not_count(calls: list[str]) -> None:
    when_imported(PACKAGE, noting(calls, "first"))
    for _ in range(2):
        spec = importlib.util.find_spec(PACKAGE)
        assert spec is not None
        assert spec.origin is not None
        assert spec.origin.endswith(f"{PACKAGE}.py")
    assert calls == []
    importlib.import_module(PACKAGE)
    assert calls == ["first 1"]


def test_an_import_that_fails_is_tried_again(calls: list[str], tmp_path: Path) -> None:
    when_imported(PACKAGE, noting(calls, "first"))
    file = tmp_path / f"{PACKAGE}.py"
    file.write_text("raise ValueError('not yet')\n")
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module(PACKAGE)
    assert calls == []
    file.write_text("value = 23456\n")
    importlib.invalidate_caches()
    importlib.import_module(PACKAGE)
    assert calls == ["first 23456"]
