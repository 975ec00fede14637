"""Graphs without results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_ort.errors import SessionError
from tests.capture.asserting import asserted, asserted_alone, written
from tests.compare import backend


@pytest.mark.parametrize("function", [asserted, asserted_alone, written], ids=lambda function: function.__name__)
def test_assertions_are_checked(function: Callable[[Tensor], Tensor | None]) -> None:
    engine = backend()
    compiled = torch.compile(function, backend=engine)
    for value in (3.0, 200.0):
        x, y = torch.tensor(value), torch.tensor(value)
        assert compiled(x) == function(y)
        assert torch.equal(x, y)
    with pytest.raises((AssertionError, RuntimeError, SessionError)):
        compiled(torch.tensor(float("nan")))
    assert all(graph.fallback is None for graph in engine.compile_log.graphs)
