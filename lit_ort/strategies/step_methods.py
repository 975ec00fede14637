"""Compiles and runs the step methods of a LightningModule, which is as before after each call.

Both Lightning packages are supported, `lightning.pytorch` and `pytorch_lightning`: their classes have the same names
and no common base.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from lit_ort._compat.devices import wait_for
from lit_ort._compat.lightning import checks_logged_values_at_once, has_own_log
from lit_ort._compat.patching import replaced_entry
from lit_ort._compat.repeated_logs import RepeatedLogs
from lit_ort.backend.cache.measured_steps import MeasuredStep
from lit_ort.backend.events import DISABLED
from lit_ort.backend.explanation import CompileLog
from lit_ort.backend.tracing_settings import LogRecorder, dynamo_settings
from lit_ort.errors import warn_at
from lit_ort.runtime.random import in_eager
from lit_ort.runtime.report import COMPILED
from lit_ort.strategies.jit import StepChoice, Stopwatch
from lit_ort.strategies.step_draws import StepDraws

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class CompiledSteps:
    """The step methods of one module, each compiled at its first call.

    Args:
        module: the LightningModule. While a step runs, its `log` is replaced (Lightning's own, if the module's class
            has another), and what manual optimization calls.
        backend_of: returns the Dynamo backend for a step's name.
        strict: raise errors that keep a step from being compiled, instead of running it in eager with a warning.
        compile_log: records graphs, graph breaks and recompiles.
        choice_of: returns what chooses the way of a step's calls, by its name and the index of its dataloader; None
            compiles it at its first call.
    """

    def __init__(
        self,
        module: Any,
        backend_of: Callable[[str], Callable[..., Any] | str],
        strict: bool,
        compile_log: CompileLog,
        choice_of: Callable[[str, int], StepChoice] | None = None,
    ) -> None:
        self._module = module
        self._backend_of = backend_of
        self._strict = strict
        self._compile_log = compile_log
        self._recorder = LogRecorder(module)
        self._logs = RepeatedLogs(module)
        self._has_own_log = has_own_log(module)
        # By the step's name and the index of its dataloader: the method, which a hook can replace, and its code.
        self._compiled: dict[tuple[str, tuple[Any, ...]], tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._disabled: dict[tuple[int, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._reported: set[str] = set()
        self._choice_of = choice_of
        self._choices: dict[tuple[str, tuple[Any, ...]], StepChoice] = {}
        self.draws = StepDraws(module)
        self._stopwatch = Stopwatch(lambda: compile_log.watch.total, lambda: wait_for(module.device))

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a step. Its calls of `log` reach Lightning after the step has run, in the same order.

        Raises:
            CaptureError: under `strict`, the step needs a new graph at nearly every call.
        """
        batch_arguments, index = args[:_BEFORE_INDEX], args[_BEFORE_INDEX:]
        if self._choice_of is None:
            return self._run_compiled(name, index, None, *batch_arguments, **kwargs)
        self._stopwatch.stop()
        choice = self._choice(name, index)
        way = choice.next_way()
        with self._stopwatch.timing(choice, way):
            if way == COMPILED:
                return self._run_compiled(name, index, choice.allows_compiling, *batch_arguments, **kwargs)
            return self._run_in_eager(name, choice, *args, **kwargs)

    def lap(self) -> None:
        """What belongs to the latest call, such as its backward, ends here or later."""
        self._stopwatch.lap()

    @property
    def settled_ways(self) -> dict[str, str]:
        """How the steps run whose way is settled."""
        ways = {choice.step: choice.settled_way for choice in self._choices.values()}
        return {step: way for step, way in ways.items() if way is not None}

    @property
    def measured(self) -> dict[str, MeasuredStep]:
        """What steps took that were compiled, and compared with eager."""
        found = {choice.step: choice.measured for choice in self._choices.values()}
        return {step: measured for step, measured in found.items() if measured is not None}

    def stop(self) -> None:
        """Records the latest call."""
        self._stopwatch.stop()

    def _choice(self, name: str, index: tuple[Any, ...]) -> StepChoice:
        assert self._choice_of is not None
        if (name, index) not in self._choices:
            choice = self._choices[name, index] = self._choice_of(name, *index or (0,))
            self._compile_log.choices[choice.step] = lambda: choice.report
        return self._choices[name, index]

    def _run_in_eager(self, name: str, choice: StepChoice, *args: Any, **kwargs: Any) -> Any:
        step = getattr(self._module, name)
        drawing = self.draws.in_eager() if name == "training_step" else nullcontext()
        with drawing, replaced_entry(vars(self._module), "log", self._log):
            output = step(*args, **kwargs)
        if choice.counts_operators:
            choice.note_operators(output)
        return output

    @property
    def _log(self) -> Callable[..., None]:
        """What takes the module's calls of `log`: the module's own method where it has one."""
        return self._module.log if self._has_own_log or "log" in vars(self._module) else self._logs.log

    def _run_compiled(
        self, name: str, index: tuple[Any, ...], allows: Callable[[], bool] | None, *args: Any, **kwargs: Any
    ) -> Any:
        method, compiles = getattr(self._module, name), nullcontext()
        known, step = self._compiled.get((name, index), (None, None))
        if step is None or known != method:
            step = torch.compile(_function(method, index), backend=self._backend_of(name))
            self._compiled[name, index], compiles = (method, step), _collection_paused()
        log = self._compile_log
        drawing = self.draws.compiled(allows) if name == "training_step" else nullcontext(allows)
        draws = in_eager(self._module.device) if log.runs_outside_of_graphs(name) else nullcontext()
        with compiles, log.watch.step(name), drawing as allowed, self._attached(), draws:
            with dynamo_settings(name, self._strict, self._report, log, allowed):
                return step(*args, **kwargs)

    def _report(self, place: str | None, message: str) -> None:
        """Warns once for each message, which can be the same for many functions of a step."""
        if message not in self._reported:
            self._reported.add(message)
            warn_at(place, message)

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Replaces the module's methods that Dynamo must not trace."""
        module = self._module
        with ExitStack() as stack:
            if checks_logged_values_at_once(module):
                log = torch.compiler.disable(module.log, reason=DISABLED)
                stack.enter_context(replaced_entry(vars(module), "log", log))
            else:
                stack.callback(self._recorder.replay, module.log if "log" in vars(module) else self._logs.log)
                stack.enter_context(self._recorder.attached())
            for owner, name in () if module.automatic_optimization else _outside_of_graphs(module):
                stack.enter_context(replaced_entry(vars(owner), name, self._untraced(owner, name)))
            yield

    def _untraced(self, owner: Any, name: str) -> Callable[..., Any]:
        """A method that Dynamo doesn't trace. It takes longer to make than many operators."""
        method = getattr(owner, name)
        # A mock has all attributes by which torch unwraps functions, without an end.
        if not isinstance(method, (types.FunctionType, types.MethodType)):
            return method
        known = self._disabled.get((id(owner), name))
        if known is None or known[0] != method:
            known = self._disabled[id(owner), name] = method, torch.compiler.disable(method, reason=DISABLED)
        return known[1]


