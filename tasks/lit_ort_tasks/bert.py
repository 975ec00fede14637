"""The BERT models of the tasks: classes of the transformers library, with random or pre-trained weights."""

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
    """Return a model to train.

    Args:
        kind: the model class.
        pretrained: the source of weights and shape, as for `load_model`; None creates a random model with the sizes
            below and a feed-forward of 4 widths.
        dropout: of embeddings, attention and layers, also in a pre-trained model.
        settings: further values of the configuration.

    Raises:
        InputError: `pretrained` can't be loaded.
    """
    # An encoder has nothing to cache, and with gradient checkpointing the library warns in every forward.
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
