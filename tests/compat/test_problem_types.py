"""Classifiers of transformers: one graph, although their first call writes `config.problem_type`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lit_ort.backend.tracing_settings import dynamo_settings
from tests.compare import backend
from tests.compat.canary import canary

SIZES: dict[str, Any] = dict(vocab_size=20, pad_token_id=0)
# The first writes it in its forward, the second in the library's loss.
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "BERT": (
        transformers.BertConfig,
        transformers.BertForSequenceClassification,
        dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8),
    ),
    "GPT-2": (transformers.GPT2Config, transformers.GPT2ForSequenceClassification, dict(n_embd=8, n_layer=1, n_head=2)),
}
LABELS: dict[str, Tensor] = {
    "regression": torch.tensor([[0.5], [2.0]]),
    "single_label_classification": torch.tensor([0, 2]),
    "multi_label_classification": torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]),
}


# Each problem, and each model.
CASES = {("BERT", "regression"): pytest.mark.slow, ("GPT-2", "multi_label_classification"): pytest.mark.slow}
CASES |= {("BERT", "single_label_classification"): ()}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        pytest.param(name, problem, marks=CASES.get((name, problem), pytest.mark.sweep))
        for name in MODELS
        for problem in LABELS
    ],
)
@pytest.mark.sampled(1)
def test_one_graph(name: str, problem: str) -> None:
    make_config, make_model, sizes = MODELS[name]
    torch.manual_seed(0)
    model = make_model(make_config(num_labels=1 if problem == "regression" else 3, **SIZES, **sizes)).eval()
    twin, tokens = copy.deepcopy(model), torch.randint(1, 20, (2, 5))

    def step(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=labels).loss

    engine = backend()
    compiled = torch.compile(step, backend=engine)
    expected = step(twin, tokens, LABELS[problem])
    with canary("UnspecializeRestartAnalysis", "problem_types", "a second graph of transformers' classifiers"):
        for _ in range(2):
            with dynamo_settings("step", strict=True, compile_log=engine.compile_log):
                torch.testing.assert_close(compiled(model, tokens, LABELS[problem]), expected)
        assert model.config.problem_type == twin.config.problem_type == problem
        assert engine.count == 1
        assert not engine.compile_log.recompiles