def _outside_of_graphs(module: Any) -> Iterator[tuple[Any, str]]:
    """What a step with manual optimization calls that doesn't belong in a graph: hooks, and updates of optimizers.

    Dynamo would trace the update of an optimizer, or fail at Lightning's weak references.
    """
    for name in ("manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients"):
        yield module, name
    for optimizer in module.trainer.optimizers:
        yield optimizer, "zero_grad"
    # The step of an optimizer without Lightning's wrapper ends a graph by itself, and has to stay the optimizer's own.
    wrapped = module.optimizers()
    for optimizer in wrapped if isinstance(wrapped, list) else [wrapped]:
        yield optimizer, "step"
        yield optimizer, "zero_grad"


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Disables garbage collection while the block runs.

    Tracing creates millions of objects that stay. Collections among them take 0.3 to 0.7 s of a transformer's first
    step of 2 to 3 s, and free less than 10 MB.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Lightning passes the batch, its index, and with several dataloaders the dataloader's index.
_BEFORE_INDEX = 2


def _function(step: Callable[..., Any], index: tuple[Any, ...]) -> Callable[..., Any]:
    """A step as a function that Dynamo compiles, also if it is wrapped or mocked.

    Args:
        step: the step.
        index: its last arguments, constants of the graph. Dynamo would make the index of the second dataloader a
            symbolic number, which can't be formatted as in `self.log(f"loss_{dataloader_idx}", ...)`.
    """
    if not index and isinstance(step, (types.FunctionType, types.MethodType)):
        return step

    # Dynamo treats the defaults of functions that are called as constants.
    def with_index(*args: Any, _index: tuple[Any, ...] = index, **kwargs: Any) -> Any:
        return step(*args, *_index, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return with_index(*args, **kwargs)

    return call
