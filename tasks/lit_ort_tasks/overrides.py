"""Misspelt keys on the command line, told with the key that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lit_ort_tasks.commands.program import command_line
from lit_ort_tasks.errors import require


def require_known_keys(arguments: Sequence[str], conf: Path, name: str) -> None:
    """Checks the keys that a command line sets, but for those it adds with `+`; what else is wrong Hydra says.

    Args:
        arguments: of the command line.
        conf: the folder of the configuration.
        name: of the configuration in it.

    Raises:
        InputError: names the first key that the configuration lacks, and the closest one that it has.
    """
    words = [word for word in arguments if "=" in word and not word.startswith("-")]
    try:
        overrides = OverridesParser.create().parse_overrides(words)
        groups = [override for override in overrides if (conf / override.key_or_group).is_dir()]
        if len(groups) == len(overrides):
            return
        config = _composed(conf, name, groups)
    except HydraException:
        return
    known = list(_keys(OmegaConf.to_container(config, resolve=False)))
    for override in overrides:
        key = override.key_or_group
        if override in groups or override.is_add() or key.startswith("hydra") or key in known:
            continue
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        meant = f"Did you mean {close[0]}?" if close else f"`{command_line('train')} --help` shows all keys."
        require(False, f"{key}: no such key in this configuration. {meant} (+{key}=... adds one.)")


def _composed(conf: Path, name: str, groups: Sequence[Override]) -> DictConfig:
    # Of a sweep over choices, the first one: most keys are in all.
    words = [_first(group) for group in groups]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        return compose(name, words)


def _first(override: Override) -> str:
    if override.is_sweep_override():
        return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
    return str(override.input_line)


def _keys(values: Any, prefix: str = "") -> Iterator[str]:
    """Every key, with dots, down to the values."""
    for name, value in values.items() if isinstance(values, dict) else ():
        yield f"{prefix}{name}"
        yield from _keys(value, f"{prefix}{name}.")
