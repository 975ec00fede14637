"""Shared by all tests: a fresh Dynamo and fixed seeds for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
