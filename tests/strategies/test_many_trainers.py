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
from lit_ort.backend import steps
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
        loss = loss.sin()
        torch._dynamo.graph_break()
        return loss.asin() * 2


@pytest.mark.parametrize("kind", [Net, Broken])
def test_each_compiles_its_steps(kind: type[Net], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "RECOMPILE_LIMIT", LIMIT)
    torch.compiler.reset()
    kinds = []
    for _ in range(LIMIT + 2):
        runner = trainer(lit_ort.ORTStrategy(fallback="error"), max_epochs=1)
        runner.fit(kind(), loader(), loader())
        kinds.append([graph.kind for graph in lit_ort.explain(runner).graphs])
    assert kinds == [kinds[0]] * len(kinds)
    assert "eager" not in kinds[0]


def test_what_is_compiled_ends_with_the_trainer() -> None:
    references = []
    copied: list[Callable[[Any], Any]] = [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))]
    for make in (lambda strategy: strategy, *copied, lambda strategy: strategy):
        runner = trainer(make(lit_ort.ORTStrategy()), max_epochs=1)
        runner.fit(Net(), loader(), loader())
        strategy = runner.strategy
        assert isinstance(strategy, lit_ort.ORTStrategy)
        references.append(weakref.ref(strategy.backend_of("training_step")))
        references.append(weakref.ref(runner))
        runner.validate(Net(), loader(), verbose=False)
        del runner, strategy
    for _ in range(3):
        gc.collect()
    # The latest can stay until the next one compiles.
    assert [reference() for reference in references[:-2]] == [None] * (len(references) - 2)
