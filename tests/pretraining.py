"""Text whose every token says where it is from, and what the tests of both kinds of pre-training data compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lit_ort_tasks.data.batches import Batch
from lit_ort_tasks.data.loaders import EpochBatches
from lit_ort_tasks.data.pretraining_batches import PretrainingData
from lit_ort_tasks.data.tokenization import BERT_SPECIALS
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

DOCUMENTS, LENGTH = 80, 32
PAD, UNKNOWN, START, SEPARATOR, MASK = range(5)
KEYS = ("input_ids", "token_type_ids", "attention_mask", "labels", "next_sentence_label")


def sentence_lengths() -> list[list[int]]:
    """Tokens of each sentence of each document: documents of 1 to 14 sentences, some longer than an item."""
    random = np.random.default_rng(0)
    documents = [random.integers(2, 9, random.integers(2, 15)).tolist() for _ in range(DOCUMENTS)]
    documents[3] = [5]
    documents[4] = [50]
    documents[5] = [3, 60, 4, 45]
    return documents


# The text's words are w5, w6, ... in their order, and the tokenizer's ids are the same numbers: an id says where in the
# text its token is. This is the document of each id.
DOCUMENT_OF = np.repeat(
    np.arange(-1, DOCUMENTS), [len(BERT_SPECIALS), *(sum(lengths) for lengths in sentence_lengths())]
)


def write_text(path: Path) -> Path:
    word = len(BERT_SPECIALS)
    documents: list[str] = []
    for lengths in sentence_lengths():
        lines: list[str] = []
        for length in lengths:
            lines.append(" ".join(f"w{number}" for number in range(word, word + length)))
            word += length
        documents.append("\n".join(lines))
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


def write_tokenizer(folder: Path, **specials: str) -> Path:
    words = [*BERT_SPECIALS, *(f"w{number}" for number in range(len(BERT_SPECIALS), len(DOCUMENT_OF)))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    specials = specials or dict(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    given = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", **specials)
    given.save_pretrained(folder)
    return folder


def epoch_of(data: PretrainingData, epoch: int) -> list[Batch]:
    loader = data.train_dataloader()
    assert isinstance(loader.sampler, EpochBatches)
    loader.sampler.set_epoch(epoch)
    return list(loader)


def joined(batches: list[Batch]) -> dict[str, np.ndarray]:
    return {key: torch.cat([batch[key] for batch in batches]).numpy() for key in KEYS}


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys() == set(KEYS)
        assert all(torch.equal(one[key], other[key]) for key in KEYS)


class Recorder(LightningModule):
    """Keeps the batches that the Trainer gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained: dict[int, list[Batch]] = {}
        self.validated: dict[int, list[Batch]] = {}

    def training_step(self, batch: Batch) -> Tensor:
        self.trained.setdefault(self.current_epoch, []).append(batch)
        return self.weight * 1.0

    def validation_step(self, batch: Batch) -> None:
        self.validated.setdefault(self.current_epoch, []).append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAlways(Callback):
    """Writes a checkpoint after each batch, each validation and each epoch, named by the batches so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, trainer: Trainer, moment: str) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step:03}_{moment}.ckpt", weights_only=False)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.save(trainer, "batch")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer, "epoch")


def fit(data: PretrainingData, limits: dict[str, int], save_in: Path, resume_from: Path | None = None) -> Recorder:
    recorder = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SaveAlways(save_in)],
        **limits,  # pyright: ignore[reportArgumentType]
    )
    trainer.fit(recorder, datamodule=data, ckpt_path=resume_from, weights_only=True)
    return recorder


# What may end training after two epochs of three batches, or cut its epochs short.
ENDS = (dict(max_epochs=2), dict(max_epochs=-1, max_steps=6), dict(max_epochs=2, limit_train_batches=2))


def check_resuming(make: Callable[[], PretrainingData], folder: Path, limits: dict[str, int]) -> None:
    """From every checkpoint that Lightning can write, the batches go on as they did; so from those of such a run."""
    epochs = [epoch_of(make(), epoch) for epoch in range(2)]
    assert [len(epoch) for epoch in epochs] == [3, 3]
    assert not torch.equal(epochs[0][0]["input_ids"], epochs[1][0]["input_ids"])
    given = limits.get("limit_train_batches", 3)
    batches = [batch for epoch in epochs for batch in epoch[:given]]
    whole = fit(make(), limits, folder / "whole")
    for epoch in range(2):
        assert_same(whole.trained[epoch], epochs[epoch][:given])
        assert_same(whole.validated[epoch], list(make().val_dataloader()))

    def check(checkpoint: Path, save_in: Path) -> None:
        resumed = fit(make(), limits, save_in, checkpoint)
        rest = [batch for epoch in sorted(resumed.trained) for batch in resumed.trained[epoch]]
        assert_same(rest, batches[int(checkpoint.name[:3]) :])

    checkpoints = sorted((folder / "whole").glob("*.ckpt"))
    assert len(checkpoints) == len(batches) + 4
    for checkpoint in checkpoints:
        check(checkpoint, folder / checkpoint.stem)
    for checkpoint in sorted((folder / f"{given:03}_epoch").glob("*.ckpt")):
        check(checkpoint, folder / "again")
