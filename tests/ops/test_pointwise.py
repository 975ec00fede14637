"""Kernels of aten operators that work row by row or element by element: torch's figures, in the given memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from lit_ort.ops import OPERATORS
from tests.ops.helpers import RecordingMemory

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def assert_as_torch(target: torch._ops.OpOverload, *args: Any, held: bool = True, **kwargs: Any) -> None:
    memory = RecordingMemory()
    found, expected = OPERATORS[target].kernel(memory, *args, **kwargs), target(*args, **kwargs)
    pairs = ((found, expected),) if isinstance(found, torch.Tensor) else zip(found, expected, strict=True)
    for actual, reference in pairs:
        assert memory.holds(actual) == held
        assert (actual.dtype, actual.stride()) == (reference.dtype, reference.stride())
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str, dtype: torch.dtype) -> None:
    x, grad = torch.randn(2, 30, 40, dtype=dtype), torch.randn(2, 30, 40, dtype=dtype)
    assert_as_torch(aten.gelu.default, x, approximate=approximate)
    assert_as_torch(aten.gelu_backward.default, grad, x, approximate=approximate)
    permuted = x.transpose(0, 2), grad.transpose(0, 2)
    assert_as_torch(aten.gelu.default, permuted[0], approximate=approximate, held=False)
    assert_as_torch(aten.gelu_backward.default, permuted[1], permuted[0], approximate=approximate, held=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax(name: str, dim: int, dtype: torch.dtype) -> None:
    x, grad = torch.randn(3, 30, 40, dtype=dtype), torch.randn(3, 30, 40, dtype=dtype)
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward_data").default
    for data, gradient in ((x, grad), (x.transpose(1, 2), grad.transpose(1, 2))):
        assert_as_torch(forward, data, dim, False)
        assert_as_torch(backward, gradient, forward(data, dim, False), dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(affine: bool, dtype: torch.dtype) -> None:
    x, grad = torch.randn(3, 30, 40, dtype=dtype), torch.randn(3, 30, 40, dtype=dtype)
    weight, bias = (torch.randn(40, dtype=dtype), torch.randn(40, dtype=dtype)) if affine else (None, None)
    assert_as_torch(aten.native_layer_norm.default, x, [40], weight, bias, 1e-5, held=False)
    _, mean, rstd = aten.native_layer_norm(x, [40], weight, bias, 1e-5)
    arguments = (grad, x, [40], mean, rstd, weight, bias, [True, affine, affine])
    operator = OPERATORS[aten.native_layer_norm_backward.default]
    found = operator.kernel(RecordingMemory(), *arguments)
    for actual, expected, is_wanted in zip(found, operator.target(*arguments), (True, affine, affine), strict=True):
        assert torch.equal(actual, expected) if is_wanted else actual is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_zeros_have_memory(dtype: torch.dtype) -> None:
    assert aten._efficientzerotensor((2, 3), dtype=dtype).data_ptr() == 0
    assert_as_torch(aten._efficientzerotensor.default, (2, 3), dtype=dtype)
    found = OPERATORS[aten._efficientzerotensor.default].kernel(RecordingMemory(), (2, 3), dtype=dtype)
    assert found.data_ptr() != 0


def test_operators_are_listed_by_target() -> None:
    assert all(operator.target is target for target, operator in OPERATORS.items())
    drawing = {target.name() for target, operator in OPERATORS.items() if operator.draws}
    assert drawing == {"lit_ort::dropout", "lit_ort::attention", "lit_ort::attention_backward"}


@pytest.mark.slow
def test_the_room_needs_only_torch() -> None:
    """Loads the package's files without the package's own `__init__`."""
    program = """
import pathlib, sys, types
package = types.ModuleType("lit_ort")
package.__path__ = [str(pathlib.Path(sys.argv[1]) / "lit_ort")]
sys.modules["lit_ort"] = package
import lit_ort.ops
assert not {"onnx", "onnxruntime", "lightning", "torch._inductor"} & set(sys.modules)
own = {name for name in sys.modules if name.startswith("lit_ort.")}
assert all(name.startswith(("lit_ort.ops", "lit_ort.errors", "lit_ort._compat")) for name in own), own
"""
    root = __file__.split("/tests/ops/")[0]
    subprocess.run([sys.executable, "-c", program, root], check=True)
