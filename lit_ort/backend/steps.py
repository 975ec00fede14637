"""Dynamo's settings for tracing a LightningModule's step, and a recorder that replaces the module's `log`.

Both Lightning packages are supported, `lightning.pytorch` and `pytorch_lightning`: their classes have the same names
and no common base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lit_ort._compat.dynamo_events import RECOMPILE_LIMIT as LIMIT_REACHED
from lit_ort._compat.dynamo_events import Function, Obstacle, Stack, listening
from lit_ort._compat.recurrent import shapes_without_steps
from lit_ort._compat.torch_dynamo import RecompileLimitHit, step_settings, unchecked_causal_masks
from lit_ort.backend.events import eager_function_of, graph_break_of, recompile_of
from lit_ort.backend.inspect import CompileLog
from lit_ort.errors import CaptureError, warn_at

# A step has few branches on its counters; one that needs more graphs than this is recompiled at every call.
RECOMPILE_LIMIT = 64


class LogRecorder:
    """Replaces `LightningModule.log` while a step runs.

    Dynamo can't trace that method, and each call of it would break the graph.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        keeps_graph = kwargs.get("enable_graph", False)
        if isinstance(value, torch.Tensor) and not keeps_graph:
            value = value.detach()
        self.calls.append((name, value, args, kwargs))

    def replay(self, module: Any) -> None:
        """Logs the recorded calls, and clears them."""
        calls = self.calls.copy()
        self.calls.clear()
        for name, value, args, kwargs in calls:
            module.log(name, value, *args, **kwargs)


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

    Raises:
        CaptureError: under `strict`, the recompile limit.
    """
    listener = _StepListener(step, strict, report, compile_log)
    try:
        with (
            listening(listener),
            step_settings(RECOMPILE_LIMIT, strict),
            unchecked_causal_masks(),
            shapes_without_steps(),
        ):
            yield
    except RecompileLimitHit as error:
        raise CaptureError(_limit_message(step), remedy=_LIMIT_REMEDY, operator=None) from error


_LIMIT_REMEDY = (
    "Run with TORCH_LOGS=recompiles to see which value changes; pass it as a tensor, or keep it out of the step."
)


def _limit_message(step: str) -> str:
    return f"{step} was compiled {RECOMPILE_LIMIT} times, and each new value of something it reads needs another graph"


class _StepListener:
    """Records Dynamo's events for a step, and reports the code that Dynamo leaves in eager."""

    def __init__(
        self, step: str, strict: bool, report: Callable[[str | None, str], None], compile_log: CompileLog | None
    ) -> None:
        self._step = step
        self._strict = strict
        self._report = report
        self._compile_log = compile_log

    def graph_break(self, obstacle: Obstacle, resumes: bool) -> None:
        graph_break = graph_break_of(self._step, obstacle, resumes)
        if graph_break is not None and self._compile_log is not None:
            self._compile_log.note_break(graph_break)

    def recompiled(self, function: Function, reason: str, stack: Stack) -> None:
        recompile = recompile_of(self._step, function, reason, stack)
        if recompile is not None and self._compile_log is not None:
            self._compile_log.note_recompile(recompile)

    def left_in_eager(self, obstacle: Obstacle, function: Function) -> None:
        if obstacle.kind == LIMIT_REACHED:
            return  # an event of its own
        eager_function = eager_function_of(self._step, obstacle, function)
        if eager_function is None:
            return
        is_new = self._compile_log is None or self._compile_log.note_eager_function(eager_function)
        # The rest of a function may be no more than a print, and its graph break is reported.
        if is_new and not eager_function.is_rest:
            self._report(eager_function.place, eager_function.message)

    def limit_reached(self) -> None:
        if not self._strict:
            message = f"{_limit_message(self._step)}; new values run in eager PyTorch from now on. {_LIMIT_REMEDY}"
            self._report(None, message)
