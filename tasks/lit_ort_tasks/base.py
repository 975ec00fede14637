"""What every task does alike: steps of tensor code alone, logging in the hooks, optimizer and schedule.

A compiler captures a step as one graph when it is tensor code alone, so a step returns its figures and the hooks
average and log them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from lit_ort._compat.lightning import trainer_of
from lit_ort_tasks.checkpoints import ORIGIN, origin_of, require_same_origin
from lit_ort_tasks.optimization import ScheduleFactory, configure_optimizers, weight_decay_groups

Figures = dict[str, Tensor]


class Task(LightningModule):
    """A LightningModule with `figures`, the scalars of a batch; "loss" is the one that is trained on.

    headline: the figures by which runs are compared.
    optimizer: makes the optimizer from the parameters.
    schedule: makes the learning-rate schedule; None keeps the rate.
    decay_all: weight decay reaches every parameter; otherwise none of those with fewer than two dimensions (biases,
        norms), as the BERT and GPT-2 recipes have it.

    Logs train/<name> (means over what was counted since the last logged step), and val/<name>, test/<name> (means over
    the whole split), with what `derived` adds.
    """

    headline: tuple[str, ...] = ("loss",)

    def __init__(
        self, optimizer: Callable[..., Optimizer], schedule: ScheduleFactory | None, *, decay_all: bool = False
    ) -> None:
        super().__init__()
        self.optimizer_factory = optimizer
        self.schedule_factory = schedule
        self.decay_all = decay_all
        self._window: dict[str, Any] = {}
        self._window_counts: dict[str, int] = {}
        self._written_step = 0
        self._evaluated: dict[str, MeanMetric] = {}

    @abstractmethod
    def figures(self, batch: Any) -> Figures:
        """The mean loss of a batch, and other means to log; tensor code alone."""

    @abstractmethod
    def counts(self, batch: Any) -> Mapping[str, int]:
        """For each figure of a batch, how many items it is the mean of."""

    def loss(self, batch: Any) -> Tensor:
        """The mean loss of a batch, float32[]."""
        return self.figures(batch)["loss"]

    def derived(self, means: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Figures that follow from means, such as the perplexity from the loss."""
        return {}

    def training_step(self, batch: Any, batch_idx: int) -> Figures:
        return self.figures(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Figures:
        return self.figures(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Figures:
        return self.figures(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning hands the loss over divided by the batches that are accumulated.
        values = {**outputs, "loss": outputs["loss"] * self.trainer.accumulate_grad_batches}
        for name, count in self.counts(batch).items():
            self._window[name] = self._window.get(name, 0) + values[name].detach() * count
            self._window_counts[name] = self._window_counts.get(name, 0) + count
        means = {name: total / self._window_counts[name] for name, total in self._window.items()}
        self._log("train", means, shown=True)
        every = self.trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
        step = self.trainer.global_step
        if step % every == 0 and step != self._written_step:  # Lightning writes this step's values
            self._window.clear()
            self._window_counts.clear()
            self._written_step = step

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(outputs, batch)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(outputs, batch)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[ORIGIN] = origin_of(self, self._optimizer_name())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = trainer_of(self)
        if trainer is not None and trainer.state.fn == "fit":
            require_same_origin(self, self._optimizer_name(), checkpoint, is_whole=trainer.world_size == 1)

    def _optimizer_name(self) -> str:
        made = self.optimizer_factory
        return getattr(getattr(made, "func", made), "__name__", type(made).__name__)

    def configure_optimizers(self) -> Any:
        parameters = self.parameters() if self.decay_all else weight_decay_groups(self)
        return configure_optimizers(self, parameters, self.optimizer_factory, self.schedule_factory)

    def _evaluate(self, outputs: Mapping[str, Tensor], batch: Any) -> None:
        for name, count in self.counts(batch).items():
            # NaN takes the place of NaN: a mean over the rest would hide it, and "disable" leaves the weights out.
            metric = self._evaluated.setdefault(name, MeanMetric(nan_strategy=math.nan).to(self.device))
            metric.update(outputs[name], weight=count)

    def _log_evaluation(self, split: str) -> None:
        means = {name: metric.compute() for name, metric in self._evaluated.items()}
        self._evaluated.clear()
        self._log(split, means, shown=False)

    def _log(self, split: str, means: Mapping[str, Tensor], shown: bool) -> None:
        derived = self.derived(means)
        for name, value in means.items():
            bar = shown or name != "loss"
            self.log(f"{split}/{name}", value, prog_bar=bar, batch_size=1, sync_dist=split != "train")
        for name, value in derived.items():
            self.log(f"{split}/{name}", value, prog_bar=True, batch_size=1, sync_dist=split != "train")


class LanguageModel(Task):
    """A task whose loss is the mean cross entropy of tokens; logs the perplexity, exp(loss), as ppl beside it."""

    headline = ("ppl",)

    def derived(self, means: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"ppl": means["loss"].exp()}
