"""Runs the step methods of a LightningModule compiled, without changing the module.

Everything here works on both of Lightning's packages, `lightning.pytorch` and `pytorch_lightning`, which have classes
of the same names and no common base.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.modules import transformer

from lit_ort.compiler.recurrent import shapes_without_steps
from lit_ort.errors import CaptureError, LitOrtWarning

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Branches of a step on its counters are a handful; a step that needs more graphs than this compiles at every call.
RECOMPILE_LIMIT = 64


class CompiledSteps:
    """The step methods of one module, each compiled at its first call.

    Args:
        module: the LightningModule; it is left as it is, but for its `log` during a step.
        backend_of: the Dynamo backend for a step's name.
        fail_on_recompile_limit: raise when a step was compiled `RECOMPILE_LIMIT` times, instead of running it in eager
            from then on with a warning.
    """

    def __init__(
        self, module: Any, backend_of: Callable[[str], Callable[..., Any] | str], fail_on_recompile_limit: bool
    ) -> None:
        self._module = module
        self._backend_of = backend_of
        self._fail = fail_on_recompile_limit
        self._recorder = LogRecorder()
        self._compiled: dict[str, Callable[..., Any]] = {}

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a step; what it logs reaches Lightning after the graph has run, in the same order.

        Raises:
            CaptureError: under `fail_on_recompile_limit`, the step needs a new graph at nearly every call.
        """
        step = self._compiled.get(name)
        if step is None:
            step = torch.compile(getattr(self._module, name), backend=self._backend_of(name))
            self._compiled[name] = step
        with dynamo_settings(name, self._fail), self._recorder.attached(self._module):
            result = step(*args, **kwargs)
        self._recorder.replay(self._module)
        return result


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

    @contextmanager
    def attached(self, module: Any) -> Iterator[None]:
        own = module.__dict__.get("log")
        self.calls.clear()
        module.__dict__["log"] = self.log
        try:
            yield
        finally:
            if own is None:
                del module.__dict__["log"]
            else:
                module.__dict__["log"] = own

    def replay(self, module: Any) -> None:
        for name, value, args, kwargs in self.calls:
            module.log(name, value, *args, **kwargs)
        self.calls.clear()


@contextmanager
def dynamo_settings(step: str, fail_on_recompile_limit: bool) -> Iterator[None]:
    """Dynamo's settings for a training step, for as long as one runs.

    RNNs are traced rather than skipped; counters that a step looks at may change without another graph; and a step that
    hits the recompile limit is reported by name instead of turning eager behind a log line.
    """
    settings: dict[str, Any] = {
        "allow_rnn": True,
        # The counters behind self.global_step and self.current_epoch are reached through the module.
        "allow_unspec_int_on_nn_module": True,
        "recompile_limit": RECOMPILE_LIMIT,
        "fail_on_recompile_limit_hit": fail_on_recompile_limit,
        # A line in a log is not worth a second graph.
        "ignore_logging_functions": _logging_functions(),
    }
    watch = _RecompileWatch(step, warns=not fail_on_recompile_limit)
    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.addFilter(watch)
    try:
        with (
            torch._dynamo.config.patch(settings),
            patch.object(transformer, "_detect_is_causal_mask", _as_given),
            shapes_without_steps(),
        ):
            yield
    except FailOnRecompileLimitHit as error:
        raise CaptureError(_limit_message(step), remedy=_LIMIT_REMEDY, operator=None) from error
    finally:
        logger.removeFilter(watch)


def _logging_functions() -> set[Callable[..., Any]]:
    """Those of a logger; the last one is the transformers library's, there once that is imported."""
    names = ("debug", "info", "warning", "error", "warning_once")
    return {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}


def _as_given(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """What `nn.Transformer` finds out from a mask's values, at which a graph would break: whether the mask is causal.

    It may go without knowing: the mask is given in any case.
    """
    return is_causal is True


_LIMIT_REMEDY = (
    "Run with TORCH_LOGS=recompiles to see which value changes; pass it as a tensor, or keep it out of the step."
)


def _limit_message(step: str) -> str:
    return f"{step} was compiled {RECOMPILE_LIMIT} times, and each new value of something it reads needs another graph"


class _RecompileWatch(logging.Filter):
    """Turns Dynamo's log line at the recompile limit into one warning that names the step."""

    def __init__(self, step: str, warns: bool) -> None:
        super().__init__()
        self._step = step
        self._warns = warns

    def filter(self, record: logging.LogRecord) -> bool:
        if "_dynamo hit config" not in str(record.msg):
            return True
        if self._warns:
            message = f"{_limit_message(self._step)}; new values run in eager PyTorch from now on. {_LIMIT_REMEDY}"
            warnings.warn(message, LitOrtWarning, stacklevel=2)
        return False
