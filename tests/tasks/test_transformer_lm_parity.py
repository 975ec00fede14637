"""The transformer language model compared with eager: loss and gradients of a step, weights after twenty steps."""

from __future__ import annotations

import copy

import pytest
import torch
from lit_ort_tasks.transformer_lm import TransformerLM
from torch import Tensor

from lit_ort.backend.backend import ORTBackend
from tests.compare import backend, gradients, relative_error

WORDS = 5_000


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    sizes = [(35, 20)] * (count - 1) + [(17, 20)]
    return [
        (torch.randint(WORDS, size, generator=generator), torch.randint(WORDS, size, generator=generator))
        for size in sizes
    ]


def twins() -> tuple[TransformerLM, TransformerLM, ORTBackend]:
    module = TransformerLM(WORDS, dropout=0.0)
    return module, copy.deepcopy(module), backend()


def test_loss_and_every_gradient_of_the_first_step() -> None:
    module, twin, engine = twins()
    (batch,) = batches(2)[:1]
    loss = torch.compile(TransformerLM.loss, backend=engine)(module, batch)
    expected = twin.loss(batch)
    loss.backward()
    expected.backward()
    assert relative_error(loss.detach(), expected.detach()) < 1e-5
    reference = gradients(twin)
    largest = max(float(gradient.norm()) for gradient in reference.values())
    assert gradients(module).keys() == reference.keys()
    for name, gradient in gradients(module).items():
        assert relative_error(gradient, reference[name]) < 1e-5 or _is_noise(reference[name], gradient, largest), name
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused"]


def _is_noise(reference: Tensor, gradient: Tensor, largest: float) -> bool:
    """Whether a gradient is rounding error of zero, such as that of attention's key bias, which softmax cancels."""
    return float((gradient - reference).norm()) < 1e-7 * largest


@pytest.mark.slow
def test_gradients_are_as_close_to_float64_as_those_of_eager() -> None:
    module, twin, engine = twins()
    exact = copy.deepcopy(module).double()
    (batch,) = batches(2)[:1]
    torch.compile(TransformerLM.loss, backend=engine)(module, batch).backward()
    twin.loss(batch).backward()
    exact.loss(batch).backward()
    reference = gradients(exact)

    def error(name: str, values: dict[str, Tensor]) -> float:
        return float((values[name].double() - reference[name]).norm() / reference[name].norm())

    ours, eager = gradients(module), gradients(twin)
    mean_ours = sum(error(name, ours) for name in reference) / len(reference)
    mean_eager = sum(error(name, eager) for name in reference) / len(reference)
    assert mean_ours < 2 * mean_eager


@pytest.mark.slow
@pytest.mark.sweep
def test_weights_after_twenty_sgd_steps_of_two_lengths() -> None:
    module, twin, engine = twins()
    step = torch.compile(TransformerLM.loss, backend=engine)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (module, twin)]
    for batch in batches(20):
        for loss, parameters, optimizer in zip(
            (step(module, batch), twin.loss(batch)), (module, twin), optimizers, strict=True
        ):
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters.parameters(), 0.5)
            optimizer.step()
    for (name, weight), other in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert relative_error(weight.detach(), other.detach()) < 1e-4, name
    assert len(engine.compile_log.graphs) == 2
