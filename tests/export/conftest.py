"""Shared by the tests of exports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lit_ort.export import process
from tests.scripts import run_code


@pytest.fixture
def forked_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions are in processes with onnxruntime imported: its training build's import takes two seconds."""
    monkeypatch.setattr(process, "subprocess", SimpleNamespace(run=run_code))
