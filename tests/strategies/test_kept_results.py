"""Steps that keep their results for the end of the epoch, in the module or in a callback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, seed_everything
from torch import Tensor

import lit_ort
from tests.lightning_models import Net, assert_same_weights, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning")


class Keeper(Callback):
    def __init__(self) -> None:
        self.results: list[Any] = []


class Keeping(Net):
    """Keeps what Lightning's steps before version 2 received at the end of an epoch."""

    keeps = True

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[str, list[Any]] = {"train": [], "validate": [], "test": [], "predict": []}
        self.rows, self.means = 0, [0.0]

    def kept(self, stage: str, batch: Any, logits: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, batch[1])
        if self.keeps:
            self.results[stage].append({"loss": loss.detach(), "rows": len(batch[0])})
            self.trainer.callbacks[0].results.append(loss.detach())  # pyright: ignore
            self.rows += len(batch[0])
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.kept("train", batch, self(batch[0]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.kept("validate", batch, self(batch[0])))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.kept("test", batch, self(batch[0])))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.kept("predict", batch, self(batch[0])) + self(batch[0]).softmax(-1)

    def on_train_epoch_end(self) -> None:
        self.means.append(torch.stack([result["loss"] for result in self.results["train"]]).mean().item())
        self.results["train"].clear()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class Plain(Keeping):
    keeps = False

    def on_train_epoch_end(self) -> None:
        pass


def run(kind: type[Keeping], strategy: Any) -> tuple[Any, Keeping]:
    seed_everything(1, verbose=False)
    module, keeper = kind(), Keeper()
    runner = trainer(strategy, callbacks=[keeper])
    runner.fit(module, loader(), loader())
    runner.test(module, loader(), verbose=False)
    runner.predict(module, loader())
    module.results["callback"] = keeper.results
    return runner, module


@pytest.mark.slow
def test_kept_results_need_no_graphs() -> None:
    torch.compiler.reset()
    _, expected = run(Keeping, "auto")
    runner, module = run(Keeping, lit_ort.ORTStrategy(fallback="error"))
    torch.testing.assert_close(module.results, expected.results)
    torch.testing.assert_close(module.means, expected.means)
    assert module.rows == expected.rows
    assert_same_weights(module, expected)
    graphs = [graph.name for graph in lit_ort.explain(runner).graphs]
    torch.compiler.reset()
    without, _ = run(Plain, lit_ort.ORTStrategy(fallback="error"))
    assert graphs == [graph.name for graph in lit_ort.explain(without).graphs]
