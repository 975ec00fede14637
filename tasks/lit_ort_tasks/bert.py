"""The BERT that its tasks train: one of the library's model classes, random or pre-trained."""

from __future__ import annotations

import os
from typing import Any

from transformers import BertConfig

from lit_ort_tasks.huggingface import load_model


def make_bert(
    kind: Any,
    pretrained: str | os.PathLike[str] | None,
    *,
    vocabulary_size: int,
    layers: int,
    heads: int,
    width: int,
    positions: int,
    dropout: float,
    **settings: Any,
) -> Any:
    """A model to train.

    kind: the model class.
    pretrained: where weights and shape come from, as `load_model` takes it; None makes a random model of the figures,
        with a feed-forward of 4 widths.
    dropout: of embeddings, attention and layers, also of a pre-trained model.
    settings: further values of the configuration.

    Raises InputError if `pretrained` can't be loaded.
    """
    # An encoder has nothing to cache, and with gradient checkpointing the library warns of it in every forward.
    settings |= dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, use_cache=False)
    if pretrained is not None:
        return load_model(kind, pretrained, **settings)
    shape = BertConfig(
        vocab_size=vocabulary_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=positions,
        **settings,
    )
    return kind(shape)
