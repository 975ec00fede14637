"""When a step is compiled: it begins in eager and is timed, as in just-in-time compilers, and compiled where that pays.

What is left of the run, times the gain that is expected of each call, has to be worth twice the time that compiling is
expected to take.
Then both ways run in turns, and the faster one stays.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch

from lit_ort._compat.torch_fx import tree_leaves
from lit_ort.backend.cache.measured_steps import MeasuredStep
from lit_ort.runtime.report import COMPILED, EAGER, Choice

# The calls of each way that are compared.
TURNS = 7
# The calls in eager before the first decision; the first one is not counted, as it allocates memory.
FIRST_CALLS = 3
# Calls behind a median: the latest.
WINDOW = 1000

# Seconds that compiling takes: at least, and for each operator of the forward. Measured with the zoo's 44 models: 0.6
# to 11 s for 27 to 475 operators.
_SECONDS, _SECONDS_PER_OPERATOR = 0.8, 0.012
# What the first graph of a process takes more, for modules that are imported and functions that are first called.
_SECONDS_OF_FIRST = 1.0
_FIRST_IMPORTED = "lit_ort.backend.build"
# What is expected to be won back has to be so many times the expected seconds: models of libraries took up to 3.5 times
# as long as expected, where graphs break, and gained 0.6 of what was expected.
_TIMES = 2.0
# Reading graphs from `cache_dir` takes this share of compiling them: 0.4 to 0.7 for models of the zoo, as Dynamo traces
# the step in any case. What was measured counts for calls that take up to so many times as long, or as short.
_READING, _ALIKE, _CLEARLY_SLOWER = 0.6, 2.0, 1.1
# The share of a step's time that compiling gains: operators of this many seconds, forward and backward, gain nothing,
# as calling them takes most of their time; long ones gain the most.
_SHORT_OPERATOR, _LONG_OPERATOR, _MOST_GAIN = 30e-6, 150e-6, 0.25
# Operators by module without children, where a step has no gradient by which they could be counted.
_OPERATORS_PER_MODULE = 2
# The forward's share of a step's time.
_FORWARD = 1 / 3


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What compiling a step is expected to take and to gain.

    Args:
        seconds: of compiling.
        gain: the share of each call's time.
        is_measured: whether both were measured in an earlier run.
    """

    seconds: float
    gain: float
    is_measured: bool = False


def estimate_of(operators: int, seconds: float, has_backward: bool) -> Estimate:
    """Estimates from the size of a step.

    Args:
        operators: the number of operators in the forward.
        seconds: of a call in eager.
        has_backward: whether the call includes a backward.
    """
    each = seconds / max(operators, 1) / (1 if has_backward else _FORWARD)
    gain = _MOST_GAIN * (each - _SHORT_OPERATOR) / (_LONG_OPERATOR - _SHORT_OPERATOR)
    first = 0.0 if _FIRST_IMPORTED in sys.modules else _SECONDS_OF_FIRST
    return Estimate(first + _SECONDS + _SECONDS_PER_OPERATOR * operators, min(max(gain, 0.0), _MOST_GAIN))


def operators_behind(output: Any, limit: int = 20_000) -> int:
    """The number of operators with a gradient that computed the tensors of a step's output, up to a limit."""
    found: set[Any] = set()
    waiting = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    while waiting and len(found) < limit:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting.extend(behind for behind, _ in node.next_functions)
    return len(found)


def operators_in(module: torch.nn.Module) -> int:
    """An estimate of the number of operators in a module's forward."""
    return _OPERATORS_PER_MODULE * sum(not any(part.children()) for part in module.modules())


def _is_telling(before: MeasuredStep, seconds: float) -> bool:
    """Whether an earlier run had calls like those of now.

    A narrow loss is measured anew: what was slower on a busy machine would stay in eager for ever.
    """
    is_narrow = before.eager <= before.compiled < _CLEARLY_SLOWER * before.eager
    return 1 / _ALIKE < seconds / before.eager < _ALIKE and not is_narrow


# The call after the turns.
_SETTLED = 2 * TURNS + 1


