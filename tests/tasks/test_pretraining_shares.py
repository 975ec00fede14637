"""The batches of each of several processes, in training and in validation, and after a resume."""

from __future__ import annotations

import pytest
from lit_ort_tasks.data.loaders import BatchKey, EpochBatches, FixedBatches, Share

ITEMS, SIZE = 46, 4


def of_ranks(kind: type[FixedBatches], ranks: int) -> list[list[BatchKey]]:
    return [list(kind(ITEMS, SIZE, Share(ranks, rank))) for rank in range(ranks)]


def interleaved(shares: list[list[BatchKey]]) -> list[BatchKey]:
    return [key for keys in zip(*shares, strict=True) for key in keys]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_batches_are_those_of_one_process_interleaved(ranks: int) -> None:
    (single,) = of_ranks(EpochBatches, 1)
    shares = of_ranks(EpochBatches, ranks)
    assert len({len(share) for share in shares}) == 1
    keys = interleaved(shares)
    assert keys == single[: len(keys)]
    assert len(single) - len(keys) < ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_validation_batches_are_read_and_equally_many_by_each_process(ranks: int) -> None:
    (single,) = of_ranks(FixedBatches, 1)
    shares = of_ranks(FixedBatches, ranks)
    assert len({len(share) for share in shares}) == 1
    keys = interleaved(shares)
    assert keys[: len(single)] == single
    assert keys[len(single) :] == single[: len(keys) - len(single)]


def test_training_resumes_with_another_number_of_processes() -> None:
    (single,) = of_ranks(EpochBatches, 1)
    before = EpochBatches(ITEMS, SIZE, Share(2, 0))
    keys = iter(before)
    for _ in range(3):
        next(keys)
    state = before.state_dict()
    after = EpochBatches(ITEMS, SIZE)
    after.load_state_dict(state)
    assert list(after) == single[6:]
