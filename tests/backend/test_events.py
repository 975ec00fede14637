"""Graph breaks, recompiles and functions in eager: what is reported of them, and how often."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_ort._compat.dynamo_events import Function, Obstacle
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.events import DISABLED, eager_function_of, graph_break_of, place_of, recompile_of
from lit_ort.backend.explanation import explain
from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.errors import LitOrtWarning
from tests.compare import backend

HERE = __file__


class Notes:
    """Keeps the lines that a compile log reports."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def compiling(self, step: str, seconds: float) -> None:
        """A long compilation, which depends on the machine."""

    def finished(self, step: str, seconds: float) -> None:
        """Likewise."""

    def note(self, line: str) -> None:
        self.lines.append(line)


def watched(**options: Any) -> tuple[ORTBackend, Notes]:
    engine, notes = backend(fallback="warn", **options), Notes()
    engine.compile_log.watch.listener = notes
    return engine, notes


@contextmanager
def step_of(engine: ORTBackend) -> Iterator[None]:
    with dynamo_settings("training_step", strict=False, compile_log=engine.compile_log):
        yield


def line(function: Callable[..., Any], offset: int) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


def printing(x: Tensor) -> Tensor:
    y = x.exp()
    print(end="")
    return (y * 2).sum()


def reading(x: Tensor) -> Tensor:
    total = x.exp().sum()
    scale = total.item()
    return total * 2 + (1 if scale > 0 else 0)


def branching(x: Tensor) -> Tensor:
    total = x.exp().sum()
    if total > 0:
        total = total * 2
    return total


@pytest.mark.parametrize(
    ("step", "offset", "reason", "remedy"),
    [
        (printing, 2, "Dynamo can't trace `print`.", "Print in a hook"),
        (reading, 2, "reads the value of a tensor", "Keep the value a tensor"),
        (branching, 2, "a branch depends on the value of a tensor", "torch.where"),
    ],
)
def test_a_graph_break_is_reported_once(step: Callable[..., Any], offset: int, reason: str, remedy: str) -> None:
    engine, notes = watched()
    compiled = torch.compile(step, backend=engine)
    with step_of(engine):
        for rows in (2, 3, 4):
            compiled(torch.ones(rows, requires_grad=True))
    (graph_break,) = engine.compile_log.breaks
    assert graph_break.place == line(step, offset)
    assert reason in graph_break.reason
    assert graph_break.remedy is not None
    assert remedy in graph_break.remedy
    (noted,) = [text for text in notes.lines if text.startswith("graph break")]
    assert noted == str(graph_break)
    assert noted.startswith(f"graph break in training_step at {line(step, offset)}: ")
    assert "\n" not in noted


def test_a_whole_graph_has_no_break() -> None:
    engine, notes = watched()
    with step_of(engine):
        torch.compile(lambda x: x.exp().sum(), backend=engine)(torch.ones(2, requires_grad=True))
    assert notes.lines == []
    assert engine.compile_log.breaks == []
    assert explain(engine).counts.endswith("no fallback, no graph break")


@torch.compiler.disable
def disabled(x: Tensor) -> Tensor:
    return x * 3


@torch.compiler.disable(reason=DISABLED)
def disabled_by_lit_ort(x: Tensor) -> Tensor:
    return x * 3


@pytest.mark.parametrize("function", [disabled, disabled_by_lit_ort])
def test_a_break_by_design_is_recorded_in_silence(function: Callable[[Tensor], Tensor]) -> None:
    engine, notes = watched()
    with step_of(engine):
        torch.compile(lambda x: function(x.exp()).sum(), backend=engine)(torch.ones(2))
    assert notes.lines == []
    (graph_break,) = engine.compile_log.breaks
    assert graph_break.by_design
    assert ("lit_ort runs" in graph_break.reason) == (function is disabled_by_lit_ort)


