"""Dropout: statistics of its masks, its gradient and its dtypes."""

from __future__ import annotations

import pytest
import torch

from lit_ort.ops import OPERATORS
from lit_ort.ops.masks import draw_mask, scale_of
from lit_ort.regions.counter_random import DROPOUT_OFF
from tests.ops.helpers import RecordingAllocator, seed_of

dropout, dropout_backward = torch.ops.lit_ort.dropout, torch.ops.lit_ort.dropout_backward


def mask_of(share: float, seed: int, stream: int, elements: int = 400_000) -> torch.Tensor:
    mask = torch.empty(elements, dtype=torch.bool)
    draw_mask(mask, share, seed, stream)
    return mask


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.float(), b.float()]))[0, 1])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
def test_elements_are_dropped_independently(share: float) -> None:
    mask = mask_of(share, seed=1, stream=0)
    elements = len(mask)
    deviation = (share * (1 - share) / elements) ** 0.5
    assert abs(float(mask.float().mean()) - (1 - share)) <= 5 * deviation + 1e-5
    # Four elements share one draw, but neighbors at every distance must be independent.
    centered = mask.float() - mask.float().mean()
    for distance in (1, 2, 3, 4, 8):
        covariance = float((centered[distance:] * centered[:-distance]).mean())
        assert abs(covariance) <= 5 * share * (1 - share) / elements**0.5 + 1e-6


def test_masks_are_determined_by_seed_and_stream() -> None:
    assert torch.equal(mask_of(0.3, 5, 7), mask_of(0.3, 5, 7))
    pairs = [(5, 7), (5, 8), (6, 7), (6, 8), (7, 5), (2**40 + 5, 7), (5, 2**40 + 7)]
    masks = [mask_of(0.3, *pair) for pair in pairs]
    for k, mask in enumerate(masks):
        for other in masks[k + 1 :]:
            # For 21 pairs of independent masks, the largest correlation is about 3 standard deviations.
            assert abs(correlation(mask, other)) < 5 / len(mask) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kept_elements_are_scaled(dtype: torch.dtype) -> None:
    x = torch.randn(100, 51, dtype=dtype)
    result, mask = dropout(x, seed_of(3), 0.1, 2)
    assert (result.dtype, mask.dtype) == (dtype, torch.bool)
    torch.testing.assert_close(result, torch.where(mask, x * scale_of(0.1), 0))
    grad = torch.randn_like(x)
    actual = dropout_backward(grad, mask, seed_of(3), 0.1)
    torch.testing.assert_close(actual, torch.where(mask, grad * scale_of(0.1), 0))


def test_dropout_preserves_the_mean() -> None:
    result, _ = dropout(torch.ones(1000, 501), seed_of(11), 0.1, 0)
    assert abs(float(result.mean()) - 1) < 3e-3


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_seed_off_disables_dropout(p: float) -> None:
    x = torch.randn(50, 3, requires_grad=True)
    result, mask = dropout(x, seed_of(DROPOUT_OFF), p, 0)
    assert torch.equal(result, x)
    assert bool(mask.all())
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))


def test_probability_one_drops_everything() -> None:
    result, mask = dropout(torch.randn(50), seed_of(1), 1.0, 0)
    assert not result.any()
    assert not mask.any()


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_p_must_be_a_probability(p: float) -> None:
    with pytest.raises(ValueError, match=f"dropout probability is {p}"):
        dropout(torch.ones(3), seed_of(1), p, 0)


def test_gradcheck() -> None:
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: dropout(t, seed_of(3), 0.4, 1)[0], (x,))
    assert torch.autograd.gradgradcheck(lambda t: dropout(t, seed_of(3), 0.4, 1)[0].square(), (x,))


@pytest.mark.parametrize("shape", [(4, 5), (), (0, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    torch.library.opcheck(dropout.default, (x, seed_of(3), 0.4, 1))
    torch.library.opcheck(dropout_backward.default, (x, torch.rand(shape) > 0.4, seed_of(3), 0.4))


def test_permuted_arguments() -> None:
    x = torch.randn(4, 5, 6).transpose(0, 2)
    result, mask = dropout(x, seed_of(3), 0.4, 1)
    assert result.is_contiguous()
    torch.testing.assert_close(result, x * mask * scale_of(0.4))
    torch.library.opcheck(dropout.default, (x, seed_of(3), 0.4, 1))


def test_results_use_the_given_memory() -> None:
    allocator, x = RecordingAllocator(), torch.randn(40, 50)
    result, mask = OPERATORS[dropout.default].kernel(allocator, x, seed_of(3), 0.4, stream=1)
    gradient = OPERATORS[dropout_backward.default].kernel(allocator, x, mask, seed_of(3), 0.4)
    assert all(allocator.contains(tensor) for tensor in (result, mask, gradient))
    expected = dropout(x, seed_of(3), 0.4, 1)
    assert torch.equal(result, expected[0])
    assert torch.equal(mask, expected[1])
