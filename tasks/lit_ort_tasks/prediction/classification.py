"""Classes of texts, with their probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lit_ort_tasks.errors import require
from lit_ort_tasks.prediction.facts import CLASSIFIER
from lit_ort_tasks.prediction.model import Model

BATCH = 32


def classified(model: Model, texts: Sequence[str], batch: int = BATCH) -> Iterator[tuple[str, float]]:
    """Yields the most probable label of each text, and its probability.

    Args:
        batch: texts per run of the model.

    Raises:
        InputError: the model is no classifier.
    """
    require(
        model.facts.kind == CLASSIFIER,
        f"The model is a {model.facts.kind}, which has no classes. Give the run of task=bert_finetune.",
    )
    for start in range(0, len(texts), batch):
        for row in probabilities(model.run(encoded(model, texts[start : start + batch]))):
            index = int(row.argmax())
            yield model.facts.labels[index], float(row[index])


def encoded(model: Model, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """BERT's inputs, int64[texts, length] each, truncated to the model's longest sequence."""
    model.tokenizer.enable_truncation(model.facts.max_length)
    model.tokenizer.enable_padding(pad_id=model.tokenizer.token_to_id("[PAD]") or 0, pad_token="[PAD]")
    encodings = model.tokenizer.encode_batch(list(texts))
    return {
        "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
        "token_type_ids": np.array([encoding.type_ids for encoding in encodings], np.int64),
        "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
    }


def probabilities(logits: np.ndarray) -> np.ndarray:
    """The softmax over the last dimension, float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