def test_an_exception_of_the_step_is_no_break() -> None:
    def failing(x: Tensor, fails: bool) -> Tensor:
        if fails:
            raise KeyError("third batch")
        return x.exp().sum()

    engine, notes = watched()
    compiled = torch.compile(failing, backend=engine)
    with step_of(engine):
        compiled(torch.ones(2), False)
    with pytest.raises(KeyError, match="third batch"), step_of(engine):
        compiled(torch.ones(2), True)
    assert engine.compile_log.breaks == engine.compile_log.eager_functions == []
    assert not any("break" in text for text in notes.lines)


def looping(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x.exp()
        print(end="")
    return x.sum()


def test_a_function_in_eager_is_warned_of_once_at_its_line() -> None:
    engine, _ = watched()
    compiled = torch.compile(looping, backend=engine)
    with pytest.warns(LitOrtWarning, match="looping of training_step runs in eager PyTorch: .*`print`") as caught:
        with step_of(engine):
            assert compiled(torch.zeros(2)) == looping(torch.zeros(2))
    (warning,) = caught
    assert f"{warning.filename}:{warning.lineno}" == line(looping, 3)
    with warnings.catch_warnings(), step_of(engine):
        warnings.simplefilter("error")
        compiled(torch.zeros(2, 2))
    (function,) = engine.compile_log.eager_functions
    explanation = explain(engine)
    assert explanation.summary.startswith("lit_ort: no graph, 1 function in eager PyTorch, no graph break\n")
    assert str(function) in explanation.advice
    assert line(looping, 3) in str(function)


def test_the_rest_of_a_function_in_eager_is_a_line() -> None:
    def opening(x: Tensor) -> Tensor:
        y = x.exp().sum()
        with open(HERE):
            return y * 2

    engine, notes = watched()
    compiled = torch.compile(opening, backend=engine)
    with step_of(engine):
        for rows in (2, 3):
            compiled(torch.zeros(rows))
    (function,) = engine.compile_log.eager_functions
    assert function.name == f"opening from line {opening.__code__.co_firstlineno + 2} on"
    assert notes.lines.count(str(function)) == 1
    assert explain(engine).counts == "2 graphs (2 forward), 1 function in eager PyTorch, 1 graph break"


def test_code_that_cannot_continue_after_a_break() -> None:
    def guarded(x: Tensor) -> Tensor:
        total = x.exp().sum()
        try:
            if total < 0:
                raise ValueError
        except ValueError:
            total = total * 0
        return total * 2

    engine, _ = watched()
    with step_of(engine):
        torch.compile(guarded, backend=engine)(torch.ones(2))
    (graph_break,) = engine.compile_log.breaks
    assert "The rest of the function runs in eager PyTorch." in graph_break.reason


def scaled(x: Tensor, word: str) -> Tensor:
    return x.exp().sum() * len(word)


def test_a_recompile_is_reported_once_and_counted() -> None:
    engine, notes = watched()
    compiled = torch.compile(scaled, backend=engine)
    with step_of(engine):
        for word in ("a", "bb", "ccc", "dddd"):
            compiled(torch.ones(2), word)
    (noted,) = notes.lines
    assert noted.startswith(f"scaled of training_step was compiled again at {line(scaled, 1)}: the guard `word == 'a'`")
    assert "pass it as a tensor" in noted
    (recompile,) = explain(engine).recompiles
    assert recompile.count == 3
    assert "was compiled again 3 times, the last time at" in str(recompile)
    assert "'ccc'" in recompile.reason


def test_a_number_is_compiled_again_once() -> None:
    engine, notes = watched()
    compiled = torch.compile(lambda x, scale: x.exp().sum() * scale, backend=engine)
    with step_of(engine):
        for scale in (1.5, 2.5, 3.5):
            compiled(torch.ones(2), scale)
    (noted,) = notes.lines
    assert noted.endswith("the guard `scale == 1.5` failed.")


def test_other_sizes_are_reported_once() -> None:
    engine, notes = watched()
    compiled = torch.compile(lambda x: x.exp().sum(), backend=engine)
    with step_of(engine):
        for rows in (2, 3, 4, 5):
            compiled(torch.ones(rows))
    (noted,) = notes.lines
    assert "tensor 'x' size mismatch at index 0: expected 2, actual 3." in noted
    explanation = explain(engine)
    assert explanation.recompiles[0].count == 1
    # Nothing is to be changed.
    assert explanation.advice == ()


def test_sizes_that_are_compiled_separately_are_reported_once() -> None:
    engine, notes = watched(dynamic="never")
    compiled = torch.compile(lambda x: x.exp().sum(), backend=engine)
    with step_of(engine):
        for rows in (2, 3, 4, 5):
            compiled(torch.ones(rows))
    own = [text for text in notes.lines if text.startswith("graph was compiled again")]
    assert len(own) == 1
    assert "now [4]" in own[0]


def test_the_code_of_another_backend_is_no_recompile() -> None:
    first, second = watched(), watched()
    for engine, notes in (first, second):
        with step_of(engine):
            torch.compile(scaled, backend=engine)(torch.ones(2), "a")
        assert notes.lines == []
        assert engine.compile_log.recompiles == ()


def test_breaks_without_lightning_are_recorded() -> None:
    engine, notes = watched()
    torch.compile(printing, backend=engine)(torch.ones(2, requires_grad=True))
    (graph_break,) = explain(engine).breaks
    assert graph_break.place == line(printing, 2)
    assert notes.lines == [str(graph_break)]
    assert notes.lines[0].startswith(f"graph break at {line(printing, 2)}: ")


def test_the_place_is_the_users() -> None:
    assert place_of(()) is None
    assert place_of(((torch.__file__, 3),)) is None
    assert place_of(((HERE, 7), (torch.__file__, 3))) == f"{HERE}:7"
    assert place_of((("/project/train.py", 1), (HERE, 7))) == f"{HERE}:7"


def obstacle(explanation: str, *hints: str, kind: str = "some kind", text: str = "") -> Obstacle:
    return Obstacle(kind, explanation, hints, text, ((HERE, 1),))


def test_torchs_words_are_made_readable() -> None:
    own = graph_break_of("training_step", obstacle("Can't do <A at 0x7f12ab>", "Please report an issue.", "Do B"))
    assert own is not None
    assert (own.reason, own.remedy) == ("Can't do <A>.", "Do B.")
    function = Function("training_step", HERE, 3, continues=True)
    guard = "not ___dict_contains('w', ___stack0)   # return 1  # test.py:3 in step"
    recompile = recompile_of("training_step", function, guard, ((HERE, 4),))
    assert recompile is not None
    assert recompile.reason == "the guard `'w' not in (value at the graph break)` failed."
    step = "self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed"
    counter = recompile_of("training_step", function, f"{step} == 0   # if self.global_step", ())
    assert counter is not None
    assert counter.reason == "the guard `self.global_step == 0` failed."
    assert counter.remedy is None
    assert str(recompile).startswith(f"training_step from line 3 on was compiled again at {HERE}:4: ")
    assert recompile_of("training_step", Function("forward", torch.__file__, 3, False), guard, ()) is None
    keys = "tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU), actual DispatchKeySet(CPU, AutogradCPU)"
    assert recompile_of("validation_step", Function("validation_step", HERE, 3, False), keys, ()) is None


def test_what_lit_ort_leaves_untraced_is_named() -> None:
    kind = "Attempted to inline function marked as skipped"
    explanation = "... that the function `Metric.forward` should not be traced."
    own = graph_break_of("training_step", obstacle(explanation, kind=kind, text="/x/torchmetrics/metric.py"))
    assert own is not None
    assert own.by_design
    assert own.reason == "lit_ort runs `Metric.forward` outside of graphs."


@pytest.mark.parametrize(("file", "is_reported"), [("/x/site-packages/packaging/tags.py", False), (HERE, True)])
def test_the_generator_of_a_package_is_no_function_in_eager(file: str, is_reported: bool) -> None:
    obstacle = Obstacle("Attempt to trace generator", "Generators cannot be compiled.", (), "", ())
    event = eager_function_of("training_step", obstacle, Function("tokens", file, 1, continues=False))
    assert (event is not None) == is_reported
