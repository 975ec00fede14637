"""Zeros with memory, and properties of all operators."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from lit_ort.ops import OPERATORS
from tests.ops.helpers import RecordingAllocator

aten = torch.ops.aten


def assert_matches_torch(target: torch._ops.OpOverload, *args: Any, in_memory: bool = True, **kwargs: Any) -> None:
    allocator = RecordingAllocator()
    results, expected = OPERATORS[target].kernel(allocator, *args, **kwargs), target(*args, **kwargs)
    pairs = ((results, expected),) if isinstance(results, torch.Tensor) else zip(results, expected, strict=True)
    for actual, reference in pairs:
        assert allocator.contains(actual) == in_memory
        assert (actual.dtype, actual.stride()) == (reference.dtype, reference.stride())
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_zeros_have_memory(dtype: torch.dtype) -> None:
    assert aten._efficientzerotensor((2, 3), dtype=dtype).data_ptr() == 0
    assert_matches_torch(aten._efficientzerotensor.default, (2, 3), dtype=dtype)
    result = OPERATORS[aten._efficientzerotensor.default].kernel(RecordingAllocator(), (2, 3), dtype=dtype)
    assert result.data_ptr() != 0


def test_operators_are_listed_by_target() -> None:
    assert all(operator.target is target for target, operator in OPERATORS.items())


@pytest.mark.slow
def test_ops_depend_on_torch_only() -> None:
    """Imports lit_ort.ops without `lit_ort/__init__.py`."""
    program = """
import pathlib, sys, types
package = types.ModuleType("lit_ort")
package.__path__ = [str(pathlib.Path(sys.argv[1]) / "lit_ort")]
sys.modules["lit_ort"] = package
import lit_ort.ops
assert not {"onnx", "onnxruntime", "lightning", "torch._inductor", "llvmlite"} & set(sys.modules)
modules = {name for name in sys.modules if name.startswith("lit_ort.")}
allowed = tuple(f"lit_ort.{room}" for room in ("ops", "kernels", "regions", "errors", "_compat"))
assert all(name.startswith(allowed) for name in modules), modules
"""
    root = __file__.split("/tests/ops/")[0]
    subprocess.run([sys.executable, "-c", program, root], check=True)
