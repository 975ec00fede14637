"""The language model: shapes, causality, one graph, logged values, and the errors of invalid sizes."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything
from lit_ort_tasks.data.text import TextData, WikiText2
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.transformer_lm import PositionalEncoding, TransformerLM
from torch import Tensor

from lit_ort.callbacks import LastCheckpoint

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = 17


def small_task(**sizes: Any) -> TransformerLM:
    values: dict[str, Any] = dict(layers=2, heads=2, width=8, feed_forward=12, dropout=0.0, max_length=16) | sizes
    return TransformerLM(WORDS, **values)


def some_batch(length: int = 5, batch: int = 3) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(WORDS, (length + 1, batch))
    return tokens[:-1], tokens[1:]


@pytest.fixture
def data(tmp_path: Path) -> TextData:
    """7 training batches of [6, 4], the last one shorter, and a few for validation and test."""
    letters = " ".join("abcdefghijklmnop")
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(f"{letters} " * 10)
    return WikiText2(dir=tmp_path, batch_size=4, eval_batch_size=3, bptt=6)


def test_logits_have_a_value_for_each_word() -> None:
    assert small_task()(some_batch()[0]).shape == (5, 3, WORDS)


def test_the_defaults_are_the_tutorials() -> None:
    task = TransformerLM(100)
    layers = list(task.model.encoder.layers)
    assert len(layers) == 2
    assert task.model.width == 200
    assert task.model.decoder.weight.shape == (100, 200)
    assert task.hparams["heads"] == 2
    assert task.hparams["feed_forward"] == 200
    assert task.hparams["dropout"] == 0.2
    optimizer = task.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.defaults["lr"] == 1e-3
    for weight in (task.model.embedding.weight, task.model.decoder.weight):
        assert 0.09 < weight.abs().max().item() <= 0.1
    assert not task.model.decoder.bias.any()


def test_no_position_depends_on_a_later_one() -> None:
    task = small_task().eval()
    inputs, _ = some_batch()
    changed = inputs.clone()
    changed[3:] = (changed[3:] + 1) % WORDS
    before, after = task(inputs), task(changed)
    torch.testing.assert_close(before[:3], after[:3])
    assert not torch.allclose(before[3:], after[3:])


def test_positions_are_sines_and_cosines() -> None:
    encoding = PositionalEncoding(width=6, dropout=0.0, max_length=4)(torch.zeros(3, 2, 6))
    for position in range(3):
        angles = [position / 10000 ** (2 * pair / 6) for pair in range(3)]
        expected = torch.tensor([f(angle) for angle in angles for f in (math.sin, math.cos)])
        for column in range(2):
            torch.testing.assert_close(encoding[position, column], expected)


def test_an_odd_width_has_positions_too() -> None:
    assert PositionalEncoding(width=5, dropout=0.0, max_length=4)(torch.zeros(4, 1, 5)).isfinite().all()


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    task, (inputs, targets) = small_task(), some_batch()
    expected = F.cross_entropy(task(inputs).reshape(15, WORDS), targets.reshape(15))
    torch.testing.assert_close(task.training_step((inputs, targets), 0)["loss"], expected)


def test_the_loss_of_an_untrained_model_is_that_of_a_uniform_distribution() -> None:
    seed_everything(0, verbose=False)
    assert small_task().loss(some_batch()).item() == pytest.approx(math.log(WORDS), rel=0.1)


@pytest.mark.parametrize("step", ["training_step", "validation_step", "test_step"])
def test_a_step_is_one_graph(step: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    task = small_task(dropout=0.1)
    compiled = torch.compile(getattr(task, step), backend=keep, fullgraph=True)
    assert compiled(some_batch(), 0)["loss"].isfinite()
    assert len(graphs) == 1


class LossRecorder(TransformerLM):
    """Records the loss and the number of tokens of each batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[tuple[str, float, int]] = []

    def figures(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        figures = super().figures(batch)
        self.losses.append(("train" if self.training else "val", figures["loss"].item(), batch[1].numel()))
        return figures

    def mean(self, split: str, last: int) -> float:
        parts = [(loss, tokens) for name, loss, tokens in self.losses if name == split][-last:]
        return sum(loss * tokens for loss, tokens in parts) / sum(tokens for _, tokens in parts)


def quiet_trainer(folder: Path, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing="callbacks" in options,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


@pytest.mark.parametrize("accumulated", [1, 2])
def test_logged_losses_are_means_over_tokens(data: TextData, tmp_path: Path, accumulated: int) -> None:
    task = LossRecorder(**data.task_arguments, layers=1, heads=1, width=4, feed_forward=4)
    assert len(data.train_dataloader()) == 7
    every = 4 // accumulated
    trainer = quiet_trainer(tmp_path, max_epochs=1, log_every_n_steps=every, accumulate_grad_batches=accumulated)
    trainer.fit(task, datamodule=data)
    metrics = trainer.callback_metrics
    # Of seven batches, the window after the fourth one has the last three, and the last one is shorter.
    assert metrics["train/loss"].item() == pytest.approx(task.mean("train", last=3), rel=1e-5)
    assert metrics["val/loss"].item() == pytest.approx(task.mean("val", last=1000), rel=1e-5)
    for split in ("train", "val"):
        assert metrics[f"{split}/ppl"].item() == pytest.approx(math.exp(metrics[f"{split}/loss"].item()), rel=1e-5)
    assert task.mean("train", last=3) != pytest.approx(task.mean("train", last=7), rel=1e-5)


def test_a_resumed_run_logs_the_mean_of_the_uninterrupted_one(data: TextData, tmp_path: Path) -> None:
    def logged(**options: Any) -> dict[str, Tensor]:
        seed_everything(1, verbose=False)
        task = TransformerLM(**data.task_arguments, layers=1, heads=1, width=4, feed_forward=4, dropout=0.0)
        # The fourth of seven batches is the last one with a checkpoint.
        last = LastCheckpoint(tmp_path, every_n_train_steps=4, save_on_train_epoch_end=False)
        trainer = quiet_trainer(tmp_path, max_epochs=1, log_every_n_steps=10, callbacks=[last])
        trainer.fit(task, datamodule=data, weights_only=True, **options)
        return trainer.callback_metrics

    whole, path = logged(), tmp_path / "last.ckpt"
    assert logged(ckpt_path=path)["train/loss"] == whole["train/loss"]
    older = torch.load(path, weights_only=True)
    del older["callbacks"]["TrainingMeans"]
    torch.save(older, path)
    assert logged(ckpt_path=path)["train/loss"] != whole["train/loss"]


def test_training_learns(data: TextData, tmp_path: Path) -> None:
    seed_everything(1, verbose=False)
    task = TransformerLM(
        **data.task_arguments,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        layers=1,
        heads=1,
        width=16,
        feed_forward=16,
        dropout=0.0,
    )
    trainer = quiet_trainer(tmp_path, max_epochs=6, log_every_n_steps=7)
    trainer.fit(task, datamodule=data)
    assert trainer.callback_metrics["val/loss"].item() < 0.5 * math.log(17)


def test_the_scheduler_advances_once_an_epoch(data: TextData, tmp_path: Path) -> None:
    task = TransformerLM(
        **data.task_arguments,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        layers=1,
        heads=1,
        width=4,
        feed_forward=4,
    )
    trainer = quiet_trainer(tmp_path, max_epochs=2, log_every_n_steps=7)
    trainer.fit(task, datamodule=data)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "task.layers=0: must be a whole number of at least 1"),
        ({"width": 7}, r"task.width=7: not divisible by task.heads=2.*try task.width=8"),
        ({"heads": "two"}, "task.heads='two': must be a whole number"),
        ({"dropout": 1.0}, "task.dropout=1.0: must be at least 0 and below 1"),
        ({"dropout": "some"}, "task.dropout='some': must be at least 0 and below 1"),
    ],
)
def test_invalid_sizes_are_refused_by_name(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small_task(**sizes)
