"""Many Trainers in one process, as searches and backtests have them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lit_ort
from lit_ort.backend import tracing_settings
from lit_ort.backend.backend import ORTBackend
from lit_ort.strategies.compiled_code import IDLE
from tests.lightning_models import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning")
LIMIT = 3


class Broken(Net):
    """Has graph breaks in the step and in a method, which Dynamo then compiles separately."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.doubled(super().training_step(batch, batch_idx))
        torch._dynamo.graph_break()
        return loss / 2

    def doubled(self, loss: Tensor) -> Tensor:
        loss = loss.exp()
        torch._dynamo.graph_break()
        return loss.log() * 2


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs that are compiled."""
    names: list[str] = []
    compiled = ORTBackend._compiled

    def counted(backend: ORTBackend, request: Any, name: str) -> Any:
        names.append(name)
        return compiled(backend, request, name)

    monkeypatch.setattr(ORTBackend, "_compiled", counted)
    return names


def backends() -> int:
    """The number of backends in memory."""
    gc.collect()
    return sum(isinstance(one, ORTBackend) for one in gc.get_objects())


def fitted(kind: type[Net] = Net, strategy: Any = None, **arguments: Any) -> Any:
    """A Trainer with a new module that it has trained and validated, and the weights."""
    torch.manual_seed(3)
    runner, module = trainer(strategy or lit_ort.ORTStrategy(fallback="error")), kind(**arguments)
    runner.fit(module, loader(), loader())
    return runner, [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", [Net, Broken])
def test_equal_modules_share_what_is_compiled(kind: type[Net], compilations: list[str]) -> None:
    fits = [fitted(kind) for _ in range(3)]
    expected = fitted(kind, "auto")[1]
    for _, weights in fits:
        torch.testing.assert_close(weights, expected)
    assert len(compilations) == len(set(compilations))
    explanations = [lit_ort.explain(runner) for runner, _ in fits]
    assert len({explanation.counts for explanation in explanations}) == 1
    assert [graph.is_reused for explanation in explanations for graph in explanation.graphs] == [
        number > 0 for number, explanation in enumerate(explanations) for _ in explanation.graphs
    ]
    # Each has the times of its own runs.
    before = explanations[0].clock.sessions
    fitted(kind)
    assert lit_ort.explain(fits[0][0]).clock.sessions == before


def test_other_modules_and_options_are_compiled(compilations: list[str]) -> None:
    fitted()
    count = len(compilations)
    fitted(dropout=0.1)
    assert len(compilations) > count
    count = len(compilations)
    fitted(strategy=lit_ort.ORTStrategy(disable_passes=("gelu",)))
    assert len(compilations) > count


def test_trainers_at_the_same_time_have_their_own(compilations: list[str]) -> None:
    class Within(Net):
        """Trains another module in the middle."""

        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                inner = fitted()
                torch.testing.assert_close(inner[1], fitted(strategy="auto")[1])

    class Between(Within):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                fitted(Within)

    outer = fitted(Between)
    torch.testing.assert_close(outer[1], fitted(strategy="auto")[1])


def test_a_trainer_goes_on_with_its_own(compilations: list[str]) -> None:
    runner, _ = fitted()
    count, counts = len(compilations), lit_ort.explain(runner).counts
    runner.validate(runner.lightning_module, loader(), verbose=False)
    runner.fit(Net(), loader(), loader())
    assert len(compilations) == count
    assert lit_ort.explain(runner).counts == counts
    assert not any(graph.is_reused for graph in lit_ort.explain(runner).graphs)


@pytest.mark.slow
@pytest.mark.sweep
def test_few_wait_for_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1
    monkeypatch.setattr(IDLE, "_most", most)
    before = backends()
    for _ in range(most + 2):
        fitted(type("Other", (Net,), {}))
    for _ in range(3):
        gc.collect()
    # Of each, a backend for the training and one for the validation.
    assert backends() - before <= 2 * (most + 1)


@pytest.mark.parametrize("kind", [Net, Broken])
def test_each_compiles_its_steps(kind: type[Net], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_settings, "RECOMPILE_LIMIT", LIMIT)
    torch.compiler.reset()
    kinds = []
    for _ in range(LIMIT + 2):
        runner = trainer(lit_ort.ORTStrategy(fallback="error"), max_epochs=1)
        runner.fit(kind(), loader(), loader())
        kinds.append([graph.kind for graph in lit_ort.explain(runner).graphs])
    assert kinds == [kinds[0]] * len(kinds)
    assert "eager" not in kinds[0]


@pytest.mark.slow
def test_what_is_compiled_ends_with_the_trainer() -> None:
    before, references = backends(), []
    copied: list[Callable[[Any], Any]] = [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))]
    for make in (lambda strategy: strategy, *copied, lambda strategy: strategy):
        runner = trainer(make(lit_ort.ORTStrategy()), max_epochs=1)
        runner.fit(Net(), loader(), loader())
        strategy = runner.strategy
        assert isinstance(strategy, lit_ort.ORTStrategy)
        references.append(weakref.ref(runner))
        runner.validate(Net(), loader(), verbose=False)
        references.append(weakref.ref(runner.lightning_module))
        del runner, strategy
    IDLE.clear()
    for _ in range(3):
        gc.collect()
    # The latest can stay until the next one compiles.
    assert [reference() for reference in references[:-2]] == [None] * (len(references) - 2)
    assert backends() - before <= 2