class StepChoice:
    """Chooses for each call of one step whether it runs in eager or compiled.

    Args:
        step: its name, also an attribute.
        calls_left: returns the number of calls that are left, or None if that is unknown.
        operators: an estimate of the operators in its forward; the first gradient corrects it.
        agreed: returns one decision for all processes from that of this one.
        decided: the way of all calls and why, if that is decided already.
        has_code: whether an earlier fit found the step to be faster compiled, and left its code.
        measured: what the step took in an earlier run, whose graphs are in `cache_dir`.
    """

    def __init__(
        self,
        step: str,
        calls_left: Callable[[], float | None],
        operators: int,
        agreed: Callable[[bool], bool] = bool,
        decided: tuple[str, str] | None = None,
        has_code: bool = False,
        measured: MeasuredStep | None = None,
    ) -> None:
        self.step = step
        self._measured_before = measured
        self._calls_left = calls_left
        self._operators = operators
        self._agreed = agreed
        self._has_backward = False
        self._borrows = has_code and decided is None
        if self._borrows:
            decided = COMPILED, "it was faster in an earlier fit, whose code it uses"
        self._way, self._reason = (None, None) if decided is None else decided
        # Calls since the first compilation, in turns at first.
        self._turn = 0 if decided is None else _SETTLED
        # The medians of the turns.
        self._compared: tuple[float, float] | None = None
        self._calls = {EAGER: 0, COMPILED: 0}
        self._seconds: dict[str, deque[float]] = {way: deque(maxlen=WINDOW) for way in (EAGER, COMPILED)}
        self._compile_seconds = self._latest_compilation = self._usual = 0.0
        self._compilations = self._declined = self._since_compilation = 0
        self._is_declining = False

    def next_way(self) -> str:
        """The way of the next call."""
        if self._way is None and self._is_worth_compiling():
            self._way, self._turn = COMPILED, 0
            # What was timed before is not compared: it was timed alone.
            self._usual = median(self._seconds[EAGER])
            self._seconds[EAGER].clear()
        if self._way is None:
            return EAGER
        if self._turn + 1 == _SETTLED:
            self._way = COMPILED if self._agreed(self._is_faster_compiled()) else EAGER
        self._turn += 1
        return self._way if self._turn >= _SETTLED else (EAGER, COMPILED)[self._turn % 2]

    @property
    def settled_way(self) -> str | None:
        """The way of all calls that follow, or None while that is open."""
        return self._way if self._turn >= _SETTLED else None

    @property
    def is_measuring(self) -> bool:
        """Whether the time of a call decides about the calls that follow, so that it has to include all of its work."""
        return self.settled_way is None and (self._turn > 0 or self._calls[EAGER] <= FIRST_CALLS)

    def _is_faster_compiled(self) -> bool:
        """Whether the calls that neither compiled code nor ran in part in eager were faster than those in eager."""
        eager, compiled = (self._seconds[way] for way in (EAGER, COMPILED))
        if not compiled:
            return False
        self._compared = median(eager), median(compiled)
        return self._compared[1] <= self._compared[0]

    def _is_worth_compiling(self) -> bool:
        calls = self._calls[EAGER]
        # Later, calls are left to make it worth if their number is unknown, or if they take longer than the first.
        if calls < FIRST_CALLS or (calls > FIRST_CALLS and calls & (calls - 1)):
            return False
        estimate = self.estimate
        gain = self._left() * median(self._seconds[EAGER]) * estimate.gain
        return self._agreed(gain > 0 and gain >= (1 if estimate.is_measured else _TIMES) * estimate.seconds)

    def _left(self) -> float:
        """The calls that are left; as many as there were if that is unknown."""
        left = self._calls_left()
        return sum(self._calls.values()) if left is None else left

    @property
    def estimate(self) -> Estimate:
        """What compiling is expected to take and to gain, after the first calls."""
        seconds, before = median(self._seconds[EAGER]), self._measured_before
        if before is not None and _is_telling(before, seconds):
            reading = before.compiling * (1 if before.from_cache else _READING)
            return Estimate(reading, max(0.0, 1 - before.compiled / before.eager), is_measured=True)
        return estimate_of(self._operators, seconds, self._has_backward)

    @property
    def measured(self) -> MeasuredStep | None:
        """What the step took, if it was compiled in this run and both ways were compared."""
        if self._compared is None or not self._compile_seconds:
            return None
        return MeasuredStep(*self._compared, self._compile_seconds, from_cache=False)

    def allows_compiling(self) -> bool:
        """Whether Dynamo compiles in the current call what it has no code for. Otherwise that runs in eager.

        Code that is compiled again takes as long as at first, for the calls of its kind that are left. The code of an
        earlier fit that is not for this module is no reason to compile.
        """
        if self._borrows:
            self._borrows, self._way, self._reason, self._turn = False, None, None, 0
            self._is_declining = True
        if not self._since_compilation or self._is_declining:
            return not self._is_declining
        share = (self._declined + 1) / (self._since_compilation + 1)
        seconds = self._seconds[EAGER] or self._seconds[COMPILED]
        gain = max(self._gain(), _MOST_GAIN / 2) * (median(seconds) if seconds else 0.0)
        self._is_declining = self._left() * share * gain < self._latest_compilation * 2 ** (self._compilations - 1)
        return not self._is_declining

    def _gain(self) -> float:
        """The share of a call's time that compiling gains, as far as it was measured."""
        return 0.0 if self._compared is None else 1 - self._compared[1] / self._compared[0]

    def note_operators(self, output: Any) -> None:
        """Counts the operators of a step from its output."""
        if counted := operators_behind(output):
            self._operators, self._has_backward = counted, True

    @property
    def counts_operators(self) -> bool:
        """Whether the next call in eager is the one whose operators are counted."""
        return self._calls[EAGER] == 1

    def add(self, way: str, seconds: float, compiling: float) -> None:
        """Records a call.

        Args:
            way: how it ran.
            seconds: of the call and its backward.
            compiling: of that, seconds in which code was compiled.
        """
        is_first = not self._calls[way]
        self._calls[way] += 1
        declined, self._is_declining = self._is_declining, False
        if way == EAGER:
            if not is_first:
                self._seconds[EAGER].append(seconds)
        elif declined and not self._compilations:
            pass
        elif compiling or is_first:
            self._latest_compilation = max(seconds - self._usual, compiling)
            if self._borrows and not compiling:
                self._borrows = False
                # What other sizes would take.
                self._latest_compilation = estimate_of(self._operators, seconds, self._has_backward).seconds
            else:
                self._compile_seconds += self._latest_compilation
            self._compilations += 1
            self._declined, self._since_compilation = 0, 1
        else:
            self._since_compilation += 1
            self._declined += declined
            if not declined:
                self._seconds[COMPILED].append(seconds)

    @property
    def report(self) -> Choice:
        """What was chosen and measured so far."""
        eager, compiled = self._compared or (median(seconds) if seconds else None for seconds in self._seconds.values())
        has_estimate = self._way is None and bool(self._seconds[EAGER])
        reason, before = self._reason, self._measured_before
        if has_estimate and before is not None and self.estimate.is_measured and not self.estimate.gain:
            reason = (
                f"an earlier run measured {before.eager * 1e3:.1f} ms a call, and {before.compiled * 1e3:.1f} compiled"
            )
        return Choice(
            self.step,
            way=self._way or EAGER,
            calls=(self._calls[EAGER], self._calls[COMPILED]),
            seconds=(eager, compiled),
            compile_seconds=self._compile_seconds,
            estimate=(self.estimate.seconds, self.estimate.gain) if has_estimate else None,
            reason=reason,
        )


class Stopwatch:
    """Times the calls of steps, whose backward follows outside of the step.

    Args:
        compiled_seconds: returns the seconds of compiling so far.
        wait: waits for the device. It is called only where times are compared, since it keeps the next step from being
            prepared meanwhile.
    """

    def __init__(self, compiled_seconds: Callable[[], float], wait: Callable[[], None]) -> None:
        self._compiled_seconds, self._wait = compiled_seconds, wait
        self._current: tuple[StepChoice, str, float, float] | None = None
        self._end = 0.0

    @contextmanager
    def timing(self, choice: StepChoice, way: str) -> Iterator[None]:
        """Times a call; one that raises doesn't count."""
        self._current = None
        if choice.is_measuring:
            self._wait()
        start, compiled = perf_counter(), self._compiled_seconds()
        yield
        self._current = choice, way, start, compiled
        self.lap()

    def lap(self) -> None:
        """The latest call ends here, or later."""
        if self._current is not None and self._current[0].is_measuring:
            self._wait()
        self._end = perf_counter()

    def stop(self) -> None:
        """Records the latest call."""
        if self._current is not None:
            choice, way, start, compiled = self._current
            self._current = None
            choice.add(way, self._end - start, self._compiled_seconds() - compiled)
