"""What a training run costs: the time of a step, the items a second, the memory. Imports Lightning and PyTorch alone."""

from __future__ import annotations

import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

MIB = 2**20


def first_dimension(batch: Any) -> int:
    """Items of a batch where the first dimension counts them: the length of the first tensor found in it."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    inner = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    for part in inner:
        if count := first_dimension(part):
            return count
    return 0


@dataclass(frozen=True)
class StepSummary:
    """A whole run's figures. The first step is left out of the medians and the total: it holds the compilation.

    steps: training batches run. first_step_s: from the start of fit to the end of its first batch.
    step_ms_median, step_ms_mean: a batch from on_train_batch_start to on_train_batch_end; no data loading, validation
        or checkpoint is in it. items_per_s: all items over the time of their batches. item: what was counted.
    peak_mib: the most resident memory of the process during fit; peak_above_start_mib: the same less what it held when
        fit began. Both are None where the system does not say.
    started_unix_s: when fit began.
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
    """Measures training steps; logs the last `window` of them whenever the trainer logs, and shows it in the bar.

    window: batches behind the logged median and rate.
    item: the name of what `count_items` counts, such as "tokens".
    count_items: items of a batch; `first_dimension` counts samples.

    Logs speed/step_ms (median), speed/<item>_per_s, speed/first_step_s (once) and memory/peak_mib. Reads clocks and one
    line of /proc, never a tensor.

    Raises ValueError if `window` is below 1.
    """

    def __init__(
        self, window: int = 50, item: str = "samples", count_items: Callable[[Any], int] = first_dimension
    ) -> None:
        if window < 1:
            raise ValueError(f"window={window}: must be at least 1 batch. Give such a number, or leave it out.")
        self.window = window
        self.item = item
        self.count_items = count_items
        self._forget()

    def _forget(self) -> None:
        self._steps = 0
        self._step_s = array("d")
        self._items = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=self.window)
        self._fit_start_s = 0.0
        self._batch_start_s = 0.0
        self._first_step_s: float | None = None
        self._started_unix_s: float | None = None
        self._start_rss: int | None = None
        self._peak_rss: int | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._fit_start_s = time.perf_counter()
        self._started_unix_s = time.time()
        reset_peak_rss()
        self._start_rss = peak_rss_bytes()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch_start_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now_s = time.perf_counter()
        self._steps += 1
        items = self.count_items(batch)
        if self._first_step_s is None:
            self._first_step_s = now_s - self._fit_start_s
            pl_module.log("speed/first_step_s", self._first_step_s, batch_size=1)
        else:
            step_s = now_s - self._batch_start_s
            self._step_s.append(step_s)
            self._items += items
            self._recent.append((step_s, items))
        if trainer.global_step % trainer.log_every_n_steps == 0 and self._recent:
            self._log_window(pl_module)

    def _log_window(self, pl_module: LightningModule) -> None:
        seconds = [step_s for step_s, _ in self._recent]
        rate = sum(items for _, items in self._recent) / sum(seconds)
        pl_module.log("speed/step_ms", median(seconds) * 1e3, prog_bar=True, batch_size=1)
        pl_module.log(f"speed/{self.item}_per_s", rate, prog_bar=True, batch_size=1)
        peak = peak_rss_bytes()
        if peak is not None:
            pl_module.log("memory/peak_mib", peak / MIB, prog_bar=True, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak_rss = peak_rss_bytes()

    def summary(self) -> StepSummary:
        """The figures of the last fit."""
        total_s = sum(self._step_s)
        known = self._peak_rss is not None and self._start_rss is not None
        return StepSummary(
            steps=self._steps,
            first_step_s=self._first_step_s,
            step_ms_median=median(self._step_s) * 1e3 if self._step_s else None,
            step_ms_mean=total_s / len(self._step_s) * 1e3 if self._step_s else None,
            items_per_s=self._items / total_s if self._step_s else None,
            item=self.item,
            peak_mib=self._peak_rss / MIB if self._peak_rss is not None else None,
            peak_above_start_mib=(self._peak_rss - self._start_rss) / MIB if known else None,
            started_unix_s=self._started_unix_s,
        )


def peak_rss_bytes() -> int | None:
    """The most resident memory of this process since its start or `reset_peak_rss`; None where it is not known."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
        return int(line.split()[1]) * 1024 if line else None
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_rss() -> bool:
    """Starts the peak anew at what the process holds now (Linux, proc(5) clear_refs); False where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


__all__ = ["StepStatistics", "StepSummary", "first_dimension", "peak_rss_bytes", "reset_peak_rss"]
