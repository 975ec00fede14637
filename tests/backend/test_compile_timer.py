"""Reports of compilations that take long."""

from __future__ import annotations

import copy
import logging
import pickle
import time

import pytest
import torch
from torch import nn

from lit_ort.backend import compile_timer
from lit_ort.backend.compile_timer import CompileWatch
from lit_ort.backend.explanation import CompileLog
from tests.compare import backend


class Reports:
    """Keeps every report."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.finished_in: list[float] = []
        self.steps: set[str] = set()

    def compiling(self, step: str, seconds: float) -> None:
        self.steps.add(step)
        self.seconds.append(seconds)

    def finished(self, step: str, seconds: float) -> None:
        self.steps.add(step)
        self.finished_in.append(seconds)

    def note(self, line: str) -> None:
        raise AssertionError(line)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    monkeypatch.setattr(compile_timer, "SECONDS", 0.1)
    return Reports()


def watch_of(reports: Reports) -> CompileWatch:
    own = CompileWatch()
    own.listener = reports
    return own


def test_parts_of_a_step_add_up(reports: Reports) -> None:
    own = watch_of(reports)
    with own.step("training_step"):
        for _ in range(2):
            with own.compiling("graph"), own.compiling("graph"):
                time.sleep(0.06)
        assert len(reports.seconds) == 1
        assert reports.finished_in == []
    (seconds,) = reports.finished_in
    assert 0.12 <= seconds < 0.5
    assert reports.steps == {"training_step"}


def test_seconds_are_reported_while_they_pass(reports: Reports) -> None:
    own = watch_of(reports)
    with own.step("training_step"), own.compiling("graph"):
        time.sleep(0.35)
    assert len(reports.seconds) in (2, 3)
    assert reports.seconds == sorted(reports.seconds)
    assert reports.seconds[0] >= 0.1
    assert reports.seconds[-1] > 0.15
    time.sleep(0.15)
    assert len(reports.seconds) in (2, 3)
    assert reports.finished_in[0] >= reports.seconds[-1]


def test_short_compilations_and_runs_are_not_reported(reports: Reports) -> None:
    own = watch_of(reports)
    for _ in range(3):
        with own.step("training_step"):
            with own.compiling("graph"):
                time.sleep(0.01)
            time.sleep(0.15)
    assert reports.steps == set()


def test_dynamo_and_the_backend_count(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_timer, "SECONDS", 0.001)
    engine = backend()
    own = engine.compile_log.watch
    own.listener = reports
    step = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend=engine)
    with own.step("training_step"):
        step(torch.ones(2, 4))
    assert reports.steps == {"training_step"}
    assert len(reports.finished_in) == 1
    with own.step("training_step"):
        step(torch.ones(2, 4))
    assert len(reports.finished_in) == 1


def test_each_compilation_outside_of_steps_is_reported(reports: Reports) -> None:
    own = watch_of(reports)
    for _ in range(2):
        with own.compiling("graph"):
            time.sleep(0.15)
    assert reports.steps == {"graph"}
    assert len(reports.finished_in) == 2


def test_an_error_ends_a_compilation_too(reports: Reports) -> None:
    own = watch_of(reports)

    def fail() -> None:
        with own.step("training_step"), own.compiling("graph"):
            time.sleep(0.15)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(reports.seconds) == 1
    assert len(reports.finished_in) == 1


def test_one_line_is_logged_by_default(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compile_timer, "SECONDS", 0.05)
    own = CompileWatch()
    with caplog.at_level(logging.INFO, "lit_ort"), own.step("validation_step"), own.compiling("graph"):
        time.sleep(0.2)
    assert [record.getMessage() for record in caplog.records] == ["lit_ort: compiling validation_step ..."]


def test_a_log_is_copied_and_pickled_without_its_watch() -> None:
    log = CompileLog()
    for other in (copy.deepcopy(log), pickle.loads(pickle.dumps(log))):
        assert other.watch is not log.watch
        assert other.graphs == []
