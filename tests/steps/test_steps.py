"""Steps as users write them, compared with eager: results, gradients, and parameters, buffers and batch afterwards."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.errors import LitOrtWarning
from tests.compare import backend, mostly
from tests.steps import (  # noqa: F401 - these modules register their cases
    aliases,
    in_place,
    numbers,
    operators,
    reported,
    results,
    sizes,
    structure,
)
from tests.steps.case import CASES, Case, assert_alike, values_of


def create_case(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", mostly(pytest.mark.slow, CASES, 3))
def test_same_as_eager(name: str) -> None:
    case, twin = create_case(name), create_case(name)
    engine = backend(fallback="warn")
    compiled = torch.compile(case.module, backend=engine)
    with warnings.catch_warnings(), dynamo_settings("step", strict=True):
        warnings.simplefilter("ignore", LitOrtWarning)
        # Dynamo instantiates torch.autograd.Function.
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        if case.raises is None:
            expected = values_of(twin.module, twin.module, twin)
            assert_alike(values_of(compiled, case.module, case), expected)
        else:
            for step, own_case in ((twin.module, twin), (compiled, case)):
                with pytest.raises(Exception, match=case.raises):
                    values_of(step, own_case.module, own_case)
    graphs = engine.compile_log.graphs
    assert graphs
    reasons = [graph.fallback for graph in graphs if graph.fallback is not None]
    if case.falls_back is None:
        assert not reasons
    else:
        assert any(re.search(case.falls_back, reason) for reason in reasons), reasons
