"""Records Dynamo's events in a compile log, and reports or refuses the code that Dynamo leaves in eager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lit_ort._compat.dynamo_events import RECOMPILE_LIMIT, Function, Obstacle, Stack
from lit_ort.backend.events import (
    KEEP_OUT,
    eager_function_of,
    graph_break_of,
    is_own,
    is_raised_by_user,
    recompile_of,
)
from lit_ort.backend.explanation import CompileLog
from lit_ort.errors import CaptureError
from lit_ort.runtime.random import rewind
from lit_ort.runtime.report import EagerFunction


class EventRecorder:
    """A listener for Dynamo's events.

    Attributes:
        rewind: sets torch's generator back before a run whose function runs again in eager.

    Args:
        step: the name of the step that is compiled, or None for a function of `torch.compile`.
        strict: raise an error for a function that Dynamo leaves in eager.
        report: receives `file:line`, or None, and the reason why code runs in eager.
        compile_log: records graph breaks, recompiles and functions that run in eager.
    """

    def __init__(
        self,
        step: str | None,
        strict: bool,
        report: Callable[[str | None, str], None],
        compile_log: CompileLog | None,
    ) -> None:
        self._step = step
        self._strict = strict
        self._report = report
        self._compile_log = compile_log
        self._raising: list[EagerFunction] = []

    rewind = staticmethod(rewind)

    def gradient_read(self) -> None:
        if self._compile_log is not None:
            self._compile_log.note_gradient_read(self._step)

    def graph_break(self, obstacle: Obstacle, resumes: bool) -> None:
        if not is_own(obstacle):
            self._note_untraced()
        elif self._compile_log is not None:
            self._compile_log.note_parts(self._step)
        graph_break = graph_break_of(self._step, obstacle, resumes)
        if graph_break is not None and self._compile_log is not None:
            self._compile_log.note_break(graph_break)

    def recompiled(self, function: Function, reason: str, stack: Stack) -> None:
        recompile = recompile_of(self._step, function, reason, stack)
        if recompile is not None and self._compile_log is not None:
            self._compile_log.note_recompile(recompile)

    def left_in_eager(self, obstacle: Obstacle, function: Function) -> None:
        """Records a function that runs in eager; one that raises an exception of the user's, when it has returned.

        Raises:
            CaptureError: under `strict`, for a whole function. What follows a graph break may be no more than a print,
                and its graph break is reported.
        """
        self._note_untraced()
        eager_function = eager_function_of(self._step, obstacle, function)
        if eager_function is None:
            return
        if obstacle.kind == RECOMPILE_LIMIT:
            eager_function = self._with_cause(eager_function)
        if is_raised_by_user(obstacle):
            self._raising.append(eager_function)
        else:
            self._leave(eager_function)

    def returned(self) -> None:
        """Records the functions that raise an exception in Dynamo's view, but returned: their step has.

        Raises:
            CaptureError: as for other functions that run in eager.
        """
        raising, self._raising = self._raising, []
        for eager_function in raising:
            self._leave(eager_function)

    def note_raising(self) -> None:
        """Records the functions that raise an exception in Dynamo's view, without a report or an error."""
        for eager_function in self._raising:
            if self._compile_log is not None:
                self._compile_log.note_eager_function(eager_function)
        self._raising = []

    def _leave(self, eager_function: EagerFunction) -> None:
        if self._strict and not eager_function.is_rest:
            raise CaptureError(
                f"{eager_function.label} can't run through ONNX Runtime ({eager_function.place}): "
                f"{eager_function.reason.rstrip('.')}",
                remedy=eager_function.remedy or "Under fallback='warn' it runs in eager PyTorch.",
            )
        is_new = self._compile_log is None or self._compile_log.note_eager_function(eager_function)
        if is_new and not eager_function.is_rest:
            self._report(eager_function.place, eager_function.message)

    def _with_cause(self, eager_function: EagerFunction) -> EagerFunction:
        """Names the value that a function was compiled again for most often."""
        recompiles = () if self._compile_log is None else self._compile_log.recompiles
        own = [recompile for recompile in recompiles if recompile.name == eager_function.name]
        if not own:
            return eager_function
        most = max(own, key=lambda recompile: recompile.count)
        return dataclasses.replace(eager_function, remedy=f"At {most.place} {most.reason} {KEEP_OUT}")

    def _note_untraced(self) -> None:
        if self._compile_log is not None:
            self._compile_log.note_untraced(self._step)
