"""Regions as functions of standard ONNX operators, run by ONNX Runtime, compared with the reference of regions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from lit_ort.regions.element_types import computed_in, name_of
from lit_ort.regions.interpret_region import interpret
from lit_ort.regions.pointwise_table import FLOAT, Pointwise, result_dtype
from lit_ort.regions.region import Apply
from lit_ort.regions.region_builder import RegionBuilder
from lit_ort.regions.region_run import Place, RegionRun
from tests.kernels.test_pointwise import CASES, arguments
from tests.lower.region_model import run_function
from tests.regions.generated import Case, cases, close

# Of ONNX Runtime's kernels, or of a form with fewer digits; of float64, some are computed in float32.
TOLERANCE = 2e-5

# At infinities, NaN, negative zero and the ends of their range these are as ONNX Runtime's kernels are.
OF_COMMON_NUMBERS = {"atan2", "cosh", "digamma", "erf", "erfc", "fmod", "gelu", "hypot", "lgamma", "mish", "remainder"}
OF_COMMON_NUMBERS |= {"mish_backward", "rsqrt", "silu_backward", "sinh", "sqrt"}


def is_common(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() < 88) & ((x.abs() > 1e-20) | (x.eq(0) & ~x.signbit()))


# The table has the same forms for all integers.
SHORT = (torch.int16, torch.int8)
MARKED = [
    pytest.param(*case.values, id=case.id, marks=[pytest.mark.sweep] * (case.values[1] in SHORT)) for case in CASES
]


@pytest.mark.parametrize(("operator", "dtype"), MARKED)
def test_every_operator_of_the_table(operator: Pointwise, dtype: torch.dtype) -> None:
    x = arguments(operator, dtype)
    if operator.name in OF_COMMON_NUMBERS and dtype.is_floating_point:
        common = torch.stack([is_common(argument) for argument in x]).all(0)
        x = [argument[common] for argument in x]
    builder, dtypes = RegionBuilder(0, 1), [name_of(argument.dtype) or "" for argument in x]
    loads = tuple(builder.load(number, name, "1") for number, name in enumerate(dtypes))
    kind = result_dtype(operator, tuple(map(computed_in, dtypes)))
    builder.store(0, kind, "1", builder.add(Apply(operator.name, loads, kind)))
    place = Place(0, (1,))
    run = RegionRun((len(x[0]),), (place,) * len(x), (place,))
    (result,), wanted = run_function(builder.region(), run, x, [x[0].shape]), operator.reference(*x)
    assert result.dtype == wanted.dtype
    if operator.rule == FLOAT or wanted.dtype.is_floating_point:
        scale = torch.maximum(wanted.abs(), x[-1].abs()).clamp_min(1)
        near = wanted.isfinite() & ((result - wanted).abs() <= TOLERANCE * scale)
        differs = ~(near | result.eq(wanted) | (result.isnan() & wanted.isnan()))
    else:
        differs = result != wanted
    at = differs.nonzero().flatten().tolist()[:5]
    assert not at, [([one[k].item() for one in x], result[k].item(), wanted[k].item()) for k in at]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(cases())
def test_generated_regions(case: Case) -> None:
    assume(0 not in case.run.sizes and all(x.numel() for x in (*case.inputs, *case.outputs)))
    wanted = [torch.zeros_like(output) for output in case.outputs]
    interpret(case.region, case.run, case.inputs, wanted)
    found = run_function(case.region, case.run, case.inputs, [output.shape for output in wanted])
    for result, expected in zip(found, wanted, strict=True):
        assert close(result, expected), str(case.region)
