"""Random numbers of a step: new at every step, determined by the seed, the same in forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.classifier import Classifier, classes
from tests.compare import backend, compiled


def test_dropout_follows_torch_seeds_and_differs_at_every_step() -> None:
    module, (x, y) = Classifier(dropout=0.5), classes(64)
    loss = torch.compile(Classifier.loss, backend=backend())

    def losses() -> list[float]:
        torch.manual_seed(3)
        return [loss(module, x, y).item() for _ in range(3)]

    first = losses()
    assert len(set(first)) == 3
    assert losses() == first


def test_attention_dropout_is_not_lost() -> None:
    query = torch.randn(1, 2, 64, 8, requires_grad=True)
    value = torch.eye(64).expand(1, 2, 64, 64)

    def attend(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, value, dropout_p=0.25)

    weights = torch.compile(attend, backend=backend())(query)
    dropped = (weights == 0).float().mean().item()
    assert abs(dropped - 0.25) < 0.03
    # The remaining weights are scaled up, so that each row sums to one on average.
    assert abs(weights.sum(-1).mean().item() - 1) < 0.05


def test_same_masks_in_forward_and_backward() -> None:
    x = torch.ones(1000, requires_grad=True)
    output = torch.compile(lambda x: F.dropout(x, 0.5, True) * 1.0, backend=backend())(x)
    output.sum().backward()
    torch.testing.assert_close(output.detach(), x.grad)


def test_masks_of_one_step_are_independent() -> None:
    """The same element in two masks: the correlation is 0.58 if a generator is seeded with consecutive numbers."""
    ones = torch.ones(16, 16)
    compiled = torch.compile(lambda x: tuple(F.dropout(x * k, 0.5, True) for k in (1, 2, 3)), backend=backend())
    draws = 400
    masks = torch.stack([torch.stack([(y > 0).float() for y in compiled(ones)]) for _ in range(draws)]) * 2 - 1
    for first, second in ((0, 1), (0, 2), (1, 2)):
        correlation = (masks[:, first] * masks[:, second]).mean(0)
        assert correlation.square().mean().sqrt() < 1.3 / draws**0.5
    assert (masks[1:] * masks[:-1]).mean(0).square().mean().sqrt() < 1.3 / draws**0.5


def test_several_draws_of_one_step_are_independent() -> None:
    compiled = torch.compile(lambda x: (x + torch.randn_like(x), x + torch.rand_like(x)), backend=backend())
    x, draws = torch.zeros(16, 16), 400
    normal, uniform = zip(*(compiled(x) for _ in range(draws)), strict=True)
    correlation = (torch.stack(normal) * (torch.stack(uniform) - 0.5) * 12**0.5).mean(0)
    assert correlation.square().mean().sqrt() < 1.3 / draws**0.5


def test_dropout_of_torch_follows_the_seed() -> None:
    x = torch.randn(50, 4, 3, requires_grad=True)
    step = compiled(lambda x: F.feature_alpha_dropout(x, 0.4, True).square().sum())

    def draw(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [step(x).item() for _ in range(3)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(set(draw(1))) == 3


def test_the_gradient_uses_the_numbers_of_the_forward() -> None:
    x = torch.ones(1000, requires_grad=True)
    loss = compiled(lambda x: F.rrelu(-x, 0.1, 0.9, True).sum())(x)
    loss.backward()
    assert x.grad is not None
    assert float(x.grad.std()) > 0.1
    torch.testing.assert_close(x.grad.sum(), loss.detach())


def test_random_tensors_are_not_constant_folded() -> None:
    step = compiled(lambda x: (x.sum(), torch.rand(3)))
    assert not torch.equal(step(torch.ones(2))[1], step(torch.ones(2))[1])


class Dropping(nn.Module):
    """Two layers with dropout between them, whose loss and logits are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor, by_torch: bool) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        hidden = F.alpha_dropout(hidden, 0.5, True) if by_torch else F.dropout(hidden, 0.5, True)
        logits = self.second(hidden)
        return logits.square().mean(), logits


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_gradient_for_the_second_result_uses_the_same_masks(by_torch: bool) -> None:
    """Logits are linear in the last layer's parameters, so logits times tangent equals parameters times gradient."""
    module, engine = Dropping(), backend()
    step = torch.compile(module, backend=engine)
    for _ in range(3):
        module.zero_grad()
        _, logits = step(torch.randn(6, 8), by_torch)
        directions = torch.randn(6, 4)
        logits.backward(directions)
        weight, bias = module.second.weight, module.second.bias
        assert weight.grad is not None
        assert bias.grad is not None
        product = (weight * weight.grad).sum() + (bias * bias.grad).sum()
        torch.testing.assert_close((logits * directions).sum(), product, rtol=1e-4, atol=1e-4)
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused", "split"]
