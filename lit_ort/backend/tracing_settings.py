"""Dynamo's settings for tracing a step or a function, and a recorder that replaces the module's `log`.

Both Lightning packages are supported, `lightning.pytorch` and `pytorch_lightning`: their classes have the same names
and no common base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from lit_ort._compat.dynamo_events import listening, traced_in
from lit_ort._compat.lightning import base_with_log, has_own_log, in_hook, is_from_lightning, running_hook
from lit_ort._compat.metric_calls import MetricResult, logged_items, takes_results
from lit_ort._compat.patching import replaced, replaced_entry
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
        module: the LightningModule, or another with these methods.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._log_dict = module, module.log_dict
        self._base = base_with_log(module) if has_own_log(module) else None
        self._records = None if self._base is None else _recording(module, self.log, self._base.log)
        # A name of None: the value is a dict that a metric makes behind the graph, or a collection of metrics.
        # The last element is the hook that calls `log`; manual optimization calls hooks within a step.
        self.calls: list[tuple[str | None, Any, tuple[Any, ...], dict[str, Any], str | None]] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Records the module's calls while the block runs.

        What a `log` of the module's own class does belongs to the step, up to Lightning's, which is replaced there.
        """
        methods = vars(self._module)
        with ExitStack() as stack:
            if self._base is not None and "log" not in methods:
                stack.enter_context(replaced(self._base, "log", self._records))
            else:
                stack.enter_context(replaced_entry(methods, "log", self.log))
                if is_from_lightning(self._module.log_dict):
                    stack.enter_context(replaced_entry(methods, "log_dict", self.log_dict))
            yield

    @takes_results
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, torch.Tensor):
            # The value at the call, which the step may change in place afterwards.
            value = (value if kwargs.get("enable_graph", False) else value.detach()).clone()
        self.calls.append((name, value, args, kwargs, running_hook(self._module)))

    @takes_results
    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(dictionary, MetricResult) and not args:
            self.calls.append((None, dictionary, args, kwargs, running_hook(self._module)))
        else:
            self._log_dict(dictionary, *args, **kwargs)

    def replay(self, log: Callable[..., None]) -> None:
        """Passes the recorded calls on, and clears them."""
        calls = self.calls.copy()
        self.calls.clear()
        for name, value, args, kwargs, hook in calls:
            with in_hook(self._module, hook):
                for key, part in [(name, value)] if name is not None else logged_items(value):
                    # Dynamo returns NumPy's numbers as arrays, which Lightning refuses.
                    number = part[()] if isinstance(part, np.ndarray) and not part.ndim else part
                    log(key, number, *args, **kwargs)


def _recording(module: Any, record: Callable[..., None], log: Callable[..., None]) -> Callable[..., None]:
    """A method of Lightning's class that records the calls of one module."""

    def recording(owner: Any, *args: Any, **kwargs: Any) -> None:
        return record(*args, **kwargs) if owner is module else log(owner, *args, **kwargs)

    return recording


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
