"""CTC losses: one graph, the losses and gradients of eager for any form of targets and lengths, and the errors
of torch's operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lit_ort.errors import SessionError
from lit_ort.ops.ctc_loss import ctc_loss
from lit_ort.ops.operator import TorchAllocator
from tests.compare import assert_same_step, compiled

STEPS, BATCH, CLASSES, WIDTH = 12, 3, 5, 4
LENGTHS = [4, 1, 3]
TARGETS = torch.tensor([[1, 2, 2, 4], [3, 1, 1, 1], [4, 1, 4, 1]])
FLAT = torch.cat([row[:length] for row, length in zip(TARGETS, LENGTHS, strict=True)])
FORMS: dict[str, tuple[Any, Any, Any]] = {
    "padded targets": (TARGETS, torch.full((BATCH,), STEPS), torch.tensor(LENGTHS)),
    "targets in a row": (FLAT, torch.tensor([12, 9, 10], dtype=torch.int32), torch.tensor(LENGTHS)),
    "lengths that are numbers": (TARGETS, [STEPS] * BATCH, tuple(LENGTHS)),
    "strided targets": (TARGETS.t().contiguous().t(), torch.tensor([12, 9, 10]), torch.tensor(LENGTHS)),
}


def inputs() -> Tensor:
    return torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_graph_with_the_gradients_of_eager(form: str, reduction: str) -> None:
    criterion = nn.CTCLoss(blank=0, reduction=reduction)
    backend = assert_same_step(
        nn.Linear(WIDTH, CLASSES),
        lambda module, x: criterion(module(x).log_softmax(-1), *FORMS[form]).square().sum(),
        inputs(),
    )
    assert [graph.kind for graph in backend.compile_log.graphs] == ["fused"]


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_targets_that_do_not_fit(zero_infinity: bool) -> None:
    lengths = torch.tensor([12, 2, 10]), torch.tensor([4, 3, 3])

    def step(weight: Tensor, x: Tensor) -> Tensor:
        return functional.ctc_loss((x @ weight).log_softmax(-1), TARGETS, *lengths, zero_infinity=zero_infinity)

    results = []
    for function in (step, compiled(step)):
        weight = torch.ones(WIDTH, CLASSES).triu().requires_grad_()
        loss = function(weight, inputs())
        loss.backward()
        results.append((loss, weight.grad))
    torch.testing.assert_close(results[1], results[0], equal_nan=True)
    assert bool(results[0][0].isfinite()) is zero_infinity


def test_a_sequence_without_a_batch_and_without_gradients() -> None:
    def step(x: Tensor) -> Tensor:
        lengths = torch.tensor(STEPS), torch.tensor(4)
        return functional.ctc_loss(x[:, 0].log_softmax(-1), TARGETS[0] % WIDTH, *lengths, reduction="none")

    actual = compiled(step)(inputs())
    torch.testing.assert_close(actual, step(inputs()))
    assert actual.shape == ()


def test_autocast_computes_it_in_float32() -> None:
    layer, x = nn.Linear(WIDTH, CLASSES), inputs()

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.ctc_loss(layer(x).log_softmax(-1).bfloat16(), *FORMS["padded targets"])

    results = []
    for function in (step, compiled(step, precision="bf16-mixed")):
        layer.zero_grad()
        loss = function(x)
        loss.backward()
        assert layer.weight.grad is not None
        results.append((loss, layer.weight.grad.clone()))
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)
    assert results[1][0].dtype == torch.float32


def test_no_gradient_is_computed_without_need() -> None:
    lengths = torch.full((BATCH,), STEPS), torch.tensor(LENGTHS)
    losses, gradient = ctc_loss(TorchAllocator(), inputs().log_softmax(-1), TARGETS % WIDTH, *lengths, 0, False, False)
    assert losses.shape == (BATCH,)
    assert gradient.shape == (0,)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((torch.tensor([12, 12, 13]), torch.tensor(LENGTHS)), "Expected input_lengths to have value at most 12"),
        ((torch.tensor([12, 12]), torch.tensor(LENGTHS)), "input_lengths must be of size batch_size"),
        ((torch.tensor([12, 12, 12]), torch.tensor([5, 1, 1])), "size at least 5"),
    ],
)
def test_errors_say_what_those_of_eager_say(lengths: tuple[Tensor, Tensor], message: str) -> None:
    def step(x: Tensor) -> Tensor:
        return functional.ctc_loss(x.log_softmax(-1), TARGETS % WIDTH, *lengths)

    for function, error in ((step, RuntimeError), (compiled(step), SessionError)):
        with pytest.raises(error, match=message):
            function(inputs())
