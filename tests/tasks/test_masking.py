"""The choice, the number and the replacement of masked tokens."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from lit_ort_tasks.data.masking import DRAWS, Masking, mask_tokens

VOCABULARY, LENGTH, ITEMS = 1000, 64, 4000
SPECIALS = np.arange(5)
MASK = 4
BERT = Masking(MASK, SPECIALS, np.arange(5, VOCABULARY), share=0.15, max_predictions=20)


def draws(items: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(1).random((items, DRAWS, length))


def ordinary_ids(items: int = ITEMS) -> np.ndarray:
    """Token ids that are not special, int64[items, LENGTH]."""
    return np.random.default_rng(2).integers(len(SPECIALS), VOCABULARY, (items, LENGTH))


def assert_binomial(hits: int, trials: int, share: float) -> None:
    """Asserts that the hits are within five standard deviations of independent draws with this probability."""
    assert abs(hits - trials * share) < 5 * sqrt(trials * share * (1 - share))


def test_of_ten_tokens_eight_are_masked_one_is_replaced_and_one_is_kept() -> None:
    ids = ordinary_ids()
    inputs, labels = mask_tokens(ids, draws(ITEMS), BERT)
    chosen = labels >= 0
    assert (labels[chosen] == ids[chosen]).all()
    assert (labels[~chosen] == -100).all()
    assert (inputs[~chosen] == ids[~chosen]).all()
    trials = int(chosen.sum())
    assert_binomial(int((inputs[chosen] == MASK).sum()), trials, 0.8)
    others = len(BERT.other_ids)
    # A random token can equal the original one.
    assert_binomial(int((inputs[chosen] == ids[chosen]).sum()), trials, 0.1 + 0.1 / others)
    replaced = inputs[chosen & (inputs != MASK) & (inputs != ids)]
    assert_binomial(len(replaced), trials, 0.1 * (1 - 1 / others))
    assert replaced.min() < 5 + 0.05 * others
    assert replaced.max() > 0.95 * VOCABULARY
    assert not np.isin(replaced, SPECIALS).any()


def test_every_position_has_the_same_probability_and_the_share_is_rounded() -> None:
    _, labels = mask_tokens(ordinary_ids(), draws(ITEMS), BERT)
    assert ((labels >= 0).sum(axis=1) == 10).all()  # 0.15 x 64 = 9.6
    for position in range(LENGTH):
        assert_binomial(int((labels[:, position] >= 0).sum()), ITEMS, 10 / LENGTH)


def test_special_tokens_are_never_predicted_and_do_not_count() -> None:
    ids = ordinary_ids(500)
    ids[:, ::4] = np.resize(SPECIALS, ids[:, ::4].shape)
    inputs, labels = mask_tokens(ids, draws(500), BERT)
    special = np.isin(ids, SPECIALS)
    assert (labels[special] == -100).all()
    assert (inputs[special] == ids[special]).all()
    assert ((labels >= 0).sum(axis=1) == 7).all()  # 0.15 x 48 = 7.2


@pytest.mark.parametrize(
    ("ordinary", "share", "limit", "expected"), [(1, 0.15, 20, 1), (60, 0.9, 20, 20), (0, 0.5, 9, 0)]
)
def test_at_least_one_token_and_at_most_the_limit_is_predicted(
    ordinary: int, share: float, limit: int, expected: int
) -> None:
    ids = np.zeros((50, LENGTH), dtype=np.int64)
    ids[:, :ordinary] = 7
    _, labels = mask_tokens(ids, draws(50), Masking(MASK, SPECIALS, BERT.other_ids, share, limit))
    assert ((labels >= 0).sum(axis=1) == expected).all()
