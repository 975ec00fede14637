"""Models and tokenizers of the transformers library: loaded from folders or the hub, and saved to folders."""

from __future__ import annotations

import os
import pickle
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from lit_ort.checkpoint_io import verify
from lit_ort.distributed.tensor_parallel import is_sharded
from lit_ort.errors import CheckpointError
from lit_ort_tasks.errors import InputError, require, require_heads, require_whole

# Errors of transformers and the libraries below it for missing or damaged files.
_UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    EOFError,
    RecursionError,
    pickle.UnpicklingError,
    SafetensorError,
)
# The key of a Lightning checkpoint for the configuration and the tokenizer.
CHECKPOINT_KEY = "huggingface"


def hub_answers(timeout_s: float = 5.0) -> bool:
    """Whether the hub can be reached now."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s):
            return True
    except urllib.error.HTTPError:
        return True  # any answer
    except OSError:
        return False


def load_dataset(path: str, name: str) -> Any:
    """Return the splits of a dataset of the hub. Without a connection, a copy in the cache is used.

    Raises:
        ImportError: the `datasets` library isn't installed.
        OSError, ValueError: the dataset can't be fetched.
    """
    import datasets
    from datasets import config

    # Without an answer the library retries for half a minute. It is too late for the variable HF_HUB_OFFLINE, which
    # huggingface_hub read when transformers imported it.
    was_offline = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = was_offline or not hub_answers()
    try:
        return datasets.load_dataset(path, name)
    finally:
        config.HF_HUB_OFFLINE = was_offline


def load_model(kind: Any, name: str | os.PathLike[str], **settings: Any) -> Any:
    """Return a model to train, from a folder of `save_pretrained`, a checkpoint of a task, or the hub.

    Args:
        kind: the model class; parts that the source lacks, such as a new head, are random.
        name: the folder, the checkpoint or the name on the hub.
        settings: values that replace those of the source's configuration.

    Raises:
        InputError: the source doesn't exist, can't be read or is of another model, or the hub can't be reached.
    """
    option, name = f"model.pretrained={name}", os.path.expanduser(name)
    if not _is_checkpoint(name):
        # The library returns models in eval mode, which Lightning keeps.
        return _from_pretrained(kind, name, option, **settings).train()
    part = _read_checkpoint(name, option)
    there, here = part[CHECKPOINT_KEY]["config"].get("model_type"), kind.config_class.model_type
    require(
        there == here,
        f"{option}: is of a model of the type {there}, and this task trains one of the type {here}. Give a checkpoint "
        "of such a task.",
    )
    config = kind.config_class.from_dict({**part[CHECKPOINT_KEY]["config"], **settings})
    weights = {key.removeprefix("model."): value for key, value in part["state_dict"].items()}
    try:
        return kind.from_pretrained(None, config=config, state_dict=weights).train()
    except RuntimeError as error:
        raise InputError(
            f"{option}: its weights have other shapes than the model of this run, as with another number of classes. "
            "Give a checkpoint with the same classes, or one of task=bert_pretrain, which has none."
        ) from error


def load_tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a folder, a checkpoint or a name on the hub.

    Raises:
        InputError: there is none, or the hub can't be reached.
    """
    option, name = f"model.tokenizer={name}", os.path.expanduser(name)
    if _is_checkpoint(name):
        part = _read_checkpoint(name, option)[CHECKPOINT_KEY]["tokenizer"]
        require(
            part is not None,
            f"{option}: contains no tokenizer, because its run was trained on ids alone. Set model.tokenizer to the "
            "tokenizer of the ids.",
        )
        return _without_lengths(_tokenizer_of(part))
    tokenizer = _from_pretrained(AutoTokenizer, name, option)
    require(
        isinstance(tokenizer, PreTrainedTokenizerFast),
        f"{option}: has no tokenizer.json, which the `tokenizers` library needs. Give a model with that file.",
    )
    return _without_lengths(tokenizer)


def plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return a copy without truncation and padding, which a tokenizer keeps from its last call."""
    plain: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    return plain


def _without_lengths(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Turns the truncation and the padding of a saved tokenizer off, which would cut and fill texts unasked."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def checkpoint_part(model: Any, tokenizer: PreTrainedTokenizerFast | None) -> dict[str, Any]:
    """Return the plain values that `load_model` and `load_tokenizer` need in a checkpoint besides the weights."""
    if tokenizer is None:
        return {"config": model.config.to_dict(), "tokenizer": None}
    specials = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    text = plain_tokenizer(tokenizer).to_str()
    inputs = list(tokenizer.model_input_names)
    return {
        "config": model.config.to_dict(),
        "tokenizer": {"text": text, "specials": specials, "model_input_names": inputs},
    }


def _tokenizer_of(part: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(part["text"]),
        model_input_names=part["model_input_names"],
        **part["specials"],
    )


def _is_checkpoint(name: str | os.PathLike[str]) -> bool:
    return Path(name).suffix == ".ckpt"


def _read_checkpoint(name: str | os.PathLike[str], option: str) -> dict[str, Any]:
    require(
        Path(name).is_file(), f"{option}: no such file. Give a checkpoint of an earlier run (checkpoints/best.ckpt)."
    )
    try:
        verify(Path(name))
        content = torch.load(name, map_location="cpu", weights_only=True, mmap=True)
    except (CheckpointError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{option}: not a readable checkpoint ({reason}). Give one of a finished run.") from error
    require(
        CHECKPOINT_KEY in content,
        f"{option}: was not written by a task with a Hugging Face model. Give a checkpoint of task=bert_pretrain, or "
        "the huggingface folder of a run.",
    )
    return content


def _from_pretrained(loader: Any, name: str | os.PathLike[str], option: str, **settings: Any) -> Any:
    looks_local = Path(name).is_absolute() or str(name).startswith(".") or Path(name).is_dir()
    require(
        not looks_local or Path(name).is_dir(),
        f"{option}: no such folder. Give a folder of save_pretrained, or the name of a model on the hub.",
    )
    # Without an answer the library retries for minutes; offline it uses its cache.
    offline = not looks_local and not hub_answers()
    try:
        return loader.from_pretrained(
            name, local_files_only=looks_local or offline, trust_remote_code=False, **settings
        )
    except Exception as error:
        if not isinstance(error, _UNREADABLE) and type(error) is not Exception:  # the class of tokenizers' errors
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        failure = "the folder lacks a file" if looks_local else "it cannot be fetched"
        hint = "the hub does not answer, and the cache has no copy" if offline else reason
        raise InputError(
            f"{option}: {failure}: {hint}. Give a folder of save_pretrained (config.json, model.safetensors, "
            "tokenizer.json), or the name of a model on a hub that can be reached."
        ) from error


class HuggingFaceTask(LightningModule):
    """A LightningModule with one model of the library, `model`, and its `tokenizer` (None where data has none)."""

    model: Any
    tokenizer: Any

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[CHECKPOINT_KEY] = checkpoint_part(self.model, self.tokenizer)

    def save_tokenizer(self, folder: Path) -> None:
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def save_pretrained(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Writes a folder from which `from_pretrained` loads model and tokenizer.

        Args:
            weights: of the whole task, where this process has a part of them.
        """
        # The bar for the single file of a small model would stay in the terminal.
        logging.disable_progress_bar()
        prefix = "model."
        state = {name.removeprefix(prefix): w for name, w in (weights or {}).items() if name.startswith(prefix)}
        self.model.save_pretrained(folder, state_dict=state or None)
        self.save_tokenizer(folder)


class SavePretrained(Callback):
    """Writes model and tokenizer to a folder that `from_pretrained` loads.

    Args:
        folder: has the tokenizer from the start of fit, and the tested model after the test.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            _task(pl_module).save_tokenizer(self.folder)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # All processes gather it together.
        weights = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            _task(pl_module).save_pretrained(self.folder, weights if is_sharded(pl_module) else None)


def _task(pl_module: LightningModule) -> HuggingFaceTask:
    if not isinstance(pl_module, HuggingFaceTask):
        raise TypeError(f"SavePretrained needs a HuggingFaceTask, and the module is a {type(pl_module).__name__}.")
    return pl_module


def require_sizes(**sizes: Any) -> None:
    """Checks the sizes of a model and its dropout probability.

    Raises:
        InputError: a size is no whole number of at least 1, the heads don't divide the width, or the dropout is not
            from 0 to 1.
    """
    dropout = sizes.pop("dropout", None)
    require_whole("model", **sizes)
    width, heads = sizes["width"], sizes["heads"]
    require_heads("model", width, heads)
    require(
        dropout is None or (isinstance(dropout, (int, float)) and 0 <= dropout < 1),
        f"model.dropout={dropout!r}: must be at least 0 and below 1. Give a probability, 0 for no dropout.",
    )


def require_vocabulary(largest: int, limit: int, model: Any) -> None:
    """Checks that the model has an embedding for each id.

    Args:
        largest: the largest id of the data.
        limit: the size of the embedding table.
        model: for the message.

    Raises:
        InputError: `largest` is not below `limit`.
    """
    require(
        largest < limit,
        f"The data's tokenizer has the id {largest}, and the model {model} has ids up to {limit - 1}. Use the "
        "tokenizer that belongs to the model (model.tokenizer).",
    )
