"""What Dynamo needs to trace a LightningModule's step: its settings, and a recorder in place of the module's `log`.

Everything here works on both of Lightning's packages, `lightning.pytorch` and `pytorch_lightning`, which have classes
of the same names and no common base.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lit_ort._compat.recurrent import shapes_without_steps
from lit_ort._compat.torch_dynamo import (
    FRAME_LOGGER,
    SCALAR_LOGGER,
    RecompileLimitHit,
    is_recompile_limit,
    is_scalar_advice,
    step_settings,
    suppressed_error,
    unchecked_causal_masks,
)
from lit_ort.errors import CaptureError, LitOrtWarning, first_line_of

# Branches of a step on its counters are a handful; a step that needs more graphs than this compiles at every call.
RECOMPILE_LIMIT = 64


class LogRecorder:
    """Stands in for `LightningModule.log` while Dynamo traces: the method itself raises inside, and leaving it out of
    the graph would cut the step in two at each call.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        keeps_graph = kwargs.get("enable_graph", False)
        if isinstance(value, torch.Tensor) and not keeps_graph:
            value = value.detach()
        self.calls.append((name, value, args, kwargs))

    def replay(self, module: Any) -> None:
        """Logs what was recorded, and forgets it."""
        calls = self.calls.copy()
        self.calls.clear()
        for name, value, args, kwargs in calls:
            module.log(name, value, *args, **kwargs)


@contextmanager
def in_place_of(module: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Sets a method of one module for as long as the block runs."""
    own = module.__dict__.get(name)
    module.__dict__[name] = method
    try:
        yield
    finally:
        if own is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = own


def warn_of_fallback(message: str) -> None:
    """Warns of a part of a step that runs in eager."""
    warnings.warn(message, LitOrtWarning, stacklevel=2)


@contextmanager
def dynamo_settings(step: str, strict: bool, report: Callable[[str], None] = warn_of_fallback) -> Iterator[None]:
    """Dynamo's settings for a training step, for as long as one runs.

    RNNs are traced rather than skipped; counters that a step looks at may change without another graph; and a step that
    hits the recompile limit, or that Dynamo can't trace, is reported by name instead of turning eager behind a log
    line.

    Args:
        step: its name.
        strict: raise what keeps a step from being compiled.
        report: receives the reason where it runs in eager instead.

    Raises:
        CaptureError: under `strict`, the recompile limit.
    """
    watch = _FrameWatch(step, None if strict else report)
    try:
        with (
            _filtered(FRAME_LOGGER, watch.filter),
            # A value that a step looks at costs it one more graph, as `explain` says; the advice would be wrong here.
            _filtered(SCALAR_LOGGER, _is_no_scalar_advice),
            step_settings(RECOMPILE_LIMIT, strict),
            unchecked_causal_masks(),
            shapes_without_steps(),
        ):
            yield
    except RecompileLimitHit as error:
        raise CaptureError(_limit_message(step), remedy=_LIMIT_REMEDY, operator=None) from error


@contextmanager
def _filtered(logger: str, keeps: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    found = logging.getLogger(logger)
    found.addFilter(keeps)
    try:
        yield
    finally:
        found.removeFilter(keeps)


def _is_no_scalar_advice(record: logging.LogRecord) -> bool:
    return not is_scalar_advice(record)


_LIMIT_REMEDY = (
    "Run with TORCH_LOGS=recompiles to see which value changes; pass it as a tensor, or keep it out of the step."
)


def _limit_message(step: str) -> str:
    return f"{step} was compiled {RECOMPILE_LIMIT} times, and each new value of something it reads needs another graph"


class _FrameWatch:
    """Turns Dynamo's log lines of functions that it leaves in eager into one report each that names the step."""

    def __init__(self, step: str, report: Callable[[str], None] | None) -> None:
        self._step = step
        self._report = report

    def filter(self, record: logging.LogRecord) -> bool:
        error = suppressed_error(record)
        if self._report is None:
            return not is_recompile_limit(record)
        if is_recompile_limit(record):
            self._report(f"{_limit_message(self._step)}; new values run in eager PyTorch from now on. {_LIMIT_REMEDY}")
        elif error is not None:
            self._report(
                f"Dynamo can't trace a function of {self._step}, which runs in eager PyTorch: {type(error).__name__}: "
                f"{first_line_of(error)}. Run with TORCH_LOGS=dynamo to see where."
            )
        else:
            return True
        return False
