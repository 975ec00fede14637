"""Rules for values of a configuration, where Lightning and torch would fail late or not at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lit_ort_tasks.errors import require

# The largest seed of NumPy's random generator, which Lightning seeds too.
LARGEST_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule for one value. Values that a configuration lacks are not checked.

    Args:
        key: in the configuration.
        requirement: completes "must be ...".
        is_valid: whether a value satisfies it.
        optional: whether null is allowed.
    """

    key: str
    requirement: str
    is_valid: Callable[[Any], bool]
    optional: bool = True


def is_number(value: Any) -> bool:
    """Whether a value is a finite number and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least(least: float) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and value >= least


def _whole_from(least: int) -> Callable[[Any], bool]:
    return lambda value: is_whole(value) and value >= least


def _above_zero(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_share_or_count(value: Any) -> bool:
    return is_number(value) and (value >= 0 if is_whole(value) else 0 <= value <= 1)


def _is_interval(value: Any) -> bool:
    return isinstance(value, str) or (is_number(value) and (value >= 1 if is_whole(value) else 0 < value <= 1))


_A_SHARE = "a share of the batches from 0.0 to 1.0, or a whole number of them, or null for all"
RULES = (
    Rule("seed", f"a whole number from 0 to {LARGEST_SEED}", lambda v: is_whole(v) and 0 <= v <= LARGEST_SEED, False),
    Rule("optimizer.lr", "a number above 0", _above_zero, False),
    Rule("optimizer.weight_decay", "a number of at least 0", _at_least(0)),
    Rule("optimizer.eps", "a number of at least 0", _at_least(0)),
    Rule("trainer.accumulate_grad_batches", "a whole number of at least 1", _whole_from(1), False),
    Rule("trainer.log_every_n_steps", "a whole number of at least 1", _whole_from(1), False),
    Rule("trainer.max_epochs", "a whole number of at least 0, or -1 for no limit", _whole_from(-1)),
    Rule("trainer.max_steps", "a whole number of at least 0, or -1 for no limit", _whole_from(-1), False),
    Rule("trainer.gradient_clip_val", "a number of at least 0, or null for no clipping", _at_least(0)),
    Rule("trainer.check_val_every_n_epoch", "a whole number of at least 1, or null", _whole_from(1)),
    Rule("trainer.num_sanity_val_steps", "a whole number of at least 0, or -1 for all", _whole_from(-1)),
    Rule(
        "trainer.val_check_interval",
        "a share of the epoch above 0.0 and up to 1.0, a whole number of batches from 1 on, or null",
        _is_interval,
    ),
    Rule("callbacks.last.train_time_interval", "a number of seconds above 0, or null for none", _above_zero),
    Rule("callbacks.last.every_n_train_steps", "a whole number of at least 1, or null for none", _whole_from(1)),
    Rule("trainer.limit_train_batches", _A_SHARE, _is_share_or_count),
    Rule("trainer.limit_val_batches", _A_SHARE, _is_share_or_count),
    Rule("trainer.limit_test_batches", _A_SHARE, _is_share_or_count),
    Rule(
        "trainer.overfit_batches",
        "a share of the batches from 0.0 to 1.0, or a whole number of them",
        _is_share_or_count,
    ),
)


def require_rules(config: DictConfig) -> None:
    """Checks a composed configuration.

    Raises:
        InputError: names the first value that breaks its rule.
    """
    for rule in RULES:
        value = OmegaConf.select(config, rule.key, default=_ABSENT)
        if value is _ABSENT or (value is None and rule.optional):
            continue
        shown = "null" if value is None else value
        require(rule.is_valid(value), f"{rule.key}={shown}: must be {rule.requirement}.")


def require_visible_gradients(config: DictConfig) -> None:
    """Refuses to detect anomalies where autograd has no gradients.

    Raises:
        InputError: the optimizer is part of the graph.
    """
    require(
        not (config.trainer.detect_anomaly and OmegaConf.select(config, "strategy.optimizer_in_graph", default=False)),
        "trainer.detect_anomaly=true: with strategy.optimizer_in_graph=true gradients stay in the session, where no "
        "anomaly is detected. Set strategy.optimizer_in_graph=false.",
    )


def require_processes(config: DictConfig, environment: Mapping[str, str]) -> None:
    """Checks that torchrun started the number of processes of the configuration.

    Args:
        config: composed.
        environment: the variables of this process, which torchrun sets.

    Raises:
        InputError: torchrun started another number.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    devices, nodes = config.trainer.devices, OmegaConf.select(config, "trainer.num_nodes", default=1)
    started = int(environment["WORLD_SIZE"])
    require(
        not is_whole(devices) or devices * nodes == started,
        f"trainer.devices={devices}: torchrun started {started} processes, and the run has {devices} on each of "
        f"{nodes} machines. Set trainer.devices={environment['LOCAL_WORLD_SIZE']} and a strategy for several processes "
        "(strategy=ort_ddp), or start it without torchrun.",
    )


_ABSENT = object()
