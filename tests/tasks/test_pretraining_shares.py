"""Which pre-training batches each of several processes takes, in training and in validation, and after a resume."""

from __future__ import annotations

import pytest
from lit_ort_tasks.data.loaders import BatchKey, EpochBatches, FixedBatches, Share

ITEMS, SIZE = 46, 4


def of_ranks(kind: type[FixedBatches], ranks: int) -> list[list[BatchKey]]:
    return [list(kind(ITEMS, SIZE, Share(ranks, rank))) for rank in range(ranks)]


def taken_in_turn(shares: list[list[BatchKey]]) -> list[BatchKey]:
    return [key for keys in zip(*shares, strict=True) for key in keys]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_batches_are_those_of_one_process_in_turn(ranks: int) -> None:
    (alone,) = of_ranks(EpochBatches, 1)
    shares = of_ranks(EpochBatches, ranks)
    assert len({len(share) for share in shares}) == 1
    in_turn = taken_in_turn(shares)
    assert in_turn == alone[: len(in_turn)]
    assert len(alone) - len(in_turn) < ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_validation_batches_are_all_read_and_as_many_by_each(ranks: int) -> None:
    (alone,) = of_ranks(FixedBatches, 1)
    shares = of_ranks(FixedBatches, ranks)
    assert len({len(share) for share in shares}) == 1
    in_turn = taken_in_turn(shares)
    assert in_turn[: len(alone)] == alone
    assert in_turn[len(alone) :] == alone[: len(in_turn) - len(alone)]


def test_training_goes_on_with_other_numbers_of_processes() -> None:
    (alone,) = of_ranks(EpochBatches, 1)
    before = EpochBatches(ITEMS, SIZE, Share(2, 0))
    begun = iter(before)
    for _ in range(3):
        next(begun)
    state = before.state_dict()
    after = EpochBatches(ITEMS, SIZE)
    after.load_state_dict(state)
    assert list(after) == alone[6:]
