"""The task of the pipeline tutorial: its size, its stages, and two ranks compared with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.pipeline_lm import PipelineLM
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lit_ort import ORTPipelineStrategy
from tests.lightning_models import trainer
from tests.ranks import run_on_ranks

WORDS, LENGTH, COLUMNS = 50, 12, 10


def test_the_sizes_of_the_tutorial_have_its_number_of_parameters() -> None:
    """The tutorial states it, for WikiText-2 with 28,782 words."""
    task = PipelineLM(28_782, layers=12, heads=16, width=4096, feed_forward=4096)
    with torch.device("meta"):
        task.configure_model()
    assert sum(parameter.numel() for parameter in task.parameters()) == 1_444_261_998


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"stages": 1}, "task.stages=1: a pipeline has two or more"),
        ({"stages": 3}, "task.layers=4: not divisible by task.stages=3"),
        ({"heads": 3}, "task.width=256: not divisible by task.heads=3"),
        ({"layers": 0}, "layers=0"),
    ],
)
def test_invalid_sizes_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PipelineLM(WORDS, **sizes)


class Recorded(PipelineLM):
    def __init__(self) -> None:
        super().__init__(WORDS, width=16, heads=2, feed_forward=32, dropout=0.0)
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(outputs["loss"].item())


def text() -> DataLoader[Any]:
    tokens = torch.randint(WORDS, (5, LENGTH + 1, COLUMNS), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=None)


def trained(strategy: Any, devices: int) -> tuple[list[float], dict[str, Tensor]]:
    seed_everything(1, verbose=False)
    task = Recorded()
    run = trainer(strategy, devices=devices, gradient_clip_val=0.5)
    run.fit(task, text(), text())
    return task.losses, run.strategy.lightning_module_state_dict()


def on_two_ranks() -> tuple[list[float], dict[str, Tensor]]:
    assert dist.is_torchelastic_launched()
    return trained(ORTPipelineStrategy(micro_batches=4, fallback="error"), 2)


@pytest.mark.sweep
def test_two_ranks_have_the_losses_of_one_process() -> None:
    losses, weights = run_on_ranks(on_two_ranks, 2)[0]
    expected_losses, expected = trained("auto", 1)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, value in expected.items():
        assert float((weights[name] - value).norm()) <= 1e-5 * float(value.norm().clamp_min(1e-3)), name
