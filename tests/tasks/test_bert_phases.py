"""BERT's pre-training by its recipe (LAMB, gradient accumulation, ids alone): resumed, and continued in phase 2."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lit_ort_tasks.bert_pretrain import BertPretrain
from lit_ort_tasks.data.batches import IGNORED, Batch
from lit_ort_tasks.data.pretraining_shards import PretrainingShards, write_shard
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.huggingface import load_tokenizer
from lit_ort_tasks.optimization import Schedule
from pytorch_optimizer import Lamb
from torch import Tensor

import lit_ort

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # A resumed run has a separate folder.
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

VOCABULARY, BATCH, MICRO_BATCHES, ACCUMULATED = 50, 4, 5, 2
STEPS_PER_EPOCH, STEPS = 3, 7


def random_batch(length: int) -> Batch:
    labels = torch.full((BATCH, length), IGNORED)
    labels[:, 2:4] = torch.randint(5, VOCABULARY, (BATCH, 2))
    return {
        "input_ids": torch.randint(5, VOCABULARY, (BATCH, length)),
        "token_type_ids": (torch.arange(length) > length // 2).long().expand(BATCH, length),
        "attention_mask": torch.ones(BATCH, length, dtype=torch.int64),
        "labels": labels,
        "next_sentence_label": torch.randint(2, (BATCH,)),
    }


def shards(folder: Path, length: int) -> Path:
    """Two shards of training items, and one for validation and test."""
    folder.mkdir()
    for name, batches in (("a", 2), ("b", MICRO_BATCHES - 2), ("c", 1)):
        write_shard(folder / f"{name}.hdf5", [random_batch(length) for _ in range(batches)], max_predictions=2)
    return folder


def data_of(folder: Path) -> PretrainingShards:
    return PretrainingShards(dir=folder, vocabulary_size=VOCABULARY, batch_size=BATCH, eval_batch_size=BATCH)


class Losses(Callback):
    """Records the loss of each micro-batch and the learning rate of each step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.rates: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.losses.append(outputs["loss"])
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def train(
    folder: Path,
    save_in: Path,
    seed: int,
    steps: int = STEPS,
    pretrained: Path | None = None,
    resume_from: Path | None = None,
) -> tuple[BertPretrain, Losses]:
    """Trains, with a checkpoint after each optimizer step."""
    seed_everything(seed, verbose=False)
    data = data_of(folder)
    task = BertPretrain(
        optimizer=partial(Lamb, lr=1e-2, weight_decay=0.01),
        scheduler=Schedule("polynomial", warmup=0.3, total_steps=STEPS, power=0.5),
        pretrained=pretrained,
        layers=1,
        heads=2,
        width=32,
        positions=20,
        **data.task_arguments,
    )
    losses = Losses()
    every = ModelCheckpoint(save_in, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False)
    trainer = Trainer(
        accelerator="cpu",
        strategy=lit_ort.ORTStrategy(fallback="error"),
        max_epochs=-1,
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=1.0,
        callbacks=[losses, every],
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data, ckpt_path=resume_from, weights_only=True)
    assert trainer.global_step == steps
    return task, losses


@pytest.mark.slow
@pytest.mark.sweep
def test_a_resumed_phase_has_the_losses_and_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    folder = shards(tmp_path / "shards", 12)
    uninterrupted, expected = train(folder, tmp_path / "whole", seed=7)
    # Within an epoch, at its end, and after it.
    for step in (2, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1):
        before = step // STEPS_PER_EPOCH * MICRO_BATCHES + step % STEPS_PER_EPOCH * ACCUMULATED
        checkpoint = tmp_path / "whole" / f"step={step}.ckpt"
        task, losses = train(folder, tmp_path / f"from_{step}", seed=99, resume_from=checkpoint)
        torch.testing.assert_close(torch.stack(losses.losses), torch.stack(expected.losses[before:]), rtol=1e-6, atol=0)
        assert losses.rates == pytest.approx(expected.rates[before:])
        for (name, value), other in zip(task.named_parameters(), uninterrupted.parameters(), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.slow
def test_phase_2_starts_from_phase_1_on_longer_items(tmp_path: Path) -> None:
    one, _ = train(shards(tmp_path / "short", 12), tmp_path / "phase1", seed=7, steps=1)
    checkpoint, longer = tmp_path / "phase1" / "step=1.ckpt", shards(tmp_path / "long", 20)
    initial = BertPretrain(pretrained=checkpoint, **data_of(longer).task_arguments)
    for (name, value), other in zip(initial.model.named_parameters(), one.model.parameters(), strict=True):
        assert torch.equal(value, other), name
    # In the warm-up, the rate of the first step is zero.
    two, _ = train(longer, tmp_path / "phase2", seed=8, steps=2, pretrained=checkpoint)
    for (name, value), other in zip(two.model.named_parameters(), initial.model.parameters(), strict=True):
        assert not torch.equal(value, other), name
    with pytest.raises(InputError, match=r"model\.tokenizer=.*ckpt: contains no tokenizer.*trained on ids alone"):
        load_tokenizer(checkpoint)
