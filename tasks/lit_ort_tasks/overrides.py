"""Overrides of a command line: checks before Hydra composes the configuration, and how values are written."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lit_ort.extras import install_command
from lit_ort_tasks.commands.program import command_line
from lit_ort_tasks.errors import require

# Choices that need an extra, with the extra and a module of it.
EXTRAS = {
    ("export", "onnx"): ("export", "onnxscript"),
    ("export", "training"): ("export", "onnxscript"),
    ("hparams_search", "optuna"): ("optuna", "hydra_plugins.hydra_optuna_sweeper"),
    ("logger", "mlflow"): ("mlflow", "mlflow"),
    ("logger", "wandb"): ("wandb", "wandb"),
}
# Options of Hydra's, which begin with two dashes; all others of a command line are overrides.
_HYDRA_OPTIONS = frozenset(
    {
        *("--help", "--hydra-help", "--version", "--cfg", "--package", "--resolve", "--run", "--multirun", "--info"),
        *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
    }
)


def require_usable(arguments: Sequence[str], conf: Path, name: str) -> None:
    """Checks the overrides of a command line. Hydra reports other errors in it.

    Args:
        arguments: of the command line.
        conf: the folder of the configuration.
        name: of the configuration in it.

    Raises:
        InputError: an option has dashes as in other programs, a group is set to null, a choice needs an extra that is
            not installed, or a key that isn't added with `+` is missing in the configuration; the message has the
            closest key that exists.
    """
    _require_no_dashes(arguments)
    words = [word for word in arguments if "=" in word and not word.startswith("-")]
    try:
        overrides = OverridesParser.create().parse_overrides(words)
    except HydraException:
        return
    groups = [override for override in overrides if (conf / override.key_or_group).is_dir()]
    for group in groups:
        _require_choices(group, conf)
    if len(groups) == len(overrides):
        return
    try:
        config = _composed(conf, name, groups)
    except HydraException:
        return
    known = list(_keys(OmegaConf.to_container(config, resolve=False)))
    for override in overrides:
        key = override.key_or_group
        if override in groups or override.is_add() or key.startswith("hydra") or key in known:
            continue
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        hint = f"Did you mean {close[0]}?" if close else f"`{command_line(name)} --help` shows all keys."
        require(False, f"{key}: no such key in this configuration. {hint} (+{key}=... adds one.)")


def _require_no_dashes(arguments: Sequence[str]) -> None:
    for position, word in enumerate(arguments):
        option, _, value = word.partition("=")
        if not option.startswith("--") or option in _HYDRA_OPTIONS:
            continue
        following = arguments[position + 1 : position + 2]
        given = value or next((other for other in following if not other.startswith("-")), "VALUE")
        key = option.removeprefix("--").replace("-", "_")
        require(False, f"{word}: settings are written without dashes, as NAME=VALUE. Use {key}={given}.")


def _require_choices(group: Override, conf: Path) -> None:
    key = group.key_or_group
    if group.is_delete():
        return
    require(
        group.value() is not None,
        f"{key}=null: a group needs a choice. Leave it out, or delete the group with ~{key}.",
    )
    for choice in _choices(group, conf):
        extra, module = EXTRAS.get((key, choice), ("", ""))
        if module and not _is_installed(module):
            require(False, f"{key}={choice}: needs the {extra} extra. Install it: {install_command(extra)}")


def _choices(group: Override, conf: Path) -> list[str]:
    value = group.value()
    if isinstance(value, Glob):
        return value.filter(sorted(path.stem for path in (conf / group.key_or_group).glob("*.yaml")))
    if group.is_sweep_override():
        return list(group.sweep_string_iterator())
    return [str(part) for part in (value if isinstance(value, list) else [value])]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package isn't there either
        return False


def _composed(conf: Path, name: str, groups: Sequence[Override]) -> DictConfig:
    words = [word for group in groups for word in _first(group, conf)]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        return compose(name, words)


def _first(group: Override, conf: Path) -> list[str]:
    """The override itself, or of a sweep over choices the first one: most keys are in all. A glob can have none."""
    if group.is_sweep_override():
        return [f"{group.get_key_element()}={choice}" for choice in _choices(group, conf)[:1]]
    return [str(group.input_line)]


def override_of(key: str, value: str | os.PathLike[str]) -> str:
    """Return `key=value` for a command line, in quotes where Hydra's grammar would read another value, or none."""
    text = os.fspath(value)
    plain = f"{key}={text}"
    return plain if _is_read_as(plain, text) else f"{key}={QuotedString(text, Quote.single).with_quotes()}"


def _is_read_as(word: str, value: str) -> bool:
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return not override.is_sweep_override() and override.value() == value


def _keys(values: Any, prefix: str = "") -> Iterator[str]:
    """Every key, with dots, down to the values."""
    for name, value in values.items() if isinstance(values, dict) else ():
        yield f"{prefix}{name}"
        yield from _keys(value, f"{prefix}{name}.")
