"""Subword tokenizers: trained on a corpus, read from a folder, or fetched from the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tasks.errors import require
from tasks.huggingface import from_pretrained

END_OF_TEXT = "<|endoftext|>"
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Documents encoded at a time: enough for every core, few enough for a bar that moves.
ENCODED_AT_A_TIME = 256


def load_tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder or of a model on the hub.

    Raises InputError if there is none, or the hub can't be reached.
    """
    tokenizer = from_pretrained(AutoTokenizer, name, option="model.tokenizer")
    require(
        isinstance(tokenizer, PreTrainedTokenizerFast),
        f"model.tokenizer={name}: has no tokenizer.json, which the `tokenizers` library needs. Give a model that has.",
    )
    return tokenizer


def train_byte_level_bpe(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2's: every text can be written with it, and <|endoftext|> stands between documents.

    Source: Radford et al. 2019, section 2.2.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT
    )


def train_wordpiece(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A lower-case WordPiece as BERT's, [PAD] at 0, which writes one text as `[CLS] a [SEP]`, two with a second [SEP].

    Source: Devlin et al. 2018.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary_size, special_tokens=list(BERT_SPECIALS), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    pad, unknown, start, separator, mask = BERT_SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unknown,
        cls_token=start,
        sep_token=separator,
        mask_token=mask,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, documents: Sequence[str], description: str = "tokenizing"
) -> list[np.ndarray]:
    """The ids of each document, int32[tokens], without special tokens. Long work shows a progress bar."""
    encoded: list[np.ndarray] = []
    starts = range(0, len(documents), ENCODED_AT_A_TIME)
    for start in track(starts, description=description, transient=True, disable=len(starts) < 2):
        given = list(documents[start : start + ENCODED_AT_A_TIME])
        parts = tokenizer.backend_tokenizer.encode_batch_fast(given, add_special_tokens=False)
        encoded.extend(np.array(part.ids, dtype=np.int32) for part in parts)
    return encoded


def tokenizer_text(tokenizer: PreTrainedTokenizerFast) -> str:
    """Everything that decides which ids a text becomes, for keys of caches and for checkpoints."""
    return tokenizer.backend_tokenizer.to_str()


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the files from which `load_tokenizer` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
