"""The likeliest tokens in the places of a text that are masked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lit_ort_tasks.errors import require
from lit_ort_tasks.prediction.classification import encoded, shares_of
from lit_ort_tasks.prediction.facts import MASKED_MODEL
from lit_ort_tasks.prediction.model import Model

MASK = "[MASK]"
BATCH = 32


def unmasked(
    model: Model, texts: Sequence[str], count: int = 5, batch: int = BATCH
) -> Iterator[list[list[tuple[str, float]]]]:
    """For each text, of each masked place its likeliest tokens with their probabilities, best first.

    Args:
        count: of tokens for a place.
        batch: texts of one run.

    Raises:
        InputError: the model predicts no masked tokens, or a text has none.
    """
    require(
        model.facts.kind == MASKED_MODEL,
        f"The model is a {model.facts.kind}, which fills no masks. Give the run of task=bert_pretrain.",
    )
    for text in texts:
        require(MASK in text, f"text={text!r}: has no {MASK} to fill. Write {MASK} in the place of a word.")
    mask = model.tokenizer.token_to_id(MASK)
    for start in range(0, len(texts), batch):
        given = encoded(model, texts[start : start + batch])
        shares = shares_of(model.run(given))
        for ids, row in zip(given["input_ids"], shares, strict=True):
            yield [_best(model, row[place], count) for place in np.flatnonzero(ids == mask)]


def _best(model: Model, shares: np.ndarray, count: int) -> list[tuple[str, float]]:
    best = np.argsort(-shares)[:count]
    return [(model.tokenizer.id_to_token(int(k)) or "", float(shares[k])) for k in best]
