"""Generated regions: code against the interpreter, between guard pages, and equal for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from lit_ort.kernels import kernel_arguments
from lit_ort.regions.interpret_region import interpret
from lit_ort.regions.region import Region
from tests.regions.generated import Case, cases, close
from tests.regions.guarded import guarded

if TYPE_CHECKING:
    from lit_ort.kernels.kernel_calls import KernelCache

FEW, MANY = 25, 1500


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts small runs into blocks."""
    monkeypatch.setattr(kernel_arguments, "_ONE_BLOCK", 0)
    monkeypatch.setattr(kernel_arguments, "_BLOCK", 200)


def run_kernel(kernels: KernelCache, case: Case, *, at_end: bool = True) -> list[torch.Tensor]:
    inputs, memory = guarded(case.inputs, at_end=at_end)
    outputs, more_memory = guarded(case.outputs, at_end=at_end)
    kernels.kernel(case.region).bind(case.run)(*inputs, *outputs)
    results = [output.clone() for output in outputs]
    assert all(torch.equal(x, y) for x, y in zip(inputs, case.inputs, strict=True))
    del memory, more_memory
    return results


def check_case(kernels: KernelCache, case: Case) -> None:
    wanted = [output.clone() for output in case.outputs]
    interpret(case.region, case.run, case.inputs, wanted)
    for at_end in (True, False):
        with threads(1):
            results = run_kernel(kernels, case, at_end=at_end)
        for result, expected in zip(results, wanted, strict=True):
            assert close(result, expected), f"{case.region}\n{case.run}\n{result}\n{expected}"
        with threads(2):
            again = run_kernel(kernels, case, at_end=at_end)
        for result, repeated in zip(results, again, strict=True):
            assert torch.equal(result.nan_to_num(), repeated.nan_to_num()), f"{case.region}\n{case.run}"


SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
}


@settings(max_examples=FEW, **SETTINGS)
@given(case=cases())
def test_code_agrees_with_the_interpreter(kernels: KernelCache, case: Case) -> None:
    check_case(kernels, case)


@settings(max_examples=FEW, **SETTINGS)
@given(case=cases())
def test_code_agrees_with_the_interpreter_in_blocks(kernels: KernelCache, small_blocks: None, case: Case) -> None:
    check_case(kernels, case)


@pytest.mark.sweep
@settings(max_examples=MANY, **SETTINGS)
@given(case=cases())
def test_code_agrees_with_the_interpreter_for_many(kernels: KernelCache, case: Case) -> None:
    check_case(kernels, case)


@pytest.mark.sweep
@settings(max_examples=MANY, **SETTINGS)
@given(case=cases())
def test_code_agrees_with_the_interpreter_for_many_in_blocks(
    kernels: KernelCache, small_blocks: None, case: Case
) -> None:
    check_case(kernels, case)


@settings(max_examples=FEW, **SETTINGS)
@given(case=cases())
def test_regions_are_read_from_their_text(case: Case) -> None:
    again = Region.from_json(case.region.to_json())
    assert again == case.region
    assert again.key == case.region.key
    assert str(again) == str(case.region)
