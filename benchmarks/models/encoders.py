"""Encoders: masked language models."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.models.case import Model, ModuleAndBatch
from benchmarks.models.texts import sizes_of

# Ids of the special tokens, which are below 3.
SPECIAL_TOKENS: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)


def masked(kind: str, names: dict[str, str] | None = None, **settings: Any) -> Model:
    """A model with a head for masked tokens; 15 % of the tokens have a label.

    Args:
        kind: the prefix of transformers' classes.
        names: the names of common dimensions in its configuration, where they differ.
        settings: further settings of its configuration.
    """

    def make(size: str) -> ModuleAndBatch:
        sizes = sizes_of(size)
        common = {(names or {}).get(name, name): value for name, value in sizes.common.items()}
        config = getattr(transformers, f"{kind}Config")(**{**common, **settings})
        ids = sizes.ids()
        labels = torch.where(torch.rand(ids.shape) < 0.15, ids, -100)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        return getattr(transformers, f"{kind}ForMaskedLM")(config), batch

    return Model(make)


DISTILBERT = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}
MODELS: dict[str, Model] = {
    "BERT": masked("Bert"),
    "RoBERTa": masked("Roberta"),
    "ALBERT": masked("Albert", embedding_size=128),
    "ELECTRA": masked("Electra", embedding_size=128),
    "DeBERTa-v2": masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=64),
    "DistilBERT": masked("DistilBert", DISTILBERT),
    "ModernBERT": masked("ModernBert", **SPECIAL_TOKENS),
    "FNet": masked("FNet"),
}
