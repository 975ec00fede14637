"""Private interfaces of Dynamo: its settings, and how it says that a function was compiled too often."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import trace_rules
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.modules import transformer

from lit_ort._compat.imports import when_imported
from lit_ort._compat.patching import replaced

# Raised at the recompile limit where `step_settings` asks for it.
RecompileLimitHit: type[Exception] = FailOnRecompileLimitHit
# Logs a line at the limit where it doesn't, and each function that could not be traced.
FRAME_LOGGER = "torch._dynamo.convert_frame"
_LIMIT_LINE = "_dynamo hit config"
# Logs thirteen lines of advice at a process's first `item()` in a step.
SCALAR_LOGGER = "torch._dynamo.variables.tensor"
_SCALAR_LINE = "Graph break from `Tensor.item()`"


def step_settings(recompile_limit: int, strict: bool) -> AbstractContextManager[Any]:
    """Dynamo's settings for a step.

    RNNs are traced rather than skipped, and counters that a step looks at may change without another graph.

    Args:
        recompile_limit: how often one function is compiled.
        strict: raise `RecompileLimitHit` there, and whatever keeps Dynamo from tracing a function, instead of running
            the function in eager.
    """
    settings: dict[str, Any] = {
        "allow_rnn": True,
        # The counters behind self.global_step and self.current_epoch are reached through the module.
        "allow_unspec_int_on_nn_module": True,
        "recompile_limit": recompile_limit,
        "fail_on_recompile_limit_hit": strict,
        "suppress_errors": not strict,
        # A step draws from numpy's generator what it draws in eager, instead of torch's in its place.
        "use_numpy_random_stream": True,
        # A line in a log is not worth a second graph.
        "ignore_logging_functions": _logging_functions(),
    }
    return torch._dynamo.config.patch(settings)


@contextmanager
def traces_told(started: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Calls functions where Dynamo begins to compile something and where it has ended, while the block runs."""

    def start(_: CallbackArgs) -> None:
        started()

    def end(_: CallbackArgs) -> None:
        ended()

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


def leave_untraced(package: str) -> None:
    """Makes Dynamo call a package's functions as they are, where it would follow them; for the whole process."""
    origin = _origin(package)
    if origin is not None and not trace_rules.check_file(origin).skipped:
        trace_rules.add(package)


def hold_constant(module: str, function: str) -> None:
    """Makes Dynamo call a function once while it traces, and take what it returns for a constant of its arguments.

    Args:
        module: that it is in, imported or not yet.
        function: its name.
    """

    def mark() -> None:
        found = getattr(sys.modules[module], function, None)
        if found is not None:
            torch._dynamo.assume_constant_result(found)

    when_imported(module, mark)


def _origin(package: str) -> str | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None else spec.origin


def is_recompile_limit(record: logging.LogRecord) -> bool:
    """Whether a record of `FRAME_LOGGER` says that a function was compiled as often as it may be."""
    return _LIMIT_LINE in str(record.msg)


def suppressed_error(record: logging.LogRecord) -> BaseException | None:
    """What kept Dynamo from tracing a function, of a record of `FRAME_LOGGER`."""
    is_report = record.levelno == logging.WARNING and isinstance(record.exc_info, tuple)
    return record.exc_info[1] if is_report and isinstance(record.exc_info, tuple) else None


def is_scalar_advice(record: logging.LogRecord) -> bool:
    """Whether a record of `SCALAR_LOGGER` says what to set so that `item()` does not cut a graph in two."""
    return str(record.msg).lstrip().startswith(_SCALAR_LINE)


def graphs_by_bucket(enabled: bool) -> AbstractContextManager[Any]:
    """Whether Dynamo cuts graphs where the buckets of a DistributedDataParallel end."""
    return torch._dynamo.config.patch(optimize_ddp=enabled)


def unchecked_causal_masks() -> AbstractContextManager[None]:
    """Keeps `nn.Transformer` from looking at the values of a mask, at which a graph would break."""
    return replaced(transformer, "_detect_is_causal_mask", _as_declared)


def _as_declared(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether a mask is declared to be causal. The layer takes the mask itself in any case."""
    return is_causal is True


def _logging_functions() -> set[Callable[..., Any]]:
    """Those of a logger; the last one is the transformers library's, there once that is imported."""
    names = ("debug", "info", "warning", "error", "warning_once")
    return {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}


def fresh_inductor() -> AbstractContextManager[Any]:
    """Lets inductor compile as on a machine where it never ran."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()
