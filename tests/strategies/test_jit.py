"""When steps are compiled: the rule, with times that are given, and fits by it."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lit_ort
import lit_ort.backend.build  # so that no graph is the first of the process
from lit_ort.backend.cache.measured_steps import MeasuredStep, decoded
from lit_ort.errors import OptionsError
from lit_ort.runtime.report import COMPILED, EAGER, Choice
from lit_ort.strategies import jit
from lit_ort.strategies.calls_left import calls_left
from lit_ort.strategies.compiled_code import IDLE
from lit_ort.strategies.jit import FIRST_CALLS, TURNS, Estimate, StepChoice, estimate_of, operators_behind, operators_in
from tests.lightning_models import Net, constant_loader, loader, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]
OPERATORS, LONG = 100, 0.1


class Run:
    """The calls of a step, with given times of both ways."""

    def __init__(self, calls: int | None, seconds: dict[str, float], compiling: float = 2.0, **settings: Any) -> None:
        self.calls, self.seconds, self.compiling = calls, seconds, compiling
        self.ways: list[str] = []
        self.has_code = settings.get("has_code", False)
        self.choice = StepChoice("step", self.left, OPERATORS, **settings)

    def left(self) -> float | None:
        return None if self.calls is None else self.calls - len(self.ways)

    def call(self, is_new: bool = False) -> str:
        """Calls the step. `is_new`: Dynamo has no code for this call."""
        way = self.choice.next_way()
        compiling = 0.0
        is_first = COMPILED not in self.ways and not self.has_code
        if way == COMPILED and (is_new or is_first) and self.choice.allows_compiling():
            compiling = self.compiling
        self.ways.append(way)
        self.choice.add(way, self.seconds[way] + compiling, compiling)
        return "compiling" if compiling else way

    def many(self, calls: int) -> list[str]:
        return [self.call() for _ in range(calls)]


def test_a_short_run_stays_in_eager() -> None:
    run = Run(60, {EAGER: LONG, COMPILED: LONG / 2})
    assert set(run.many(60)) == {EAGER}
    report = run.choice.report
    assert "60 calls are too few for about 2 s" in str(report)
    assert report.calls == (60, 0)


def test_a_long_run_is_compiled_after_the_first_calls_and_compared_in_turns() -> None:
    run = Run(1000, {EAGER: LONG, COMPILED: LONG / 2})
    ways = run.many(1000)
    assert ways[: FIRST_CALLS + 3] == [EAGER] * FIRST_CALLS + ["compiling", EAGER, COMPILED]
    turns = ways[FIRST_CALLS : FIRST_CALLS + 2 * TURNS]
    assert turns.count(EAGER) == TURNS
    assert set(ways[FIRST_CALLS + 2 * TURNS :]) == {COMPILED}
    report = run.choice.report
    compiled = 1000 - FIRST_CALLS - TURNS
    assert report.seconds == (LONG, LONG / 2)
    assert report.saved_seconds == pytest.approx(compiled * LONG / 2 - 2.0)
    assert "50.0 ms a call, 100.0 ms in eager (in turns); compiling took 2.0 s" in str(report)


def test_what_is_slower_compiled_goes_back_to_eager() -> None:
    run = Run(1000, {EAGER: LONG, COMPILED: LONG * 1.02})
    ways = run.many(1000)
    assert set(ways[FIRST_CALLS + 2 * TURNS :]) == {EAGER}
    assert "runs in eager: 100.0 ms a call, 102.0 ms compiled" in str(run.choice.report)


def test_without_a_known_end_it_is_compiled_when_what_has_passed_was_long_enough() -> None:
    run = Run(None, {EAGER: LONG, COMPILED: LONG / 2})
    ways = run.many(300)
    # Twice 2 s of compiling for a gain of a quarter of 0.1 s at each call: after 160 calls, looked at when they have
    # doubled.
    assert ways.index("compiling") == 256


def test_what_an_earlier_run_measured_decides() -> None:
    seconds, measured = {EAGER: LONG, COMPILED: LONG / 2}, MeasuredStep(LONG, LONG / 2, 2.0, from_cache=True)
    # Expected without it: a gain of a quarter, and twice as long a compilation, as the estimates are rough.
    for calls, is_compiled in ((30, False), (50, True)):
        assert (COMPILED in Run(calls, seconds, measured=measured).many(calls)) is is_compiled
        assert COMPILED not in Run(calls, seconds).many(calls)
    slower = MeasuredStep(LONG, LONG * 1.1, 2.0, from_cache=True)
    run = Run(10_000, seconds, measured=slower)
    assert COMPILED not in run.many(10_000)
    assert "an earlier run measured 100.0 ms a call, and 110.0 compiled" in str(run.choice.report)
    # Of other batches.
    assert COMPILED in Run(1000, seconds, measured=MeasuredStep(LONG * 3, LONG * 4, 2.0, from_cache=True)).many(1000)


def test_code_of_an_earlier_fit_runs_at_once_and_other_sizes_have_to_pay() -> None:
    run = Run(20, {EAGER: LONG, COMPILED: LONG / 2}, has_code=True)
    assert set(run.many(10)) == {COMPILED}
    assert run.call(is_new=True) == COMPILED
    assert "an earlier fit" in str(run.choice.report)
    assert run.choice.report.compile_seconds == 0


def test_code_that_is_not_for_this_module_is_left() -> None:
    run = Run(1000, {EAGER: LONG, COMPILED: LONG / 2}, has_code=True)
    assert run.call(is_new=True) == COMPILED
    run.has_code = False
    ways = [run.call(is_new=k == FIRST_CALLS) for k in range(900)]
    assert ways[: FIRST_CALLS + 1] == [EAGER] * FIRST_CALLS + ["compiling"]
    assert ways[-1] == COMPILED
    short = Run(20, {EAGER: LONG, COMPILED: LONG / 2}, has_code=True)
    short.call(is_new=True)
    assert set(short.many(19)) == {EAGER}


def test_short_operators_are_not_compiled_however_long_the_run() -> None:
    run = Run(10**9, {EAGER: OPERATORS * 5e-6, COMPILED: 0.0})
    assert set(run.many(100)) == {EAGER}
    assert "its operators are too short" in str(run.choice.report)


def test_an_estimate_grows_with_the_operators_and_their_time() -> None:
    short, long = estimate_of(100, 0.003, True), estimate_of(100, 0.1, True)
    assert short.gain == 0.0 < long.gain
    assert estimate_of(1000, 1.0, True).seconds > long.seconds
    # A forward is a third of a step.
    assert estimate_of(100, 0.02, False).gain == estimate_of(100, 0.06, True).gain


def test_the_first_graph_of_a_process_is_expected_to_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    later = estimate_of(100, 0.1, True)
    monkeypatch.delitem(sys.modules, "lit_ort.backend.build")
    assert estimate_of(100, 0.1, True).seconds == later.seconds + 1.0


@pytest.mark.parametrize(("every", "left", "expected"), [(20, 200, 1), (20, 4000, 2), (1, 4000, 2)])
def test_rare_sizes_stay_in_eager_unless_many_are_left(every: int, left: int, expected: int) -> None:
    """The last, smaller batch of an epoch, and sizes that always differ."""
    run = Run(FIRST_CALLS + 2 * TURNS + left, {EAGER: LONG, COMPILED: LONG / 2})
    known = False
    compilations = 0
    for k in range(FIRST_CALLS + 2 * TURNS + left):
        done = run.call(is_new=k % every == every - 1 and not known)
        compilations += done == "compiling"
        # The second compilation is for all sizes.
        known = compilations == 2
    assert compilations == expected


def test_values_that_need_another_compilation_at_each_call_are_given_up() -> None:
    run = Run(2000, {EAGER: LONG, COMPILED: LONG / 2})
    ways = [run.call(is_new=True) for _ in range(2000)]
    assert ways.count("compiling") < 6


def test_processes_decide_at_the_same_calls() -> None:
    asked: list[list[int]] = []

    def decisions(seconds: float, answers: Sequence[bool]) -> list[str]:
        calls: list[int] = []
        remaining = list(answers)

        def agreed(_: bool) -> bool:
            calls.append(len(run.ways))
            return remaining.pop(0)

        run = Run(None, {EAGER: seconds, COMPILED: seconds}, agreed=agreed)
        ways = run.many(100)
        asked.append(calls)
        return ["compiled" if way == "compiling" else way for way in ways]

    answers = [False, False, True, False]
    assert decisions(LONG, answers) == decisions(1e-5, answers)
    assert asked[0] == asked[1] == [FIRST_CALLS, 4, 8, 8 + 2 * TURNS]


def test_a_device_is_waited_for_while_times_are_compared() -> None:
    waits: list[str] = []
    choice = StepChoice("training_step", lambda: 1e6, 100)
    stopwatch = jit.Stopwatch(lambda: 0.0, lambda: waits.append("wait"))
    for _ in range(1 + FIRST_CALLS + 2 * TURNS + 50):
        with stopwatch.timing(choice, choice.next_way()):
            sleep(1e-3 if choice.settled_way is None else 0)
        stopwatch.stop()
    assert choice.settled_way is not None
    # Before and after a call, of which the very first one is not counted among the first.
    assert FIRST_CALLS + 2 * TURNS <= len(waits) / 2 <= FIRST_CALLS + 2 * TURNS + 2


def test_operators_are_counted() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    loss = module(torch.randn(2, 3)).sum()
    # Two linear layers, one tanh and one sum; four parameters and two transposed weights.
    assert operators_behind({"loss": loss}) == 10
    assert operators_behind(None) == operators_behind(loss.detach()) == 0
    assert operators_behind(loss, limit=3) == 3
    assert operators_in(module) == 6


def counted(kind: type[Net], counts: list[tuple[str, float | None]]) -> Net:
    """A module whose steps record how many of their calls are left, this one included."""

    class Counting(kind):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            # Lightning has counted the batch that runs.
            counts.append(("training_step", _plus(calls_left(self.trainer, "training_step"))))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                counts.append(("validation_step", calls_left(self.trainer, "validation_step")))
            super().validation_step(batch, batch_idx)

    return Counting()


def _plus(left: float | None) -> float | None:
    return None if left is None else left + 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": 3},
        {"max_epochs": 3, "max_steps": 7},
        {"max_epochs": 3, "limit_train_batches": 2},
        {"max_epochs": -1, "max_steps": 7},
    ],
)
def test_the_training_batches_that_are_left(settings: dict[str, Any], tmp_path: Path) -> None:
    counts: list[tuple[str, float | None]] = []
    trainer("auto", default_root_dir=tmp_path, **settings).fit(counted(Net, counts), loader())
    left = [count for step, count in counts if step == "training_step"]
    assert left == list(range(len(left), 0, -1))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"val_check_interval": 0.5},
        {"check_val_every_n_epoch": 2},
        {"check_val_every_n_epoch": None, "val_check_interval": 9},
    ],
)
def test_the_validation_batches_that_are_left(settings: dict[str, Any], tmp_path: Path) -> None:
    counts: list[tuple[str, float | None]] = []
    batches = loader(rows=48)
    trainer("auto", default_root_dir=tmp_path, max_epochs=4, **settings).fit(counted(Net, counts), batches, batches)
    left = [count for step, count in counts if step == "validation_step"]
    assert len(left) >= len(batches)
    assert left == list(reversed(range(len(left))))


def test_an_unknown_number_of_batches(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(loader().dataset)  # pyright: ignore[reportArgumentType]

    counts: list[tuple[str, float | None]] = []
    stream = DataLoader(Stream(), batch_size=8)
    trainer("auto", default_root_dir=tmp_path, max_epochs=1).fit(counted(Net, counts), stream)
    assert {count for _, count in counts} == {None}


def test_the_time_that_is_left_bounds_the_batches(tmp_path: Path) -> None:
    left: list[float] = []

    class Counting(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            left.append(calls_left(self.trainer, "training_step") or 0.0)

    settings: dict[str, Any] = {"max_epochs": 1000, "max_time": {"seconds": 1}, "accelerator": "cpu"}
    trainer("auto", default_root_dir=tmp_path, **settings).fit(Counting(), loader())
    assert left[-1] < len(left) < 4000


@pytest.mark.parametrize("run", ["test", "predict", "validate"])
def test_batches_that_are_left_of_other_runs(run: str, tmp_path: Path) -> None:
    left: list[float | None] = []

    class Counting(Net):
        def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            left.append(calls_left(self.trainer, "test_step", dataloader_idx))

        def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            left.append(calls_left(self.trainer, "predict_step", dataloader_idx))

        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            left.append(calls_left(self.trainer, "validation_step", dataloader_idx))

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().test_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().predict_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    getattr(trainer("auto", default_root_dir=tmp_path), run)(Counting(), [loader(), loader(rows=16)])
    assert left == [4, 3, 2, 1, 0, 1, 0]


@pytest.fixture
def certain_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling is expected to take no time, and every step to gain by it."""
    monkeypatch.setattr(jit, "estimate_of", lambda *_: Estimate(1e-6, 0.5))


