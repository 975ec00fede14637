"""What is told of a compilation that takes long."""

from __future__ import annotations

import copy
import logging
import pickle
import time

import pytest
import torch
from torch import nn

from lit_ort.backend import watch
from lit_ort.backend.inspect import CompileLog
from lit_ort.backend.watch import CompileWatch
from tests.compare import backend


class Heard:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.seconds = 0.0

    def started(self, step: str) -> None:
        self.lines.append(f"started {step}")

    def finished(self, step: str, seconds: float) -> None:
        self.lines.append(f"finished {step}")
        self.seconds = seconds


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    monkeypatch.setattr(watch, "SECONDS", 0.1)
    return Heard()


def test_tells_of_what_takes_long_in_several_parts(heard: Heard) -> None:
    own = CompileWatch()
    own.listener = heard
    with own.step("training_step"):
        for _ in range(2):
            with own.compiling(), own.compiling():
                time.sleep(0.06)
        assert heard.lines == ["started training_step"]
    assert heard.lines == ["started training_step", "finished training_step"]
    assert 0.12 <= heard.seconds < 0.5


def test_says_nothing_of_what_is_short_or_runs(heard: Heard) -> None:
    own = CompileWatch()
    own.listener = heard
    for _ in range(3):
        with own.step("training_step"):
            with own.compiling():
                time.sleep(0.01)
            time.sleep(0.15)
    assert heard.lines == []


def test_hears_dynamo_and_the_backend(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.001)
    engine = backend()
    own = engine.compile_log.watch
    own.listener = heard
    step = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend=engine)
    with own.step("training_step"):
        step(torch.ones(2, 4))
    assert heard.lines == ["started training_step", "finished training_step"]
    with own.step("training_step"):
        step(torch.ones(2, 4))
    assert len(heard.lines) == 2


def test_an_error_ends_it_too(heard: Heard) -> None:
    own = CompileWatch()
    own.listener = heard

    def fail() -> None:
        with own.step("training_step"), own.compiling():
            time.sleep(0.15)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert heard.lines == ["started training_step", "finished training_step"]


def test_logs_by_default(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.0)
    own = CompileWatch()
    with caplog.at_level(logging.INFO, "lit_ort"), own.step("validation_step"), own.compiling():
        time.sleep(0.1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["lit_ort: compiling validation_step ...", "lit_ort: compiled validation_step in 0.1 s"]


def test_a_log_is_copied_and_pickled_without_it() -> None:
    log = CompileLog()
    for other in (copy.deepcopy(log), pickle.loads(pickle.dumps(log))):
        assert other.watch is not log.watch
        assert other.graphs == []
