"""Canaries of the hooks in Dynamo that report graph breaks, recompiles and functions left in eager."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_ort._compat import dynamo_events
from lit_ort._compat.dynamo_events import Function, Obstacle, Stack
from lit_ort.backend.events import KINDS
from tests.compare import SINCE_2_15
from tests.compat.canary import canary

EVENTS = "dynamo_events"
HERE = __file__


def listening_if(listens: bool) -> AbstractContextManager[Any]:
    return dynamo_events.listening(Listener()) if listens else nullcontext()


class Listener:
    """Keeps every event, except for reads of gradients."""

    def __init__(self) -> None:
        self.breaks: list[tuple[Obstacle, bool]] = []
        self.eager: list[tuple[Obstacle, Function]] = []
        self.recompiles: list[tuple[Function, str, Stack]] = []

    def rewind(self) -> None: ...

    def gradient_read(self) -> None:
        pass

    def graph_break(self, obstacle: Obstacle, resumes: bool) -> None:
        self.breaks.append((obstacle, resumes))

    def left_in_eager(self, obstacle: Obstacle, function: Function) -> None:
        self.eager.append((obstacle, function))

    def recompiled(self, function: Function, reason: str, stack: Stack) -> None:
        self.recompiles.append((function, reason, stack))


def printing(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    print(end="")
    return y * 2


def printing_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
        print(end="")
    return x


def scaled(x: torch.Tensor, word: str) -> torch.Tensor:
    return x * len(word)


def test_log_graph_break() -> None:
    effect = "graph breaks are not reported"
    with canary("InstructionTranslatorBase.log_graph_break", EVENTS, effect):
        listener = Listener()
        with dynamo_events.listening(listener):
            torch.compile(printing, backend="eager")(torch.ones(2))
        ((obstacle, resumes),) = listener.breaks
        assert resumes
        assert obstacle.kind == "Failed to trace builtin operator"
        assert "`print`" in obstacle.explanation
        assert obstacle.hints
        assert obstacle.stack[-1] == (HERE, printing.__code__.co_firstlineno + 2)
        assert not listener.eager


def test_format_error_msg() -> None:
    effect = "a function that Dynamo leaves in eager is not reported"
    with canary("torch._dynamo.convert_frame.format_error_msg", EVENTS, effect):
        listener = Listener()
        with dynamo_events.listening(listener):
            torch.compile(printing_in_a_loop, backend="eager")(torch.ones(2))
        ((obstacle, function),) = listener.eager
        assert function == Function("printing_in_a_loop", HERE, printing_in_a_loop.__code__.co_firstlineno, False)
        assert obstacle.kind == "Failed to trace builtin operator"
        assert not listener.breaks


def test_recompilation_reasons() -> None:
    effect = "recompiles are not reported, or those of another backend are"
    symbol = "torch._dynamo.convert_frame.get_and_maybe_log_recompilation_reasons"
    with canary(symbol, EVENTS, effect):
        listener = Listener()
        first = torch.compile(scaled, backend="eager", dynamic=False)
        with dynamo_events.listening(listener):
            first(torch.ones(2), "a")
            torch.compile(scaled, backend="aot_eager", dynamic=False)(torch.ones(2), "b")
            assert not listener.recompiles
            first(torch.ones(2), "b")
        ((function, reason, stack),) = listener.recompiles
        assert function.name == "scaled"
        assert "word" in reason
        assert "'a'" in reason
        assert stack[-1] == (HERE, function.line + 1)


def test_code_after_a_graph_break() -> None:
    effect = "messages name torch's functions for the code after a graph break"
    with canary("torch_dynamo_resume_in_..._at_...", EVENTS, effect):
        listener = Listener()
        step = torch.compile(printing, backend="eager", dynamic=False)
        with dynamo_events.listening(listener):
            step(torch.ones(2))
            step(torch.ones(2, 2))
        assert listener.recompiles[-1][0] == Function("printing", HERE, printing.__code__.co_firstlineno + 2, True)


def test_obstacle_without_explanation() -> None:
    """The context names the operator."""
    effect = "the reason of a graph break is empty"
    with canary("the message of an operator without a fake kernel", EVENTS, effect):
        listener = Listener()
        step = torch.compile(lambda x: torch.geqrf(x)[0] + 1, backend="eager", dynamic=True)
        with dynamo_events.listening(listener):
            step(torch.ones(3, 4))
        assert ["geqrf" in obstacle.explanation for obstacle, _ in listener.breaks] == [True]


def test_recompile_limit() -> None:
    effect = "the recompile limit is passed in silence"
    with canary("the log line of torch._dynamo.convert_frame at the limit", EVENTS, effect):
        listener = Listener()
        step = torch.compile(scaled, backend="eager", dynamic=False)
        with dynamo_events.listening(listener), torch._dynamo.config.patch(recompile_limit=2):
            for count in range(3):
                step(torch.ones(2), "x" * count)
        assert [obstacle.kind for obstacle, _ in listener.eager] == [dynamo_events.RECOMPILE_LIMIT]


def test_warnings_about_builtins(monkeypatch: pytest.MonkeyPatch) -> None:
    effect = "torch warns in several lines of what lit_ort reports in one"
    with canary("torch._dynamo.utils.warn_once", EVENTS, effect):
        for listens in (False, True):
            monkeypatch.setattr("torch._dynamo.utils.warn_once_cache", set())
            torch.compiler.reset()
            with warnings.catch_warnings(record=True) as caught, listening_if(listens):
                warnings.simplefilter("always")
                torch.compile(lambda x: x * time.time(), backend="eager")(torch.ones(2))
            # Since torch 2.15 it doesn't warn.
            assert len(caught) == (0 if listens or SINCE_2_15 else 1)


@pytest.mark.parametrize("options", [None, {"engine": "stock"}])
def test_trace_in_context(options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = torch._dynamo.convert_frame.CatchErrorsWrapper
    monkeypatch.setattr(wrapper, "__call__", wrapper.__call__)
    effect = "torch.compile(backend='ort') reports no graph breaks, and doesn't trace RNNs"
    with canary("torch._dynamo.convert_frame.CatchErrorsWrapper or torch._TorchCompileWrapper", EVENTS, effect):
        listener, calls = Listener(), []

        def backend(graph_module: Any, _: Any, **arguments: Any) -> Any:
            return graph_module.forward

        def context_of(compiler: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[Any] | None:
            calls.append((compiler, arguments))
            return dynamo_events.listening(listener) if compiler is backend else None

        dynamo_events.trace_in_context(context_of)
        torch.compile(printing, backend=backend, options=options)(torch.ones(2))
        assert len(listener.breaks) == 1
        expected = {} if options is None else {"options": options}
        assert calls
        assert all(call == (backend, expected) for call in calls)
        calls.clear()
        with dynamo_events.listening(Listener()):
            torch.compile(printing, backend=backend)(torch.ones(2, 2))
        assert len(listener.breaks) == 1


def test_a_branch_on_a_value() -> None:
    effect = "the reason of a graph break at a branch is torch's own text"
    with canary("torch's name of data-dependent branches", EVENTS, effect):
        listener = Listener()
        with dynamo_events.listening(listener):
            weight = torch.ones(2, requires_grad=True)
            torch.compile(lambda x: x * 2 if x.sum() > 0 else x, backend="eager")(weight)
        assert [obstacle.kind for obstacle, _ in listener.breaks] == [dynamo_events.BRANCH]


def test_kinds_of_obstacles() -> None:
    effect = "reports of graph breaks are torch's own, without a remedy"
    with canary("torch/_dynamo/graph_break_registry.json", EVENTS, effect):
        registry = json.loads((Path(torch.__file__).parent / "_dynamo" / "graph_break_registry.json").read_text())
        known = {entry["Gb_type"] for entries in registry.values() for entry in entries}
        assert known >= {*KINDS, dynamo_events.RECOMPILE_LIMIT, dynamo_events.BRANCH}


def test_log_lines_are_kept_back_while_there_is_a_listener() -> None:
    logger = logging.getLogger("torch._dynamo.convert_frame")
    record = logging.LogRecord(logger.name, logging.WARNING, HERE, 1, "torch._dynamo hit config.%s", None, None)
    with dynamo_events.listening(Listener()):
        assert not logger.filter(record)
    assert logger.filter(record)
