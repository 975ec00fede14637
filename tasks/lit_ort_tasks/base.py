"""The base class of the tasks: steps that are tensor code alone, logging in hooks, optimizer and schedule.

A compiler captures a step as one graph if it is tensor code alone. So a step returns its figures, and the hooks average
and log them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from lit_ort._compat.lightning import trainer_of
from lit_ort_tasks.checkpoints import ORIGIN, origin_of, require_same_origin
from lit_ort_tasks.optimization import ScheduleFactory, configure_optimizers, weight_decay_groups

Figures = dict[str, Tensor]


class TrainingMeans(Callback):
    """Averages the figures of training over the items since the last logged step, and logs them.

    A callback, because Lightning calls a module's hook after those of the callbacks that write checkpoints. With the
    sums in its checkpoint a resumed run logs what the uninterrupted one logs.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._written_step = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Task)
        # Lightning passes the loss divided by the number of accumulated batches.
        values = {**outputs, "loss": outputs["loss"] * trainer.accumulate_grad_batches}
        for name, count in pl_module.counts(batch).items():
            self._sums[name] = self._sums.get(name, 0) + values[name].detach() * count
            self._counts[name] = self._counts.get(name, 0) + count
        pl_module.log_means("train", {name: total / self._counts[name] for name, total in self._sums.items()})
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
        step = trainer.global_step
        if step % every == 0 and step != self._written_step:  # Lightning logs this step's values
            self._sums.clear()
            self._counts.clear()
            self._written_step = step

    def state_dict(self) -> dict[str, Any]:
        # As numbers, which are on no device.
        sums = {name: float(total) for name, total in self._sums.items()}
        return {"sums": sums, "counts": dict(self._counts), "written_step": self._written_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sums, self._counts = dict(state_dict["sums"]), dict(state_dict["counts"])
        self._written_step = state_dict["written_step"]


class Task(LightningModule):
    """A LightningModule with `figures`, the scalars of a batch. Training minimizes "loss".

    Attributes:
        headline: the names of the figures by which runs are compared.

    Args:
        optimizer: creates the optimizer from the parameters.
        schedule: creates the learning-rate schedule; None keeps the learning rate.
        decay_all: weight decay applies to every parameter; otherwise to none with fewer than two dimensions (biases,
            norms), as in the BERT and GPT-2 recipes.

    Logs train/<name> (means over the items since the last logged step), and val/<name> and test/<name> (means over the
    whole split), each with the figures of `derived`.
    """

    headline: tuple[str, ...] = ("loss",)

    def __init__(
        self, optimizer: Callable[..., Optimizer], schedule: ScheduleFactory | None, *, decay_all: bool = False
    ) -> None:
        super().__init__()
        self.optimizer_factory = optimizer
        self.schedule_factory = schedule
        self.decay_all = decay_all
        self._training_means = TrainingMeans()
        self._evaluated: dict[str, MeanMetric] = {}

    @abstractmethod
    def figures(self, batch: Any) -> Figures:
        """Return the mean loss of a batch and other means to log; tensor code alone."""

    @abstractmethod
    def counts(self, batch: Any) -> Mapping[str, int]:
        """Return, for each figure of a batch, the number of items of which it is the mean."""

    def loss(self, batch: Any) -> Tensor:
        """The mean loss of a batch, float32[]."""
        return self.figures(batch)["loss"]

    def derived(self, means: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return figures that follow from means, such as the perplexity from the loss."""
        return {}

    def training_step(self, batch: Any, batch_idx: int) -> Figures:
        return self.figures(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Figures:
        return self.figures(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Figures:
        return self.figures(batch)

    def configure_callbacks(self) -> Sequence[Callback]:
        means, callbacks = self._training_means, self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        # Once for a Trainer, which asks again before a test.
        return () if any(callback is means for callback in callbacks) else (means,)

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
        factory = self.optimizer_factory
        return getattr(getattr(factory, "func", factory), "__name__", type(factory).__name__)

    def configure_optimizers(self) -> Any:
        parameters = self.parameters() if self.decay_all else weight_decay_groups(self)
        return configure_optimizers(self, parameters, self.optimizer_factory, self.schedule_factory)

    def _evaluate(self, outputs: Mapping[str, Tensor], batch: Any) -> None:
        for name, count in self.counts(batch).items():
            # Replaces NaN by NaN: other strategies leave NaN out of the mean, and "disable" ignores the weights.
            metric = self._evaluated.setdefault(name, MeanMetric(nan_strategy=math.nan).to(self.device))
            metric.update(outputs[name], weight=count)

    def _log_evaluation(self, split: str) -> None:
        means = {name: metric.compute() for name, metric in self._evaluated.items()}
        self._evaluated.clear()
        self.log_means(split, means)

    def log_means(self, split: str, means: Mapping[str, Tensor]) -> None:
        """Logs the means of a split, and the figures that follow from them."""
        derived = self.derived(means)
        for name, value in means.items():
            in_bar = split == "train" or name != "loss"
            self.log(f"{split}/{name}", value, prog_bar=in_bar, batch_size=1, sync_dist=split != "train")
        for name, value in derived.items():
            self.log(f"{split}/{name}", value, prog_bar=True, batch_size=1, sync_dist=split != "train")


class LanguageModel(Task):
    """A task whose loss is the mean cross entropy of tokens. Also logs the perplexity, exp(loss), as ppl."""

    headline = ("ppl",)

    def derived(self, means: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"ppl": means["loss"].exp()}
