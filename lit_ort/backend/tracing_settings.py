"""Dynamo's settings for tracing a step or a function, and a recorder that replaces the module's `log`.

Both Lightning packages are supported, `lightning.pytorch` and `pytorch_lightning`: their classes have the same names
and no common base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from lit_ort._compat.dynamo_events import listening, traced_in
from lit_ort._compat.metric_calls import MetricResult, takes_results
from lit_ort._compat.recurrent_shapes import shapes_without_steps
from lit_ort._compat.torch_dynamo import step_settings, trace_corrections, tracing_settings
from lit_ort.backend.explanation import CompileLog
from lit_ort.backend.recorder import EventRecorder
from lit_ort.errors import warn_at

# A step has few branches on its counters; one that needs more graphs than this is recompiled at every call.
RECOMPILE_LIMIT = 64


class LogRecorder:
    """Replaces `LightningModule.log` and `log_dict` while a step runs.

    Dynamo can't trace `log`, and each call of it would break the graph.

    Args:
        log_dict: the module's, which calls its `log`.
    """

    def __init__(self, log_dict: Callable[..., None]) -> None:
        self._log_dict = log_dict
        # A name of None: the value is a dict that a metric makes behind the graph.
        self.calls: list[tuple[str | None, Any, tuple[Any, ...], dict[str, Any]]] = []

    @takes_results
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, torch.Tensor):
            # The value at the call, which the step may change in place afterwards.
            value = (value if kwargs.get("enable_graph", False) else value.detach()).clone()
        self.calls.append((name, value, args, kwargs))

    @takes_results
    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(dictionary, MetricResult) and not args:
            self.calls.append((None, dictionary, args, kwargs))
        else:
            self._log_dict(dictionary, *args, **kwargs)

    def replay(self, log: Callable[..., None]) -> None:
        """Passes the recorded calls on, and clears them."""
        calls = self.calls.copy()
        self.calls.clear()
        for name, value, args, kwargs in calls:
            for key, part in [(name, value)] if name is not None else value.items():
                # Dynamo returns NumPy's numbers as arrays, which Lightning refuses.
                number = part[()] if isinstance(part, np.ndarray) and not part.ndim else part
                log(key, number, *args, **kwargs)


@contextmanager
def in_place_of(module: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Sets a method of one module while the block runs."""
    own = module.__dict__.get(name)
    module.__dict__[name] = method
    try:
        yield
    finally:
        if own is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = own


@contextmanager
def dynamo_settings(
    step: str,
    strict: bool,
    report: Callable[[str | None, str], None] = warn_at,
    compile_log: CompileLog | None = None,
    allows_compiling: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Dynamo's settings for a training step, while one runs.

    RNNs are traced rather than skipped; counters that a step reads can change without a recompile; and a step that
    reaches the recompile limit, or that Dynamo can't trace, is reported by name. Dynamo itself only logs that it runs
    such a step in eager.

    Args:
        step: the step's name.
        strict: raise errors that keep a step from being compiled.
        report: receives `file:line`, or None, and the reason why code of the step runs in eager.
        compile_log: records graph breaks, recompiles and functions that run in eager.
        allows_compiling: whether a call of a function is compiled for which there is no code yet, or runs in eager.

    Raises:
        CaptureError: under `strict`, a function that Dynamo leaves in eager, for which the recompile limit is one
            reason.
    """
    recorder = EventRecorder(step, strict, report, compile_log)
    with traced_in(
        lambda: _tracing(recorder, step_settings(RECOMPILE_LIMIT, strict), step, compile_log), allows_compiling
    ):
        yield
    recorder.returned()


@contextmanager
def tracing_for(compile_log: CompileLog, strict: bool) -> Iterator[None]:
    """Dynamo's settings while it traces a function of `torch.compile`, with one warning for each obstacle.

    torch's own settings hold for everything that doesn't depend on the backend, such as the recompile limit.

    Args:
        compile_log: records graph breaks, recompiles and functions that run in eager.
        strict: raise errors that keep a function from being compiled.

    Raises:
        CaptureError: under `strict`, a function that Dynamo leaves in eager.
    """
    recorder = EventRecorder(None, strict, warn_at, compile_log)
    with _tracing(recorder, tracing_settings(strict), "a function", compile_log):
        yield
    # Whether the function returns is not known here.
    recorder.note_raising()


@contextmanager
def _tracing(
    recorder: EventRecorder, settings: AbstractContextManager[Any], name: str, compile_log: CompileLog | None
) -> Iterator[None]:
    watched = nullcontext() if compile_log is None else compile_log.watch.compiling(name)
    with watched, listening(recorder), settings, trace_corrections(), shapes_without_steps():
        yield
