"""The most probable tokens at the masked positions of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lit_ort_tasks.errors import require
from lit_ort_tasks.prediction.classification import encoded, probabilities
from lit_ort_tasks.prediction.facts import MASKED_MODEL
from lit_ort_tasks.prediction.model import Model

MASK = "[MASK]"
BATCH = 32


def unmasked(
    model: Model, texts: Sequence[str], count: int = 5, batch: int = BATCH
) -> Iterator[list[list[tuple[str, float]]]]:
    """Yields, for each masked position of each text, the most probable tokens with their probabilities, best first.

    Args:
        count: tokens of a position.
        batch: texts per run of the model.

    Raises:
        InputError: the model predicts no masked tokens, or a text has none, or one beyond the longest sequence.
    """
    require(
        model.facts.kind == MASKED_MODEL,
        f"The model is a {model.facts.kind}, which fills no masks. Give the run of task=bert_pretrain.",
    )
    for text in texts:
        require_masks(model, text)
    mask = model.tokenizer.token_to_id(MASK)
    for start in range(0, len(texts), batch):
        inputs = encoded(model, texts[start : start + batch])
        rows = probabilities(model.run(inputs))
        for ids, row in zip(inputs["input_ids"], rows, strict=True):
            yield [_best(model, row[position], count) for position in np.flatnonzero(ids == mask)]


def require_masks(model: Model, text: str) -> None:
    """Refuses a text without a mask, or with one that is cut off.

    Raises:
        InputError: it is one of the two.
    """
    whole, kept = (tokenizer.encode(text).tokens.count(MASK) for tokenizer in (model.tokenizer, model.bounded))
    require(whole > 0, f"text={text!r}: has no {MASK} to fill. Write {MASK} for a word.")
    require(
        kept == whole,
        f"text={text!r}: has a {MASK} beyond the longest sequence of the model, {model.facts.max_length} tokens. Give "
        "a shorter text.",
    )


def _best(model: Model, shares: np.ndarray, count: int) -> list[tuple[str, float]]:
    best = np.argsort(-shares)[:count]
    return [(model.tokenizer.id_to_token(int(k)) or "", float(shares[k])) for k in best]
