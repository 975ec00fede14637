"""Small models of the transformers library, and the tasks around them."""

from __future__ import annotations

from typing import Any

import torch
from lit_ort_tasks.bert_finetune import BertFinetune
from lit_ort_tasks.bert_pretrain import BertPretrain
from lit_ort_tasks.data.tokenization import train_byte_level_bpe, train_wordpiece
from lit_ort_tasks.gpt2 import GPT2
from torch import Tensor

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"]
SHAPE: dict[str, Any] = dict(layers=2, heads=2, width=32, dropout=0.0)
LENGTH = 12
LABELS = ["one", "two", "three"]


def gpt2(**figures: Any) -> GPT2:
    return GPT2(train_byte_level_bpe(TEXT, 300), max_length=LENGTH, **(SHAPE | figures))


def bert_pretrain(**figures: Any) -> BertPretrain:
    tokenizer = train_wordpiece(TEXT, 60)
    arguments: dict[str, Any] = dict(vocabulary_size=len(tokenizer), max_length=LENGTH) | SHAPE | figures
    return BertPretrain(tokenizer, **arguments)


def bert_finetune(**figures: Any) -> BertFinetune:
    return BertFinetune(train_wordpiece(TEXT, 60), LABELS, max_length=LENGTH, **(SHAPE | figures))


def gpt2_batch(task: GPT2, batch: int = 4) -> dict[str, Tensor]:
    stream = torch.randint(len(task.tokenizer), (batch, LENGTH + 1))
    targets = stream[:, 1:].clone()
    targets[-1, -3:] = -100
    return {"input_ids": stream[:, :-1].contiguous(), "targets": targets}


def bert_inputs(vocabulary: int, batch: int) -> dict[str, Tensor]:
    """Texts of several lengths, filled up with zeros, each with a second part."""
    lengths = torch.randint(6, LENGTH + 1, (batch, 1))
    inside = torch.arange(LENGTH) < lengths
    return {
        "input_ids": torch.randint(5, vocabulary, (batch, LENGTH)) * inside,
        "token_type_ids": ((torch.arange(LENGTH) > 3) & inside).long(),
        "attention_mask": inside.long(),
    }


def bert_pretrain_batch(task: BertPretrain, batch: int = 4) -> dict[str, Tensor]:
    inputs = bert_inputs(task.model.config.vocab_size, batch)
    labels = torch.full((batch, LENGTH), -100)
    labels[:, 2:4] = torch.randint(5, task.model.config.vocab_size, (batch, 2))
    return {**inputs, "labels": labels, "next_sentence_label": torch.randint(2, (batch,))}


def bert_finetune_batch(task: BertFinetune, batch: int = 4) -> dict[str, Tensor]:
    inputs = bert_inputs(task.model.config.vocab_size, batch)
    return {**inputs, "labels": torch.randint(len(LABELS), (batch,))}


CASES: dict[str, tuple[Any, Any]] = {
    "gpt2": (gpt2, gpt2_batch),
    "bert_pretrain": (bert_pretrain, bert_pretrain_batch),
    "bert_finetune": (bert_finetune, bert_finetune_batch),
}
