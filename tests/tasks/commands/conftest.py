"""Data of the commands' tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with 240 tokens a split: ten training batches."""
    folder = tmp_path / "text"
    folder.mkdir()
    letters = "abcdefghijklmnop"
    for shift, name in enumerate(("train", "valid", "test")):
        words = [letters[(index * (shift + 1)) % 16] for index in range(240)]
        (folder / f"{name}.txt").write_text(" ".join(words))
    return folder
