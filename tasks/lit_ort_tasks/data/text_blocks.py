"""Batches of a causal language model: blocks of subword tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

from lit_ort_tasks.data.batches import IGNORED, Batch
from lit_ort_tasks.data.corpora import HELD_OUT_EVERY, Corpus, Split, python_docs, text_file, with_held_out
from lit_ort_tasks.data.loaders import Shuffled, evaluation_loader, share_of, training_loader
from lit_ort_tasks.data.token_cache import cached_arrays, content_key
from lit_ort_tasks.data.tokenization import (
    encode_documents,
    load_tokenizer,
    require_same_tokenizer,
    tokenizer_key,
    tokenizer_text,
    train_byte_level_bpe,
)
from lit_ort_tasks.errors import require, require_whole


class Blocks(Dataset[Batch]):
    """Consecutive blocks of a stream of tokens: inputs, and as targets the next tokens, int64[block] each.

    Every token but the stream's first is a target once. The last block is padded with its last token, with the targets
    `IGNORED`.
    """

    def __init__(self, stream: np.ndarray, block: int) -> None:
        self._stream = stream
        self._block = block

    def __len__(self) -> int:
        return -(-(len(self._stream) - 1) // self._block)

    def __getitem__(self, index: int) -> Batch:
        start = index * self._block
        tokens = torch.from_numpy(self._stream[start : start + self._block + 1].astype(np.int64))
        inputs = torch.full((self._block,), int(tokens[-1]))
        targets = torch.full((self._block,), IGNORED)
        inputs[: len(tokens) - 1] = tokens[:-1]
        targets[: len(tokens) - 1] = tokens[1:]
        return {"input_ids": inputs, "targets": targets}


class TextBlocks(LightningDataModule):
    """Batches of blocks, from plain text or from Python's documentation.

    Args:
        train_file: UTF-8 text, with documents separated by blank lines, or beginning with a title as in WikiText; None
            is the documentation of the running Python.
        valid_file, test_file: the same; None holds out a twentieth of the training documents, or if there are fewer
            than 20, of their lines.
        tokenizer: a folder or a name on the hub; None trains a byte-level BPE on the training text.
        vocabulary_size: of a trained tokenizer.
        block: tokens of an item.
        seed: determines the order of the blocks in each epoch.
        cache_dir: for tokenized text; None is ~/.cache/lit_ort/tokens.

    Raises:
        InputError: a number is too small, a file can't be read, or a split has fewer tokens than a block.
    """

    def __init__(
        self,
        *,
        train_file: str | os.PathLike[str] | None = None,
        valid_file: str | os.PathLike[str] | None = None,
        test_file: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        vocabulary_size: int = 8000,
        block: int = 128,
        batch_size: int = 8,
        eval_batch_size: int = 8,
        seed: int = 1,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        require_whole("data", block=block, batch_size=batch_size, eval_batch_size=eval_batch_size)
        require_whole("data", 0, seed=seed)
        require(
            isinstance(vocabulary_size, int) and vocabulary_size >= 257,
            f"data.vocabulary_size={vocabulary_size!r}: must be a whole number of at least 257, one for each byte and "
            "one for the end of a document. Give more, or leave it out.",
        )
        require(
            train_file is not None or (valid_file is None and test_file is None),
            "data.train_file=null: there are files for validation or test and none for training. Give data.train_file, "
            "or leave all three out.",
        )
        self.files = {"train": train_file, "valid": valid_file, "test": test_file}
        self.tokenizer_name = tokenizer
        self.vocabulary_size = vocabulary_size
        self.block = block
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self.cache_dir = cache_dir

    @cached_property
    def corpus(self) -> Corpus:
        """Read at the first use."""
        if self.files["train"] is None:
            return python_docs()
        return corpus_of_files(self.files["train"], self.files["valid"], self.files["test"])

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Loaded or trained at the first use."""
        if self.tokenizer_name is not None:
            return load_tokenizer(self.tokenizer_name)
        return train_byte_level_bpe(self.corpus.train.documents, self.vocabulary_size)

    @cached_property
    def streams(self) -> dict[str, np.ndarray]:
        """The tokens of the splits, int32[tokens] each; tokenized once for a text and a tokenizer."""
        splits = {"train": self.corpus.train, "valid": self.corpus.valid, "test": self.corpus.test}
        streams = {name: self._stream(split) for name, split in splits.items()}
        for name, split in splits.items():
            require(
                len(streams[name]) > self.block,
                f"{split.source}: {len(streams[name])} tokens, and one block with its targets needs {self.block + 1} "
                f"(data.block={self.block}). Give more text, or a smaller block.",
            )
        return streams

    @property
    def end_of_text(self) -> int:
        """The id of the token that separates documents."""
        end: Any = self.tokenizer.eos_token_id
        require(
            isinstance(end, int),
            f"model.tokenizer={self.tokenizer_name}: has no end-of-text token, which separates documents. Give the "
            "tokenizer of a causal language model.",
        )
        return end

    def _stream(self, split: Split) -> np.ndarray:
        end = self.end_of_text

        def make() -> dict[str, np.ndarray]:
            encoded = encode_documents(self.tokenizer, split.documents, f"tokenizing {split.source}")
            last = np.array([end], dtype=np.int32)
            parts = [part for ids in encoded for part in (ids, last)]
            return {"tokens": np.concatenate(parts) if parts else last[:0]}

        key = content_key(split.documents, kind="stream", tokenizer=tokenizer_text(self.tokenizer), end=end)
        return cached_arrays(self.cache_dir, key, make)["tokens"]

    @property
    def task_arguments(self) -> dict[str, Any]:
        """The arguments of the task that follow from the data."""
        return {"tokenizer": self.tokenizer, "max_length": self.block}

    def setup(self, stage: str) -> None:
        blocks, ranks = len(Blocks(self.streams["train"], self.block)), share_of(self.trainer).ranks
        require(
            blocks >= ranks,
            f"data.block={self.block}: training has only {blocks} blocks, and none for some of {ranks} processes. Give "
            "a smaller one, fewer processes, or more text.",
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        blocks = Shuffled(Blocks(self.streams["train"], self.block), self.seed)
        # A shorter last batch would have another shape. Other blocks are left out in each epoch.
        largest = max(1, len(blocks) // share_of(self.trainer).ranks)
        return training_loader(blocks, min(self.batch_size, largest), self.trainer)

    def val_dataloader(self) -> DataLoader[Batch]:
        blocks = Shuffled(Blocks(self.streams["valid"], self.block), None)
        return evaluation_loader(blocks, self.eval_batch_size, self.trainer)

    def test_dataloader(self) -> DataLoader[Batch]:
        blocks = Shuffled(Blocks(self.streams["test"], self.block), None)
        return evaluation_loader(blocks, self.eval_batch_size, self.trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"tokenizer": tokenizer_key(self.tokenizer), "end_of_text": self.end_of_text}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses a checkpoint with another tokenizer, or another end of texts, which older ones lack."""
        require_same_tokenizer(state_dict["tokenizer"], tokenizer_key(self.tokenizer))
        saved, own = state_dict.get("end_of_text", self.end_of_text), self.end_of_text
        require(
            saved == own,
            f"The checkpoint was trained on texts that end with the token {saved}, and those of the data end with "
            f"{own}. Resume with the tokenizer of the checkpoint, with its special tokens.",
        )


def corpus_of_files(
    train: str | os.PathLike[str], valid: str | os.PathLike[str] | None, test: str | os.PathLike[str] | None
) -> Corpus:
    """Return the splits of text files. A twentieth of the training documents replaces a file that is None."""
    split = text_file(train)
    if len(split.documents) < HELD_OUT_EVERY and (valid is None or test is None):
        split = Split(split.source, _pieces(split.documents))
    return with_held_out(split, valid, test)


def _pieces(documents: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of few documents as 20 documents, or fewer if there are fewer lines."""
    lines = [line for text in documents for line in text.splitlines() if line.strip()]
    bounds = np.linspace(0, len(lines), HELD_OUT_EVERY + 1).astype(int)
    pairs = zip(bounds, bounds[1:], strict=False)
    return tuple("\n".join(lines[start:stop]) for start, stop in pairs if stop > start)


def count_targets(batch: Batch) -> int:
    """Return the number of target tokens of a batch."""
    return int((batch["targets"] != IGNORED).sum())
