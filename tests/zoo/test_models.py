"""Complete models compared with eager: one graph per step, the same loss, gradients and buffers, and random dropout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from lit_ort._compat import openmp
from lit_ort.lower import placed_values
from tests.compare import mostly
from tests.operators import known
from tests.zoo import image_and_sound_models, operators, plain_models, report, text_models
from tests.zoo.run import compare_steps, losses_with_dropout

CASES = {**text_models.CASES, **image_and_sound_models.CASES, **plain_models.CASES}
pytestmark = pytest.mark.usefixtures("one_thread")
# Models that have no dropout.
WITHOUT_DROPOUT = {"ConvNeXt", "Mamba"}
QUICK = ("BERT", "ResNet", "LSTM", "graph network")
# Models whose steps are those of others, but for a few operators.
LIKE_OTHERS = ("ELECTRA", "Gemma 2", "Mistral", "Mixtral", "Qwen2", "RoBERTa", "bidirectional RNN")
LIKE_OTHERS += ("ALBERT", "BART", "DistilBERT", "GPT-NeoX", "OPT", "Qwen3", "bidirectional GRU", "RNN")
# CLIP is BERT and ViT, Whisper T5 and Wav2Vec2, and ViT SegFormer and BERT; Gemma 3 has the windows of ModernBERT.
LIKE_OTHERS += ("CLIP", "Gemma 3", "LoRA on Llama", "ViT", "Whisper")
# DeBERTa and nn.Transformer are other BERTs, MobileNet is a ResNet; a step of SegFormer is computed below.
LIKE_OTHERS += ("DeBERTa-v2", "MobileNet", "SegFormer", "nn.Transformer")

QUICK_GROUP = "activations"


def some_slow(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """The names as parameters, slow but for the quick ones."""
    others = [name for name in names if name not in quick]
    marks = {name: pytest.mark.sweep if name in LIKE_OTHERS else pytest.mark.slow for name in others}
    return [*quick, *(pytest.param(name, marks=marks[name]) for name in others)]


# The tests of one model of each kind, and of one group of operators, are not marked slow.
@pytest.mark.parametrize("name", some_slow(CASES, QUICK))
@pytest.mark.usefixtures("every_thread")
@pytest.mark.sampled(8)
def test_same_as_eager(name: str) -> None:
    outcome = compare_steps(CASES[name])
    kinds = [graph.kind for graph in outcome.graphs]
    assert "eager" not in kinds
    assert CASES[name].breaks or kinds == ["fused"]
    worst, where = outcome.worst
    assert worst <= CASES[name].tolerance, where
    # Other releases of torch may trace other operators.
    if torch.__version__.startswith(report.RELEASE):
        assert report.is_on_the_page(name, outcome.graphs), "run python -m tests.zoo.report"


# Models whose layouts differ on the two kinds of threads, and models with operators that write in place. By default
# their values are too small to be placed.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["SegFormer", *(pytest.param(name, marks=pytest.mark.sweep) for name in CASES if name != "SegFormer")]
)
def test_same_as_eager_with_the_other_matmuls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if openmp.find_openmp() is None:
        pytest.skip("torch has no OpenMP here")
    is_used = openmp.uses_openmp()
    monkeypatch.setattr(openmp, "uses_openmp", lambda: not is_used)
    monkeypatch.setattr(placed_values, "_FEWEST_BYTES", 0)
    monkeypatch.setattr(placed_values, "_FEWEST_OF_ALL", 0)
    worst, where = compare_steps(CASES[name], steps=1).worst
    assert worst <= CASES[name].tolerance, where


@pytest.mark.usefixtures("compiled_matmuls")
@pytest.mark.parametrize(
    "name", ["BERT", *(pytest.param(name, marks=pytest.mark.sweep) for name in CASES if name != "BERT")]
)
def test_same_as_eager_with_compiled_matmuls(name: str) -> None:
    worst, where = compare_steps(CASES[name], steps=1).worst
    assert worst <= CASES[name].tolerance, where


def test_the_support_page_lists_operators_fusions_and_passes() -> None:
    for part in (report.operators(), known.page()):
        assert part in report.PATH.read_text(), "run python -m tests.zoo.report"


@pytest.mark.parametrize(
    "name",
    [QUICK_GROUP, *(pytest.param(name, marks=pytest.mark.sweep) for name in operators.GROUPS if name != QUICK_GROUP)],
)
def test_operators_are_the_same_as_in_eager(name: str) -> None:
    outcome = compare_steps(operators.GROUPS[name])
    assert [graph.kind for graph in outcome.graphs] == ["fused"]
    wrong = {where: error for where, error in outcome.errors.items() if error > 1e-4}
    assert not wrong


def test_losses_that_read_values_run_in_several_graphs() -> None:
    outcome = compare_steps(operators.READING)
    assert "eager" not in {graph.kind for graph in outcome.graphs}
    assert outcome.worst[0] <= 1e-4


# All use the same dropout fusion.
@pytest.mark.slow
@pytest.mark.parametrize("name", mostly(pytest.mark.sweep, sorted(CASES.keys() - WITHOUT_DROPOUT), 24))
@pytest.mark.sampled(1)
def test_dropout_differs_at_every_step(name: str) -> None:
    losses = losses_with_dropout(CASES[name])
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == len(losses)