def choices(runner: Any) -> dict[str, Choice]:
    return {choice.step: choice for choice in lit_ort.explain(runner).choices}


def test_a_short_fit_compiles_nothing_and_has_the_losses_of_eager(tmp_path: Path) -> None:
    expected = Net()
    module = copy.deepcopy(expected)
    trainer("auto", default_root_dir=tmp_path, max_epochs=2).fit(expected, loader(), loader())
    runner = trainer(lit_ort.ORTStrategy(compile="auto"), default_root_dir=tmp_path, max_epochs=2)
    runner.fit(module, loader(), loader())
    # Kernels of torch round by where their arguments are in memory.
    assert module.losses == pytest.approx(expected.losses, rel=1e-6)
    assert lit_ort.explain(runner).graphs == ()
    assert {step: choice.way for step, choice in choices(runner).items()} == {
        "training_step": EAGER,
        "validation_step": EAGER,
    }


@pytest.mark.usefixtures("certain_gain")
def test_a_fit_that_is_compiled_on_the_way_has_the_losses_of_eager(tmp_path: Path) -> None:
    expected = Net()
    module = copy.deepcopy(expected)
    # The last batch of an epoch is smaller.
    batches = loader(rows=44)
    trainer("auto", default_root_dir=tmp_path, max_epochs=5).fit(expected, batches, batches)
    runner = trainer(lit_ort.ORTStrategy(compile="auto"), default_root_dir=tmp_path, max_epochs=5)
    runner.fit(module, batches, batches)
    assert module.losses == pytest.approx(expected.losses, rel=1e-5)
    assert {name: value.item() for name, value in runner.callback_metrics.items()}.keys() >= {"loss_epoch", "val_loss"}
    eager, compiled = choices(runner)["training_step"].calls
    assert (eager + compiled, eager >= FIRST_CALLS + TURNS) == (30, True)
    # The smaller batch comes too rarely to be compiled.
    assert len([graph for graph in lit_ort.explain(runner).graphs if graph.kind == "fused"]) == 1
    assert lit_ort.explain(runner).recompiles == ()
    assert "training_step" in str(lit_ort.explain(runner))


