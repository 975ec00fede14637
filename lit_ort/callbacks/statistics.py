"""The cost of a training run: time per step, items per second, memory."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_ort.callbacks.resident_memory import MIB, peak_rss_bytes, reset_peak_rss


def first_dimension(batch: Any) -> int:
    """The number of items in a batch: the length of the first dimension of its first tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    for part in inner:
        if count := first_dimension(part):
            return count
    return 0


@dataclass(frozen=True)
class StepSummary:
    """The measurements of a whole run. Medians and mean exclude the first step, which includes the compilation.

    Args:
        steps: the number of training batches.
        first_step_s: seconds from the start of fit to the end of its first batch.
        step_ms_median, step_ms_mean: milliseconds of a batch from on_train_batch_start to on_train_batch_end, without
            data loading, validation and checkpoints.
        items_per_s: the median of a batch's items divided by its time.
        item: the name of the items.
        peak_mib: the peak resident memory of the process during fit; None if the system doesn't report it.
        peak_above_start_mib: the same minus the resident memory at the start of fit.
        started_unix_s: when fit began, as a Unix time.
    """

    steps: int
    first_step_s: float | None
    step_ms_median: float | None
    step_ms_mean: float | None
    items_per_s: float | None
    item: str
    peak_mib: float | None
    peak_above_start_mib: float | None
    started_unix_s: float | None


class StepStatistics(Callback):
    """Measures training steps, and logs medians over the last `window` steps whenever the trainer logs.

    It logs speed/step_ms and speed/<item>_per_s (medians, also in the progress bar), speed/first_step_s (once) and
    memory/peak_mib. It reads clocks and one line of /proc, but no tensor.

    Args:
        window: the number of batches in the logged medians.
        item: the name of the items that `count_items` counts, such as "tokens".
        count_items: returns the number of items in a batch; `first_dimension` counts samples. If several processes have
            different batches, each is assumed to have as many.

    Raises:
        ValueError: `window` is below 1.
    """

    def __init__(
        self, window: int = 50, item: str = "samples", count_items: Callable[[Any], int] = first_dimension
    ) -> None:
        if window < 1:
            raise ValueError(f"window={window}: must be at least 1 batch. Pass such a number, or leave it out.")
        self.window = window
        self.item = item
        self.count_items = count_items
        self._forget()

    def _forget(self) -> None:
        self._steps = 0
        self._step_s = array("d")
        self._rates = array("d")
        self._fit_start_s = 0.0
        self._batch_start_s = 0.0
        self._first_step_s: float | None = None
        self._started_unix_s: float | None = None
        self._start_rss: int | None = None
        self._peak_rss: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # Not in on_fit_start, which comes after the strategy's setup.
        self._forget()
        self._fit_start_s = perf_counter()
        self._started_unix_s = time.time()
        reset_peak_rss()
        self._start_rss = peak_rss_bytes()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch_start_s = perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now_s = perf_counter()
        self._steps += 1
        if self._first_step_s is None:
            self._first_step_s = now_s - self._fit_start_s
            pl_module.log("speed/first_step_s", self._first_step_s, batch_size=1)
        else:
            step_s = now_s - self._batch_start_s
            self._step_s.append(step_s)
            # The number of processes with different batches; the processes of one pipeline have the same ones.
            replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
            self._rates.append(self.count_items(batch) * replicas / step_s)
        # The bar is also updated between the steps of the logger, but rarely, as it takes time. Zero logs no step.
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
        is_logged = every > 0 and trainer.global_step % every == 0
        if self._step_s and (is_logged or self._steps % 10 == 0):
            self._log_window(pl_module)

    def _log_window(self, pl_module: LightningModule) -> None:
        step_ms = median(self._step_s[-self.window :]) * 1e3
        rate = median(self._rates[-self.window :])
        pl_module.log("speed/step_ms", step_ms, prog_bar=True, batch_size=1)
        pl_module.log(f"speed/{self.item}_per_s", rate, prog_bar=True, batch_size=1)
        peak = peak_rss_bytes()
        if peak is not None:
            pl_module.log("memory/peak_mib", peak / MIB, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak_rss = peak_rss_bytes()

    def summary(self) -> StepSummary:
        """The measurements of the last fit."""
        total_s = sum(self._step_s)
        peak, start = self._peak_rss, self._start_rss
        return StepSummary(
            steps=self._steps,
            first_step_s=self._first_step_s,
            step_ms_median=median(self._step_s) * 1e3 if self._step_s else None,
            step_ms_mean=total_s / len(self._step_s) * 1e3 if self._step_s else None,
            items_per_s=median(self._rates) if self._rates else None,
            item=self.item,
            peak_mib=peak / MIB if peak is not None else None,
            peak_above_start_mib=(peak - start) / MIB if peak is not None and start is not None else None,
            started_unix_s=self._started_unix_s,
        )
