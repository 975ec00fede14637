"""Models and tokenizers of the Hugging Face library: from folders, from the hub, and back into folders."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from tasks.errors import InputError, require


def hub_answers(timeout_s: float = 5.0) -> bool:
    """Whether the hub can be reached now."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s):
            return True
    except urllib.error.HTTPError:
        return True  # an answer, whatever it says
    except OSError:
        return False


def from_pretrained(loader: Any, name: str | os.PathLike[str], option: str, **settings: Any) -> Any:
    """`loader.from_pretrained(name)`, where `name` is a folder or a model on the hub.

    option: what the user set, for messages.

    Raises InputError if the folder lacks what is needed, or the hub can't be reached or does not know the name.
    """
    looks_local = Path(name).is_absolute() or str(name).startswith(".") or Path(name).is_dir()
    require(
        not looks_local or Path(name).is_dir(),
        f"{option}={name}: no such folder. Give one that save_pretrained wrote, or the name of a model on the hub.",
    )
    # Without an answer the library retries for minutes; offline it still finds what was fetched before.
    offline = not looks_local and not hub_answers()
    try:
        return loader.from_pretrained(name, local_files_only=looks_local or offline, **settings)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        place = "the folder lacks what is needed" if looks_local else "it cannot be fetched"
        hint = "the hub does not answer, and it was not fetched before" if offline else reason
        raise InputError(
            f"{option}={name}: {place}: {hint}. Give a folder that save_pretrained wrote (config.json, "
            "model.safetensors, tokenizer.json), or the name of a model on a hub that can be reached."
        ) from error


class SavePretrained(Callback):
    """Writes model and tokenizer as a folder that `from_pretrained` loads.

    folder: the tokenizer is there from the start of fit on, and the model as it was tested.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            _saver(pl_module).save_tokenizer(self.folder)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            _saver(pl_module).save_pretrained(self.folder)


def _saver(pl_module: LightningModule) -> Any:
    if not hasattr(pl_module, "save_pretrained"):
        raise TypeError(f"{type(pl_module).__name__} has no save_pretrained, so SavePretrained can't serve it.")
    return pl_module
