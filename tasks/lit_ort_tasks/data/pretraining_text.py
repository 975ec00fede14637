"""BERT pre-training batches from plain text: pairs of sentences and masked tokens, drawn again in every epoch."""

from __future__ import annotations

import math
import os
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from lit_ort_tasks.data.batches import Batch
from lit_ort_tasks.data.corpora import (
    HELD_OUT_EVERY,
    HELD_OUT_POSITIONS,
    Corpus,
    Split,
    python_docs,
    text_file,
    with_held_out,
)
from lit_ort_tasks.data.loaders import BatchKey, BatchSource
from lit_ort_tasks.data.masking import DRAWS, Masking, mask_tokens, masking_of
from lit_ort_tasks.data.pretraining_batches import PretrainingData, Splits
from lit_ort_tasks.data.pretraining_pairs import (
    A_START,
    A_STOP,
    B_START,
    B_STOP,
    LABEL,
    SPECIALS_OF_A_PAIR,
    Sentences,
    draw_pairs,
    tokenize_sentences,
)
from lit_ort_tasks.data.tokenization import load_tokenizer, train_wordpiece
from lit_ort_tasks.errors import require, require_whole

# The seed of validation and test: runs with different seeds use the same items.
EVALUATION_SEED = 0


class Draw(IntEnum):
    """The uses of random numbers. Each has a separate stream for a seed and an epoch."""

    PAIRS = 0
    ORDER = 1
    MASKS = 2


