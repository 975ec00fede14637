"""Lightning's progress bar with short names and figures."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lit_ort._compat.lightning import training_bar


class OneLineProgressBar(TQDMProgressBar):
    """Lightning's bar with short names and figures, to fit into a hundred columns: `loss=6.77, ppl=873, ms=180`.

    The line of an epoch stays when the epoch ends.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=True)
        self._is_in_epoch = False

    def init_train_tqdm(self) -> Tqdm:
        """Return the epoch's bar.

        The first epoch uses the bar that Lightning opens before it, which would otherwise stay as an empty line. After
        a sanity check that bar is a disabled one, which is replaced.
        """
        bar = training_bar(self)
        is_open = bar is not None and not bar.disable and bar.total is None
        return bar if is_open else super().init_train_tqdm()

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer, *_)
        self._is_in_epoch = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A resumed run ends an epoch that it has not begun.
        if self._is_in_epoch:
            super().on_train_epoch_end(trainer, pl_module)
        self._is_in_epoch = False

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The metrics by short name; Lightning's version number is left out."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {short_name(name): short_figure(value) for name, value in metrics.items()}


def short_name(name: str) -> str:
    """The short name of a metric.

    `train/loss` becomes "loss", `speed/step_ms` "ms", `speed/tokens_per_s` "tokens/s" and `val/ppl` "val_ppl".
    """
    group, _, rest = name.partition("/")
    if group == "speed":
        return "ms" if rest == "step_ms" else rest.replace("_per_s", "/s")
    return rest if group == "train" and rest else name.replace("/", "_")


def short_figure(value: Any) -> Any:
    """A number with three significant digits, or with all digits of the integer part if those are more."""
    if not isinstance(value, float):
        return value
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
