"""`benchmarks/region_kernels.py`: each case is computed by regions alone, and can be timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.region_kernels import CASES, SHAPES, arguments_of, measure
from tests.compare import backend


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_computed_by_regions(name: str) -> None:
    engine, tensors = backend(), arguments_of(*SHAPES[0])
    torch.manual_seed(0)
    with torch.no_grad():
        actual, expected = torch.compile(CASES[name], backend=engine)(*tensors), CASES[name](*tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    (graph,) = engine.compile_log.graphs
    assert graph.torch_operators["lit_ort.region.default"] <= 3


def test_measures_the_smallest_shape(capsys: pytest.CaptureFixture[str]) -> None:
    line = measure("gated_silu", SHAPES[0], rounds=1, inductor=False)
    assert line["ours_us"] > 0
    assert line["torch_us"] > 0
    assert '"operator": "gated_silu"' in capsys.readouterr().out
    assert len(SHAPES) == 8