class PairBatches(BatchSource):
    """Pairs of sentences of a split with masked tokens, in random order. Seed and epoch determine all of it.

    Every epoch has as many items as epoch 0. Where a draw has more pairs, some are left out at random; where it has
    fewer, further draws follow.
    """

    def __init__(
        self, text: Sentences, tokenizer: PreTrainedTokenizerFast, masking: Masking, max_length: int, seed: int
    ) -> None:
        self.text = text
        self.masking = masking
        self.max_length = max_length
        self.seed = seed
        self._start: Any = tokenizer.cls_token_id
        self._separator: Any = tokenizer.sep_token_id
        self._padding: Any = tokenizer.pad_token_id
        # The positions of special tokens in the text, mostly [UNK], int64[specials], increasing.
        self._specials = np.flatnonzero(np.isin(text.ids, masking.special_ids))
        self._items = len(self._draw(epoch=0, attempt=0))
        self._latest = (0, self._order(0))

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, key: BatchKey) -> Batch:
        pairs = self._pairs(key.epoch)[key.start : key.stop]
        ids, token_types, attention = self._assemble(pairs)
        items = range(key.start, key.start + len(pairs))
        draws = np.stack([self._random(key.epoch, Draw.MASKS, i).random((DRAWS, self.max_length)) for i in items])
        inputs, labels = mask_tokens(ids, draws, self.masking)
        return {
            "input_ids": torch.from_numpy(inputs),
            "token_type_ids": torch.from_numpy(token_types),
            "attention_mask": torch.from_numpy(attention),
            "labels": torch.from_numpy(labels),
            "next_sentence_label": torch.from_numpy(pairs[:, LABEL].copy()),
        }

    def _random(self, epoch: int, draw: Draw, which: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, epoch, draw, which))

    def _pairs(self, epoch: int) -> np.ndarray:
        """Return the pairs of an epoch in its order, int64[items, 5]; those of the last epoch stay in memory."""
        if self._latest[0] != epoch:
            self._latest = (epoch, self._order(epoch))
        return self._latest[1]

    def _order(self, epoch: int) -> np.ndarray:
        drawn = [self._draw(epoch, attempt=0)]
        # Ends, because the draw of epoch 0 had pairs and others can have them.
        while sum(map(len, drawn)) < self._items:
            drawn.append(self._draw(epoch, attempt=len(drawn)))
        pairs = np.concatenate(drawn)
        return pairs[self._random(epoch, Draw.ORDER, 0).permutation(len(pairs))[: self._items]]

    def _draw(self, epoch: int, attempt: int) -> np.ndarray:
        """Return pairs with at least one token that can be predicted, so that every item has a label."""
        random = self._random(epoch, Draw.PAIRS, attempt)
        pairs = draw_pairs(self.text, self.max_length - SPECIALS_OF_A_PAIR, random)
        bounds = pairs[:, [A_START, A_STOP, B_START, B_STOP]]
        sides = np.array([-1, 1, -1, 1])
        specials = np.searchsorted(self._specials, bounds) @ sides
        return pairs[specials < bounds @ sides]

    def _assemble(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids before masking, the token types and the attention mask, int64[pairs, length] each."""
        position = np.arange(self.max_length)[None, :]
        # Positions of the two separators.
        first = (pairs[:, A_STOP] - pairs[:, A_START] + 1)[:, None]
        second = first + (pairs[:, B_STOP] - pairs[:, B_START] + 1)[:, None]
        in_a = (position > 0) & (position < first)
        in_b = (position > first) & (position < second)
        token = np.where(in_a, pairs[:, A_START, None] + position - 1, pairs[:, B_START, None] + position - first - 1)
        ids = np.where(position <= second, self._separator, self._padding).astype(np.int64)
        ids[:, 0] = self._start
        in_text = in_a | in_b
        ids[in_text] = self.text.ids[token[in_text]]
        token_types = ((position > first) & (position <= second)).astype(np.int64)
        return ids, token_types, (position <= second).astype(np.int64)


class PretrainingText(PretrainingData):
    """BERT pre-training batches from plain text; `lit_ort_tasks.data.pretraining_batches` has their form.

    The training batches of an epoch follow from `seed` and the number of the epoch alone, which the Trainer sets on the
    sampler: a resumed run has the same batches as an uninterrupted one. Pairs are drawn in one Python loop, 50,000 a
    second: for many gigabytes of text use `lit_ort_tasks.data.pretraining_shards`.

    Args:
        train_file: text in UTF-8, with documents separated by blank lines; None is the documentation of the running
            Python.
        valid_file, test_file: the same; None is every 20th document of train_file.
        tokenizer: a folder or a model on the hub, with BERT's special tokens; None trains a WordPiece on the training
            documents.
        vocabulary_size: the most tokens of a trained WordPiece (every character of the text is a token in any case).
        max_length: tokens of every item with [CLS], [SEP] and padding.
        masked_share: the share of tokens to predict, without special ones.
        max_predictions: the most tokens to predict in an item; None is `masked_share` of `max_length`, rounded up.
        cache_dir: for tokenized text; None is `lit_ort_tasks.data.token_cache.default_folder()`.

    Raises:
        InputError: an option is out of range; when the data is read, also if a file is missing, empty or not UTF-8, the
            tokenizer lacks special tokens of BERT, or there are fewer than two documents in a split or fewer pairs than
            one batch.
    """

    def __init__(
        self,
        *,
        train_file: str | os.PathLike[str] | None = None,
        valid_file: str | os.PathLike[str] | None = None,
        test_file: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        vocabulary_size: int = 8000,
        max_length: int = 128,
        batch_size: int = 16,
        eval_batch_size: int = 32,
        masked_share: float = 0.15,
        max_predictions: int | None = None,
        seed: int = 1,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, eval_batch_size=eval_batch_size, seed=seed)
        most = 1 if max_predictions is None else max_predictions
        require_whole("data", vocabulary_size=vocabulary_size, max_predictions=most)
        require(
            isinstance(max_length, int) and max_length >= 8,
            f"data.max_length={max_length!r}: must be a whole number of at least 8, of which three are special tokens. "
            "Give one, or leave it out.",
        )
        require(
            isinstance(masked_share, float) and 0 < masked_share < 1,
            f"data.masked_share={masked_share!r}: must be a number above 0 and below 1. BERT's is 0.15.",
        )
        for name, file in (("valid_file", valid_file), ("test_file", test_file)):
            require(
                file is None or train_file is not None,
                f"data.{name}={file}: has no effect without data.train_file. Give that too, or leave this out.",
            )
        self.train_file = train_file
        self.valid_file = valid_file
        self.test_file = test_file
        self.tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        self.max_length = max_length
        self.masked_share = masked_share
        self.max_predictions = math.ceil(masked_share * max_length) if max_predictions is None else max_predictions
        self.cache_dir = cache_dir

    def read(self) -> Splits:
        corpus = self.corpus()
        tokenizer = self._tokenizer(corpus.train)
        masking = masking_of(tokenizer, self.masked_share, self.max_predictions)

        def batches(split: Split, seed: int) -> PairBatches:
            text = tokenize_sentences(tokenizer, split.documents, split.source, self.cache_dir)
            source = PairBatches(text, tokenizer, masking, self.max_length, seed)
            require(
                len(source) >= 1,
                f"{split.source}: no pair of sentences has a token that can be masked, because the tokenizer has "
                "none of them. Give text in the tokenizer's language, or another data.tokenizer.",
            )
            return source

        return Splits(
            train=batches(corpus.train, self.seed),
            valid=batches(corpus.valid, EVALUATION_SEED),
            test=batches(corpus.test, EVALUATION_SEED),
            tokenizer=tokenizer,
            vocabulary_size=len(tokenizer),
            max_length=self.max_length,
        )

    def corpus(self) -> Corpus:
        """Return the documents of the three splits."""
        if self.train_file is None:
            return python_docs()
        train = text_file(self.train_file)
        held_out = [name for name, file in (("valid", self.valid_file), ("test", self.test_file)) if file is None]
        needed = max((HELD_OUT_POSITIONS[name] + HELD_OUT_EVERY + 1 for name in held_out), default=0)
        require(
            len(train.documents) >= needed,
            f"data.train_file={self.train_file}: {len(train.documents)} documents, and every {HELD_OUT_EVERY}th is "
            f"held out for {' and '.join(held_out)}, at least 2 for each, so {needed} are needed. Separate documents "
            f"with blank lines, or give {' and '.join(f'data.{name}_file' for name in held_out)}.",
        )
        return with_held_out(train, self.valid_file, self.test_file)

    def _tokenizer(self, train: Split) -> PreTrainedTokenizerFast:
        if self.tokenizer is None:
            return train_wordpiece(train.documents, self.vocabulary_size)
        tokenizer = load_tokenizer(self.tokenizer)
        for name in ("cls_token", "sep_token", "pad_token", "mask_token"):
            require(
                getattr(tokenizer, name) is not None,
                f"data.tokenizer={self.tokenizer}: has no {name}, which BERT's batches need. Give the tokenizer of a "
                "BERT model, or null to train one.",
            )
        return tokenizer
