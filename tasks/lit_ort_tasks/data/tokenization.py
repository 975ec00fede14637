"""Subword tokenizers, trained on a corpus or loaded (`huggingface.load_tokenizer`), and their ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lit_ort_tasks.data.token_cache import content_key
from lit_ort_tasks.errors import require
from lit_ort_tasks.huggingface import load_tokenizer, plain_tokenizer

__all__ = [
    "encode_documents",
    "load_tokenizer",
    "require_same_tokenizer",
    "tokenizer_key",
    "tokenizer_text",
    "train_byte_level_bpe",
    "train_wordpiece",
]

END_OF_TEXT = "<|endoftext|>"
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Documents per call: enough for every core, and few enough for a progress bar.
ENCODED_AT_A_TIME = 256


def train_byte_level_bpe(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE like GPT-2's. It encodes every text, and <|endoftext|> separates documents.

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
    """Train a lower-case WordPiece like BERT's, with the id 0 for [PAD].

    It encodes one text as `[CLS] a [SEP]`, and two as `[CLS] a [SEP] b [SEP]`.

    Source: Devlin et al. 2018.
    """
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    documents = list(texts)
    words = {word for text in documents for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))}
    # The trainer numbers the letters within words in the order of a hash table, which differs between processes, and
    # breaks ties by number. As special tokens they have a fixed order; below they are ordinary tokens.
    inner = sorted({f"##{letter}" for word in words for letter in word[1:]})
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer, trained.pre_tokenizer = normalizer, splitter
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary_size, special_tokens=[*BERT_SPECIALS, *inner], show_progress=False
    )
    trained.train_from_iterator(documents, trainer)
    tokenizer = Tokenizer(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.add_special_tokens(list(BERT_SPECIALS))
    tokenizer.decoder = decoders.WordPiece(prefix="##")
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
    """Return the ids of each document, int32[tokens], without special tokens. Many documents show a progress bar."""
    encoded: list[np.ndarray] = []
    starts = range(0, len(documents), ENCODED_AT_A_TIME)
    for start in track(starts, description=description, transient=True, disable=len(starts) < 2):
        batch = list(documents[start : start + ENCODED_AT_A_TIME])
        parts = tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        encoded.extend(np.array(part.ids, dtype=np.int32) for part in parts)
    return encoded


def tokenizer_text(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the definition of a tokenizer, without the lengths of its last call, for keys of caches."""
    return plain_tokenizer(tokenizer).to_str()


def tokenizer_key(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a digest of a tokenizer, for checkpoints."""
    return content_key([tokenizer_text(tokenizer)])


def require_same_tokenizer(saved: str, own: str) -> None:
    """Compares the tokenizer keys of a checkpoint and of the data.

    Raises:
        InputError: they differ.
    """
    require(
        saved == own,
        "The checkpoint was trained with another tokenizer than that of the data. Resume with the same data, or with "
        "model.tokenizer set to the huggingface folder of the checkpoint's run.",
    )
