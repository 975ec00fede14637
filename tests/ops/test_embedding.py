"""Embedding lookup and the gradient of the table, compared with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_ort.errors import SessionError
from lit_ort.ops import OPERATORS
from tests.compare import backend
from tests.ops.helpers import RecordingAllocator

gradient_of, gradient_onto = torch.ops.lit_ort.embedding_gradient, torch.ops.lit_ort.embedding_gradient_onto


@pytest.mark.parametrize("shape", [(50,), (5, 10), (0,), ()])
@pytest.mark.parametrize("indices", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lookup_matches_torch(dtype: torch.dtype, indices: torch.dtype, shape: tuple[int, ...]) -> None:
    weight, index = torch.randn(20, 6, dtype=dtype), torch.randint(20, shape, dtype=indices)
    allocator = RecordingAllocator()
    actual = OPERATORS[torch.ops.aten.embedding.default].kernel(allocator, weight, index, -1, False, False)
    assert torch.equal(actual, torch.embedding(weight, index))
    assert allocator.contains(actual)


@pytest.mark.parametrize("index", [-1, -100, 20, 2**40])
@pytest.mark.parametrize("fallback", ["warn", "error"])
def test_an_index_out_of_range_is_reported(index: int, fallback: Any) -> None:
    table = torch.nn.Embedding(20, 6)
    step = torch.compile(lambda table, x: table(x).sum(), backend=backend(fallback=fallback))
    step(table, torch.tensor([1, 19])).backward()
    with pytest.raises((IndexError, SessionError)) as caught:
        step(table, torch.tensor([1, index]))
    assert f"index {index} is out of range" in str(caught.value)
    assert "20, so indices must be 0 to 19" in str(caught.value) or "20 rows" in str(caught.value)
    assert isinstance(caught.value, IndexError) == (fallback == "warn")


@pytest.mark.parametrize("padding_idx", [-1, 0, 7])
@pytest.mark.parametrize("shape", [(50,), (5, 10), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradient_matches_torch(dtype: torch.dtype, shape: tuple[int, ...], padding_idx: int) -> None:
    indices, grad = torch.randint(20, shape), torch.randn(*shape, 6, dtype=dtype)
    expected = torch.ops.aten.embedding_dense_backward(grad.double(), indices, 20, padding_idx, False)
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-5
    actual = gradient_of(grad, indices, 20, padding_idx)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    table = torch.randn(20, 6, dtype=dtype)
    before = table.clone()
    torch.testing.assert_close(
        gradient_onto(table, grad, indices, padding_idx).double(),
        before.double() + expected,
        rtol=tolerance,
        atol=tolerance,
    )
    assert torch.equal(table, before)


def test_a_padding_row_has_no_gradient_even_for_nan() -> None:
    indices = torch.tensor([1, 2, 1])
    grad = torch.tensor([[torch.nan], [1.0], [torch.inf]])
    assert torch.equal(gradient_of(grad, indices, 3, 1), torch.tensor([[0.0], [0.0], [1.0]]))


def test_the_kernel_adds_in_place() -> None:
    operator = OPERATORS[gradient_onto.default]
    table, indices, grad = torch.randn(20, 6), torch.randint(20, (5, 3)), torch.randn(5, 3, 6)
    expected = gradient_onto(table, grad, indices, -1)
    assert operator.writes_into == 0
    actual = operator.kernel(RecordingAllocator(), table, grad, indices, -1)
    assert actual.data_ptr() == table.data_ptr()
    torch.testing.assert_close(actual, expected)


def test_results_use_the_given_memory() -> None:
    allocator = RecordingAllocator()
    result = OPERATORS[gradient_of.default].kernel(allocator, torch.randn(5, 6), torch.randint(20, (5,)), 20, -1)
    assert allocator.contains(result)


def test_the_gradient_of_an_index_out_of_range_raises() -> None:
    with pytest.raises(RuntimeError, match="index 20 is out of bounds"):
        gradient_of(torch.randn(2, 6), torch.tensor([1, 20]), 20, -1)


@pytest.mark.parametrize("indices_dtype", [torch.int64, torch.int32])
def test_opcheck(indices_dtype: torch.dtype) -> None:
    indices, grad = torch.randint(20, (5, 3), dtype=indices_dtype), torch.randn(5, 3, 6)
    torch.library.opcheck(gradient_of.default, (grad, indices, 20, 2))
    torch.library.opcheck(gradient_of.default, (grad.transpose(0, 1), indices.t(), 20, -1))
    torch.library.opcheck(gradient_onto.default, (torch.randn(20, 6), grad, indices, -1))
    torch.library.opcheck(gradient_onto.default, (torch.randn(6, 20).t(), grad, indices, 3))
