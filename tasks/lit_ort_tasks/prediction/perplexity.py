"""How well a language model knows a text: exp of the mean cross entropy of its tokens."""

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
    """Of a text: exp(loss), the mean loss of a token in nats, and how many were predicted."""

    value: float
    loss: float
    tokens: int


def perplexity(model: Model, text: str) -> Perplexity:
    """Each token is predicted once, from those before it in its block of the model's longest sequence.

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
        part = rows[start : start + BATCH]
        given = np.zeros((len(part), max(len(row) for row in part) - 1), np.int64)
        for k, row in enumerate(part):
            given[k, : len(row) - 1] = row[:-1]
        logits = model.run({"input_ids": given}).astype(np.float64)
        for k, row in enumerate(part):
            own = logits[k, : len(row) - 1]
            largest = own.max(axis=-1)
            normal = largest + np.log(np.exp(own - largest[:, None]).sum(axis=-1))
            total += float((normal - own[np.arange(len(own)), row[1:]]).sum())
            predicted += len(own)
    loss = total / predicted
    return Perplexity(math.exp(loss), loss, predicted)
