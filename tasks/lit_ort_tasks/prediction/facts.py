"""The description of an exported model that predictions need, and the names of its files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

MODEL, TOKENIZER = "model.onnx", "tokenizer.json"
LANGUAGE_MODEL, CLASSIFIER, MASKED_MODEL = "language model", "classifier", "masked language model"


@dataclasses.dataclass(frozen=True)
class Facts:
    """The description that a run writes into its model, as text.

    Args:
        kind: `language model`, `classifier` or `masked language model`.
        max_length: the most tokens of a sequence.
        labels: of a classifier.
        end: the id of the token that ends a text, or None.
        separator: the characters between a text and its continuation.
        vocabulary: `digest_of` the tokenizer's tokens.
        pairs: whether pairs of texts are classified; older files lack it.
    """

    kind: str
    max_length: int
    labels: tuple[str, ...] = ()
    end: int | None = None
    separator: str = ""
    vocabulary: str = ""
    pairs: bool = False

    def as_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Facts:
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "labels": tuple(values["labels"])})


def digest_of(vocabulary: Mapping[str, int]) -> str:
    """The number of tokens, and a digest of them with their ids: `11 sha256:...`."""
    tokens = json.dumps(sorted(vocabulary.items())).encode()
    return f"{len(vocabulary)} sha256:{hashlib.sha256(tokens).hexdigest()[:16]}"
