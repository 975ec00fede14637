"""All passes together on a real training graph."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_ort.compiler import passes
from lit_ort.errors import OptionsError
from tests.compare import backend, gradients, relative_error


def step(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x).flatten(0, 1), y.flatten(), ignore_index=3)


def test_all_on_equals_all_off() -> None:
    module = nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4200))
    twin = copy.deepcopy(module)
    x, y = torch.randn(100, 20, 6), torch.randint(4200, (100, 20))
    on, off = backend(), backend(disable_passes=passes.optional_names())
    loss = torch.compile(step, backend=on)(module, x, y)
    torch.compiler.reset()
    plain = torch.compile(step, backend=off)(twin, x, y)
    torch.testing.assert_close(loss, plain)
    loss.backward()
    plain.backward()
    for name, gradient in gradients(twin).items():
        assert relative_error(gradients(module)[name], gradient) < 1e-5
    fired = {report.name: report.fired for report in on.compile_log.graphs[0].passes}
    assert fired.keys() == set(passes.names())
    # large_gemm takes the products that tall_gemm is for.
    assert [name for name, count in fired.items() if not count] == ["tall_gemm"]


def test_names_are_unique_and_checked() -> None:
    assert len(set(passes.names())) == len(passes.names())
    passes.require_names(passes.optional_names())
    with pytest.raises(OptionsError, match="no pass"):
        passes.require_names(("nonsense",))
