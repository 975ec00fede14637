"""GPT-2 and BERT through ONNX Runtime: the results of eager PyTorch, one graph per step, no fallback."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from tests.compare import assert_same_step, backend, relative_error
from tests.hf_models import CASES

pytestmark = pytest.mark.usefixtures("one_thread")


def task_and_batch(name: str, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    build, make_batch = CASES[name]
    task = build(**options).train()
    return task, make_batch(task)


def step(task: Any, *batch: torch.Tensor) -> torch.Tensor:
    return task.loss(dict(zip(NAMES[type(task).__name__], batch, strict=True)))


NAMES = {
    "GPT2": ["input_ids", "targets"],
    "BertPretrain": ["input_ids", "token_type_ids", "attention_mask", "labels", "next_sentence_label"],
    "BertFinetune": ["input_ids", "token_type_ids", "attention_mask", "labels"],
}


def only(tested: str) -> list[Any]:
    """The tasks as parameters of a test, all but one of them in the sweep."""
    return [pytest.param(name, marks=() if name == tested else pytest.mark.sweep) for name in CASES]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_loss_and_every_gradient_of_the_first_step(name: str) -> None:
    task, batch = task_and_batch(name)
    engine = assert_same_step(task, step, *batch.values())
    assert [report.kind for report in engine.compile_log.graphs] == ["fused"]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "training_step") for name in CASES),
        *(pytest.param(*one.values, "validation_step", marks=one.marks) for one in only("bert_finetune")),
    ],
)
def test_a_step_is_one_graph_with_all_its_figures(name: str, kind: str) -> None:
    task, batch = task_and_batch(name)
    engine = backend()
    expected = getattr(task, kind)(batch, 0)
    with torch.set_grad_enabled(kind == "training_step"):
        actual = torch.compile(getattr(task, kind), backend=engine, fullgraph=True)(batch, 0)
    assert actual.keys() == expected.keys()
    for figure, value in expected.items():
        torch.testing.assert_close(actual[figure].detach(), value.detach(), rtol=1e-5, atol=1e-6)
    assert [figure for figure, value in actual.items() if value.requires_grad] == ["loss"] * (kind == "training_step")
    assert [report.kind for report in engine.compile_log.graphs] == ["fused" if kind == "training_step" else "forward"]


@pytest.mark.slow
@pytest.mark.parametrize("name", only("gpt2"))
def test_weights_after_ten_optimizer_steps(name: str) -> None:
    task, _ = task_and_batch(name)
    twin = copy.deepcopy(task)
    compiled = torch.compile(step, backend=backend())
    optimizers = [adamw(module) for module in (task, twin)]
    for _ in range(10):
        batch = CASES[name][1](task)
        for loss, optimizer in zip((compiled(task, *batch.values()), twin.loss(batch)), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for (parameter, weight), expected in zip(task.named_parameters(), twin.parameters(), strict=True):
        # The biases of keys don't change the attention. Their gradient is rounding error, which Adam scales up.
        if "key.bias" not in parameter and "c_attn.bias" not in parameter:
            assert relative_error(weight.detach(), expected.detach()) < 1e-3, parameter


def adamw(module: LightningModule) -> torch.optim.Optimizer:
    # An epsilon above the rounding error of gradients, so that updates from gradients near zero stay near zero.
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", only("gpt2"))
def test_dropout_differs_between_steps_and_repeats_with_the_seed(name: str) -> None:
    task, batch = task_and_batch(name, dropout=0.3)
    compiled = torch.compile(step, backend=backend())

    def losses() -> list[float]:
        torch.manual_seed(5)
        return [compiled(task, *batch.values()).item() for _ in range(3)]

    first = losses()
    assert len(set(first)) == 3
    assert losses() == first
