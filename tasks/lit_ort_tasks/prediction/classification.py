"""Classes of texts and of pairs of texts, with their probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from lit_ort_tasks.errors import require
from lit_ort_tasks.prediction.facts import CLASSIFIER
from lit_ort_tasks.prediction.model import Model

BATCH = 32
# To be classified: a text, or two.
Text: TypeAlias = str | tuple[str, str]


def classified(model: Model, texts: Sequence[Text], batch: int = BATCH) -> Iterator[tuple[str, float]]:
    """Yields the most probable label of each text or pair of texts, and its probability.

    Args:
        batch: texts per run of the model.

    Raises:
        InputError: the model is no classifier, or one of pairs for a text, or one of texts for a pair.
    """
    for text in texts:
        require_form(model, text)
    require(
        model.facts.kind == CLASSIFIER,
        f"The model is a {model.facts.kind}, which has no classes. Give the run of task=bert_finetune.",
    )
    for start in range(0, len(texts), batch):
        for row in probabilities(model.run(encoded(model, texts[start : start + batch]))):
            index = int(row.argmax())
            yield model.facts.labels[index], float(row[index])


def require_form(model: Model, text: Text) -> None:
    """Refuses a pair for a model of single texts, and a single text for a model of pairs.

    Raises:
        InputError: it is one of the two.
    """
    if isinstance(text, tuple):
        what = "classifier of single texts" if model.facts.kind == CLASSIFIER else model.facts.kind
        require(model.facts.pairs, f"pair={text[1]!r}: the model is a {what}. Leave the second text out.")
    else:
        require(
            not model.facts.pairs,
            f"text={text!r}: the model is a classifier of pairs of texts, and there is no second one. Give it as "
            "pair, that of a csv as pair_column.",
        )


def encoded(model: Model, texts: Sequence[Text]) -> dict[str, np.ndarray]:
    """BERT's inputs, int64[texts, length] each, truncated to the model's longest sequence."""
    encodings = model.bounded.encode_batch(list(texts))
    return {
        "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
        "token_type_ids": np.array([encoding.type_ids for encoding in encodings], np.int64),
        "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
    }


def probabilities(logits: np.ndarray) -> np.ndarray:
    """The softmax over the last dimension, float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
