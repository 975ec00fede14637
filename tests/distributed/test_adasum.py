"""AdaSum on four ranks, compared with the formula in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lit_ort.distributed.adasum import AdaSum, require_power_of_two
from lit_ort.errors import UnsupportedError
from tests.ranks import run_on_ranks

SHAPES = ((3, 5), (7,), (), (2, 2, 2))


def gradients_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    # The gradient of one tensor is zero on some ranks, and that of another on all ranks.
    return [*tensors, torch.zeros(4) if rank % 2 else torch.ones(4), torch.zeros(3)]


def combined() -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    tensors = gradients_of(dist.get_rank())
    AdaSum().combine(tensors)
    dist.destroy_process_group()
    return tensors


def reference(vectors: list[np.ndarray]) -> np.ndarray:
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = reference(vectors[:half]), reference(vectors[half:])
    dot, square_a, square_b = (float(np.vdot(x, y)) for x, y in ((a, b), (a, a), (b, b)))
    return (1 - dot / (2 * square_a) if square_a else 1) * a + (1 - dot / (2 * square_b) if square_b else 1) * b


@pytest.mark.slow
def test_every_rank_has_the_result_of_the_formula() -> None:
    ranks = 4
    results = run_on_ranks(combined, ranks)
    gradients = [gradients_of(rank) for rank in range(ranks)]
    for k in range(len(gradients[0])):
        expected = reference([tensors[k].double().numpy() for tensors in gradients])
        for rank in range(ranks):
            np.testing.assert_allclose(results[rank][k].numpy(), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(results[rank][k], results[0][k])


@pytest.mark.parametrize("ranks", [3, 6, 12])
def test_ranks_that_cannot_be_paired_are_rejected(ranks: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{ranks} is not a power of two. Train with"):
        require_power_of_two(ranks)
