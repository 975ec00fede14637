"""Subword tokenizers: trained on a corpus, or loaded (`huggingface.load_tokenizer`), and what they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lit_ort_tasks.data.token_cache import content_key
from lit_ort_tasks.errors import require
from lit_ort_tasks.huggingface import load_tokenizer

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
# Documents encoded at a time: enough for every core, few enough for a bar that moves.
ENCODED_AT_A_TIME = 256


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
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    given = list(texts)
    words = {word for text in given for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))}
    # The trainer numbers the letters within words in the order of a hash table, which differs from process to process,
    # and breaks ties by number. As special tokens they are numbered here; below they are ordinary again.
    inner = sorted({f"##{letter}" for word in words for letter in word[1:]})
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer, trained.pre_tokenizer = normalizer, splitter
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary_size, special_tokens=[*BERT_SPECIALS, *inner], show_progress=False
    )
    trained.train_from_iterator(given, trainer)
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
    """The ids of each document, int32[tokens], without special tokens. Long work shows a progress bar."""
    encoded: list[np.ndarray] = []
    starts = range(0, len(documents), ENCODED_AT_A_TIME)
    for start in track(starts, description=description, transient=True, disable=len(starts) < 2):
        given = list(documents[start : start + ENCODED_AT_A_TIME])
        parts = tokenizer.backend_tokenizer.encode_batch_fast(given, add_special_tokens=False)
        encoded.extend(np.array(part.ids, dtype=np.int32) for part in parts)
    return encoded


def tokenizer_text(tokenizer: PreTrainedTokenizerFast) -> str:
    """Everything that decides which ids a text becomes, for keys of caches."""
    return tokenizer.backend_tokenizer.to_str()


def tokenizer_key(tokenizer: PreTrainedTokenizerFast) -> str:
    """A name for the tokenizer, for checkpoints: equal for equal ones alone."""
    return content_key([tokenizer_text(tokenizer)])


def require_same_tokenizer(saved: str, read: str) -> None:
    """Refuses a checkpoint whose ids mean other tokens: both are keys, the checkpoint's and the data's.

    Raises InputError.
    """
    require(
        saved == read,
        "The checkpoint was trained with another tokenizer than the one the data has now. Resume with the same data, "
        "or with model.tokenizer set to the huggingface folder of the checkpoint's run.",
    )
