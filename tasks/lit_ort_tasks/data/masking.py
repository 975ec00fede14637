"""Masked tokens for BERT's first objective, drawn again for each item of each epoch.

Source: Devlin et al. 2018 (https://arxiv.org/abs/1810.04805), section 3.1, task 1. Dynamic masking: Liu et al. 2019
(https://arxiv.org/abs/1907.11692), section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from lit_ort_tasks.data.batches import IGNORED

# Of the tokens to predict: the share that becomes [MASK], and the share that becomes a random token. The rest is kept.
MASK_SHARE = 0.8
RANDOM_SHARE = 0.1
# Random numbers of a token: whether it is predicted, the kind of replacement, the random token.
DRAWS = 3


@dataclass(frozen=True)
class Masking:
    """How tokens are masked.

    Args:
        mask_id: the id of [MASK].
        special_ids: int64[special]: never predicted, never a replacement.
        other_ids: int64[others]: the rest of the vocabulary.
        share: the share of an item's tokens, without special ones, to predict.
        max_predictions: the most tokens to predict in an item.
    """

    mask_id: int
    special_ids: np.ndarray
    other_ids: np.ndarray
    share: float
    max_predictions: int


def masking_of(tokenizer: PreTrainedTokenizerFast, share: float, max_predictions: int) -> Masking:
    """Return the masking for the ids of a tokenizer with a mask token."""
    mask_id = tokenizer.mask_token_id
    assert isinstance(mask_id, int)
    special = np.unique(np.array(tokenizer.all_special_ids, dtype=np.int64))
    others = np.setdiff1d(np.arange(len(tokenizer), dtype=np.int64), special)
    return Masking(mask_id, special, others, share, max_predictions)


def mask_tokens(ids: np.ndarray, draws: np.ndarray, masking: Masking) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels, int64[items, length] each. Labels are the original ids where predicted, -100 elsewhere.

    The number of predicted tokens of an item is rounded, and at least 1 if there is a token that is not special.

    Args:
        ids: int64[items, length].
        draws: float64[items, 3, length], uniform in [0, 1).
    """
    maskable = ~np.isin(ids, masking.special_ids)
    available = maskable.sum(axis=1)
    count = np.clip(np.rint(available * masking.share), 1, masking.max_predictions)
    # The tokens with the smallest random numbers; special ones are last.
    order = np.argsort(np.where(maskable, draws[:, 0], 2.0), axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    predicted = rank < np.minimum(count, available)[:, None]
    masked = predicted & (draws[:, 1] < MASK_SHARE)
    replaced = predicted & ~masked & (draws[:, 1] < MASK_SHARE + RANDOM_SHARE)
    random_ids = masking.other_ids[(draws[:, 2] * len(masking.other_ids)).astype(np.int64)]
    inputs = np.where(masked, masking.mask_id, np.where(replaced, random_ids, ids))
    return inputs, np.where(predicted, ids, IGNORED)
