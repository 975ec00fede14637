"""Tokenizers: their ids, and that every process trains the same ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lit_ort_tasks.data.tokenization import (
    END_OF_TEXT,
    encode_documents,
    load_tokenizer,
    tokenizer_key,
    train_byte_level_bpe,
    train_wordpiece,
)
from lit_ort_tasks.huggingface import CHECKPOINT_KEY, checkpoint_part
from transformers import BertConfig, BertModel

TEXTS = ["The quick brown fox jumps over the lazy dog.", "Pack my box with five dozen liquor jugs."]


def test_a_byte_level_bpe_encodes_every_text() -> None:
    tokenizer = train_byte_level_bpe(TEXTS, 300)
    assert len(tokenizer) <= 300
    for text in (*TEXTS, "naïve 中文 \x00 \U0001f600\n\t"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.eos_token_id == 0


def test_a_wordpiece_encodes_like_bert() -> None:
    tokenizer = train_wordpiece(TEXTS, 100)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (0, 1)
    pair = tokenizer("The fox", "QUICK")
    tokens = tokenizer.convert_ids_to_tokens(pair["input_ids"])
    assert [tokens[0], tokens[-1], tokens.count("[SEP]")] == ["[CLS]", "[SEP]", 2]
    second = tokens.index("[SEP]") + 1
    assert pair["token_type_ids"] == [0] * second + [1] * (len(tokens) - second)
    assert tokenizer.decode(pair["input_ids"], skip_special_tokens=True) == "the fox quick"
    assert tokenizer("中")["input_ids"][1] == tokenizer.unk_token_id


def test_documents_are_encoded_one_by_one_without_special_tokens() -> None:
    tokenizer = train_wordpiece(TEXTS, 100)
    documents = TEXTS * 200
    encoded = encode_documents(tokenizer, documents)
    assert len(encoded) == 400
    assert encoded[399].tolist() == tokenizer(documents[399], add_special_tokens=False)["input_ids"]
    assert encoded[0].dtype.name == "int32"


def test_the_lengths_of_a_saved_tokenizer_cut_and_fill_no_text(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(TEXTS, 100)
    tokenizer.save_pretrained(tmp_path / "plain")
    expected, key = tokenizer(TEXTS[0])["input_ids"], tokenizer_key(tokenizer)
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    part = checkpoint_part(model, tokenizer)
    tokenizer(TEXTS, truncation=True, padding="max_length", max_length=6)
    assert tokenizer_key(tokenizer) == key
    assert checkpoint_part(model, tokenizer) == part
    tokenizer.save_pretrained(tmp_path / "cut")
    part["tokenizer"]["text"] = tokenizer.backend_tokenizer.to_str()  # as in older checkpoints
    torch.save({CHECKPOINT_KEY: part}, tmp_path / "cut.ckpt")
    for name in ("plain", "cut", "cut.ckpt"):
        loaded = load_tokenizer(tmp_path / name)
        assert encode_documents(loaded, TEXTS)[0].tolist() == expected[1:-1], name
        assert tokenizer_key(loaded) == key, name


VOCABULARIES = """
from lit_ort_tasks.data.tokenization import tokenizer_text, train_byte_level_bpe, train_wordpiece
texts = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "zyx wvu tsr qpo"]
print(hash(tokenizer_text(train_wordpiece(texts, 60)) + tokenizer_text(train_byte_level_bpe(texts, 300))))
"""


@pytest.mark.sweep
def test_equal_texts_train_equal_tokenizers_in_every_process() -> None:
    command = [sys.executable, "-W", "ignore", "-c", VOCABULARIES]
    environment = os.environ | {"PYTHONHASHSEED": "0"}  # for the hash that is printed
    runs = [subprocess.run(command, check=True, capture_output=True, env=environment) for _ in range(3)]
    assert len({run.stdout for run in runs}) == 1
