"""The perplexity of a text: exp of the mean cross entropy of its tokens."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from lit_ort_tasks.errors import require
from lit_ort_tasks.prediction.facts import LANGUAGE_MODEL
from lit_ort_tasks.prediction.model import Model

BATCH = 8


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text.

    Args:
        value: exp(loss).
        loss: the mean loss of a token in nats.
        tokens: the number of predicted tokens.
    """

    value: float
    loss: float
    tokens: int


def perplexity(model: Model, text: str) -> Perplexity:
    """Predicts each token once, from those before it in its block, which has the length of the longest sequence.

    Raises:
        InputError: the model is no language model, or the text has fewer than two tokens.
    """
    require(
        model.facts.kind == LANGUAGE_MODEL,
        f"The model is a {model.facts.kind}, which has no perplexity. Give the run of a language model.",
    )
    (ids,) = model.encode([text])
    require(len(ids) >= 2, f"The text has {len(ids)} tokens, and at least 2 are needed to predict one. Give more text.")
    length = model.facts.max_length
    total, predicted = 0.0, 0
    rows = [ids[start : start + length + 1] for start in range(0, len(ids) - 1, length)]
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        inputs = np.zeros((len(batch), max(len(row) for row in batch) - 1), np.int64)
        for k, row in enumerate(batch):
            inputs[k, : len(row) - 1] = row[:-1]
        logits = model.run({"input_ids": inputs}).astype(np.float64)
        for k, row in enumerate(batch):
            scores = logits[k, : len(row) - 1]
            largest = scores.max(axis=-1)
            normalizers = largest + np.log(np.exp(scores - largest[:, None]).sum(axis=-1))
            total += float((normalizers - scores[np.arange(len(scores)), row[1:]]).sum())
            predicted += len(scores)
    loss = total / predicted
    return Perplexity(math.exp(loss), loss, predicted)
