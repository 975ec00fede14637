"""Runs the step methods of a LightningModule compiled, without changing the module.

Everything here works on both of Lightning's packages, `lightning.pytorch` and `pytorch_lightning`, which have classes
of the same names and no common base.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from lit_ort._compat.lightning import checks_logged_values_at_once
from lit_ort.backend.events import DISABLED
from lit_ort.backend.inspect import CompileLog
from lit_ort.backend.steps import LogRecorder, dynamo_settings, in_place_of
from lit_ort.errors import warn_at

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class CompiledSteps:
    """The step methods of one module, each compiled at its first call.

    Args:
        module: the LightningModule; it is left as it is, but for its `log` during a step.
        backend_of: the Dynamo backend for a step's name.
        strict: raise what keeps a step from being compiled, instead of running it in eager with a warning.
        compile_log: records what is compiled and what is not.
    """

    def __init__(
        self,
        module: Any,
        backend_of: Callable[[str], Callable[..., Any] | str],
        strict: bool,
        compile_log: CompileLog,
    ) -> None:
        self._module = module
        self._backend_of = backend_of
        self._strict = strict
        self._compile_log = compile_log
        self._recorder = LogRecorder()
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._reported: set[str] = set()

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a step; what it logs reaches Lightning after the graph has run, in the same order.

        Raises:
            CaptureError: under `strict`, the step needs a new graph at nearly every call.
        """
        step, compiles = self._compiled.get(name), nullcontext()
        if step is None:
            step = torch.compile(_function(getattr(self._module, name)), backend=self._backend_of(name))
            self._compiled[name], compiles = step, _collection_paused()
        log = self._compile_log
        settings = dynamo_settings(name, self._strict, self._report, log)
        with compiles, log.watch.step(name), settings, self._attached():
            return step(*args, **kwargs)

    def _report(self, place: str | None, message: str) -> None:
        """Warns once of what may apply to many functions of a step."""
        if message not in self._reported:
            self._reported.add(message)
            warn_at(place, message)

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Stands in for those of the module's methods that Dynamo must not follow."""
        module = self._module
        with ExitStack() as stack:
            if checks_logged_values_at_once(module):
                stack.enter_context(in_place_of(module, "log", torch.compiler.disable(module.log, reason=DISABLED)))
            else:
                stack.callback(self._recorder.replay, module)
                stack.enter_context(in_place_of(module, "log", self._recorder.log))
            if not module.automatic_optimization:
                # It runs hooks, none of which belongs into a graph.
                untraced = torch.compiler.disable(module.manual_backward, reason=DISABLED)
                stack.enter_context(in_place_of(module, "manual_backward", untraced))
            yield


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Leaves garbage for as long as the block runs.

    Tracing makes millions of objects that stay; looking for garbage among them again and again takes 0.3 to 0.7 s of a
    transformer's first step of 2 to 3, and finds less than 10 MB.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _function(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step as something that Dynamo compiles: a function, also where it is wrapped or mocked."""
    if isinstance(step, (types.FunctionType, types.MethodType)):
        return step

    def call(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return call