@pytest.mark.usefixtures("certain_gain")
def test_the_order_of_data_is_that_of_eager(tmp_path: Path) -> None:
    orders: list[list[float]] = []

    class Seen(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            orders[-1].append(batch[0].sum().item())

    for compile in ("auto", "never", "always"):
        orders.append([])
        torch.manual_seed(3)
        shuffled = DataLoader(loader().dataset, batch_size=8, shuffle=True)
        strategy = lit_ort.ORTStrategy(compile=compile)  # pyright: ignore[reportArgumentType]
        trainer(strategy, default_root_dir=tmp_path, max_epochs=3).fit(Seen(dropout=0.5), shuffled)
    assert orders[0] == orders[1] == orders[2]


def test_a_resumed_fit_draws_what_the_whole_one_drew(tmp_path: Path) -> None:
    def fit(epochs: int, checkpoint: Path | None = None) -> tuple[Net, Any]:
        torch.manual_seed(0)
        module = Net(dropout=0.5)
        runner = trainer(lit_ort.ORTStrategy(compile="auto"), default_root_dir=tmp_path, max_epochs=epochs)
        runner.fit(module, constant_loader(), ckpt_path=checkpoint)
        return module, runner

    whole, _ = fit(2)
    first, runner = fit(1)
    runner.save_checkpoint(tmp_path / "half.ckpt")
    second, _ = fit(2, tmp_path / "half.ckpt")
    assert first.losses + second.losses == whole.losses


@pytest.mark.usefixtures("certain_gain")
def test_a_resumed_fit_keeps_what_was_chosen(tmp_path: Path) -> None:
    def fit(epochs: int, checkpoint: Path | None = None) -> Any:
        runner = trainer(lit_ort.ORTStrategy(compile="auto"), default_root_dir=tmp_path, max_epochs=epochs)
        runner.fit(Net(), loader(), ckpt_path=checkpoint)
        return runner

    first = fit(5)
    first.save_checkpoint(tmp_path / "half.ckpt")
    before = choices(first)["training_step"]
    after = choices(fit(6, tmp_path / "half.ckpt"))["training_step"]
    assert after.way == before.way
    assert after.calls == ((5, 0) if before.way == EAGER else (0, 5))
    assert "before the checkpoint" in str(after)


@pytest.mark.parametrize(
    "settings",
    [{"optimizer_in_graph": True}, {"recompute": "layers"}, {"verify_first_step": True}, {"fallback": "error"}],
)
def test_what_only_compiled_steps_have_is_compiled_at_once(settings: dict[str, Any], tmp_path: Path) -> None:
    runner = trainer(lit_ort.ORTStrategy(compile="auto", **settings), default_root_dir=tmp_path, max_steps=1)
    runner.fit(Net(), loader())
    assert [graph.kind for graph in lit_ort.explain(runner).graphs] == ["fused"]
    assert choices(runner) == {}


def test_a_later_run_decides_by_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(gain: float) -> Choice:
        monkeypatch.setattr(jit, "estimate_of", lambda *_: Estimate(1e-6, gain))
        strategy = lit_ort.ORTStrategy(compile="auto", cache_dir=str(tmp_path))
        runner = trainer(strategy, default_root_dir=tmp_path, max_epochs=6)
        runner.fit(Net(), loader())
        IDLE.clear()
        return choices(runner)["training_step"]

    first = fit(gain=0.5)
    assert first.compile_seconds > 0
    (path,) = tmp_path.glob("*.ortstep")
    name, measured = decoded(path.read_bytes())
    assert (name, measured.from_cache) == ("training_step of Net", False)
    assert (measured.eager, measured.compiled) == first.seconds
    # Times of such short calls vary.
    monkeypatch.setattr(jit, "_ALIKE", 1e3)
    for compiled, ways in ((measured.eager / 2, 2), (measured.eager * 2, 1)):
        path.write_text(json.dumps([name, dataclasses.asdict(MeasuredStep(measured.eager, compiled, 1e-6, True))]))
        assert sum(count > 0 for count in fit(gain=0.0).calls) == ways
    path.write_text("damaged")
    assert fit(gain=0.0).calls[1] == 0


def test_never_runs_in_eager(tmp_path: Path) -> None:
    runner = trainer(lit_ort.ORTStrategy(compile="never"), default_root_dir=tmp_path, max_steps=3)
    runner.fit(Net(), loader())
    assert "training_step runs in eager: compile='never'" in str(lit_ort.explain(runner))


def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lit_ort.ORTStrategy().compile == "always"
    monkeypatch.delenv("LIT_ORT_COMPILE")
    assert lit_ort.ORTStrategy().compile == "auto"
    monkeypatch.setenv("LIT_ORT_COMPILE", "sometimes")
    with pytest.raises(OptionsError, match="compile='sometimes' is not one of"):
        lit_ort.ORTStrategy()


def test_an_error_of_a_step_is_raised_and_not_timed(tmp_path: Path) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == 2:
                raise ValueError("the third step")
            return super().training_step(batch, batch_idx)

    runner = trainer(lit_ort.ORTStrategy(compile="auto"), default_root_dir=tmp_path)
    with pytest.raises(ValueError, match="the third step"):
        runner.fit(Failing(), loader())


def test_choices_are_pickled_as_reports(tmp_path: Path) -> None:
    runner = trainer(lit_ort.ORTStrategy(compile="auto"), default_root_dir=tmp_path, max_steps=3)
    runner.fit(Net(), loader())
    assert choices(copy.deepcopy(runner)) == choices(runner)
