"""Small exported models for tests of predictions: a language model, classifiers and a masked language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lit_ort_tasks.data.text import build_vocabulary, tokenize
from lit_ort_tasks.inference import (
    BatchFirst,
    Inference,
    Logits,
    bert_example,
    changing,
    example,
    word_tokenizer,
    write_inference,
)
from lit_ort_tasks.prediction.facts import CLASSIFIER, LANGUAGE_MODEL, MASKED_MODEL, Facts
from lit_ort_tasks.transformer_lm import TransformerModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

TEXT = 'The list isn\'t empty; it has (three) items. <br />Is "it" sorted? Yes! No: never, at all.'
LENGTH = 8
PAIRS = "classifier of pairs"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"the list is empty sorted not".split()]


def language_model(folders: pytest.TempPathFactory) -> tuple[Path, TransformerModel, list[str]]:
    """The folder of an exported model, the model and its vocabulary."""
    torch.manual_seed(0)
    vocabulary = build_vocabulary(tokenize(TEXT))
    model = TransformerModel(len(vocabulary), 1, 2, 16, 32, 0.1, LENGTH)
    folder = folders.mktemp("run")
    facts = Facts(LANGUAGE_MODEL, LENGTH, separator=" ")
    batch = example(len(vocabulary), LENGTH // 2, "input_ids")
    inference = Inference(BatchFirst(model), batch, changing(["input_ids"]), word_tokenizer(vocabulary), facts)
    write_inference(inference, folder, "none", {})
    return folder, model.eval(), vocabulary


def berts(factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of an exported classifier, one of pairs of texts, and an exported masked language model."""
    torch.manual_seed(0)
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $0 [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes)  # pyright: ignore[reportArgumentType]
    tasks = {
        CLASSIFIER: BertForSequenceClassification(config),
        PAIRS: BertForSequenceClassification(config),
        MASKED_MODEL: BertForMaskedLM(config),
    }
    folders = {}
    for kind, model in tasks.items():
        folders[kind] = factory.mktemp("run")
        batch = bert_example(config)
        labels = () if kind == MASKED_MODEL else ("short", "long")
        facts = Facts(CLASSIFIER if labels else kind, 16, labels, pairs=kind == PAIRS)
        inference = Inference(Logits(model), batch, changing(list(batch)), tokenizer, facts)
        write_inference(inference, folders[kind], "none", {"verify": False})
    return folders
