"""Steps that return more than one loss, or use the loss in unusual ways."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from tests.steps.case import Case, Net, case
from tests.steps.reported import LABELS, rows


class Losses(NamedTuple):
    loss: Tensor
    parts: dict[str, Any]


@case
def two_scalars() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return m.first(x).pow(2).mean(), m.second(x).abs().mean()

    return Case(Net(step), [(rows(),)] * 2, lambda output: (output[0] + 3 * output[1]).backward())


@case
def two_scalars_the_second_is_the_loss() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return m.first(x).pow(2).mean(), m.second(x).abs().mean()

    return Case(Net(step), [(rows(),)] * 2, lambda output: output[1].backward())


@case
def a_sum_and_its_terms() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> Losses:
        first, second = m.first(x).pow(2).mean(), F.cross_entropy(m.second(x), y)
        return Losses(first + 0.1 * second, {"first": first, "second": second.detach(), "name": "both", "none": None})

    return Case(Net(step), [(rows(), LABELS)] * 2)


@case
def two_backwards_in_a_row() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = m.first(x)
        return hidden.pow(2).mean(), m.second(hidden).mean()

    def backward(output: tuple[Tensor, Tensor]) -> None:
        output[0].backward(retain_graph=True)
        output[1].backward()

    return Case(Net(step), [(rows(),)], backward)


@case
def dictionary_of_everything() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
        logits = m.second(m.first(x))
        loss = F.cross_entropy(logits, y)
        accuracy = (logits.argmax(-1) == y).float().mean()
        return {"loss": loss, "logits": logits, "more": {"accuracy": accuracy, "rows": x.size(0)}, "labels": [y, "a"]}

    return Case(Net(step), [(rows(), LABELS)], lambda output: output["loss"].backward())


@case
def retained_graph() -> Case:
    def backward(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        (loss * 2).backward()

    return Case(Net(lambda m, x: m.second(m.first(x).relu()).pow(2).mean()), [(rows(),)] * 2, backward)


@case
def scaled_and_accumulated() -> Case:
    def backward(loss: Tensor) -> None:
        (loss * 1024 / 3).backward()

    return Case(Net(lambda m, x: m.second(m.first(x).relu()).pow(2).mean()), [(rows(),)] * 2, backward)


@case
def no_backward() -> Case:
    return Case(Net(lambda m, x: m.first(x).pow(2).mean()), [(rows(),)] * 2, lambda loss: None)


@case
def a_loss_of_one_element() -> Case:
    return Case(Net(lambda m, x: m.first(x).pow(2).mean().view(1)), [(rows(),)])


@case
def a_loss_that_is_a_view() -> Case:
    return Case(Net(lambda m, x: m.first(x).pow(2).mean(0)[3]), [(rows(),)])


@case
def a_loss_that_is_a_parameter() -> Case:
    return Case(
        Net(lambda m, x: (m.scale, (m.first(x) * m.scale).sum()), scale=nn.Parameter(torch.tensor(2.0))), [(rows(),)]
    )


@case
def a_loss_without_trainable_parameters() -> Case:
    return Case(Net(lambda m, x: (m.first(x).detach().mean(), x.sum())), [(rows(),)])


@case
def one_loss_for_each_row() -> Case:
    weights = torch.linspace(0.1, 2.0, 6)

    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.second(x), y, reduction="none")

    return Case(Net(step), [(rows(), LABELS)], lambda losses: losses.backward(weights))


@case
def numbers_are_returned() -> Case:
    def step(m: Any, x: Tensor, k: int, beta: float) -> tuple[Any, ...]:
        return m.first(x).mean() * beta, k + 1, beta / 2, x.size(0), "text", None, x.dtype

    return Case(Net(step), [(rows(), k, k / 10) for k in range(4)])


@case
def gradient_for_the_batch() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        return m.first(x).pow(2).sum()

    return Case(Net(step), [(rows().requires_grad_(),), (rows().requires_grad_(),)])


@case
def gradients_are_the_results() -> Case:
    def backward(output: tuple[Tensor, Tensor]) -> None:
        loss, x = output
        (gradient,) = grad(loss, x, retain_graph=True)
        assert gradient.abs().sum() > 0
        loss.backward()

    return Case(Net(lambda m, x: (m.first(x).pow(2).sum(), x)), [(rows().requires_grad_(),)], backward)


@case
def integer_results_in_addition_to_the_loss() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        scores, order = m.second(x).sort(1)
        return scores[:, -1].sum(), order, scores.topk(2, 1)[1], (scores > 0).nonzero().size(0) > 100

    return Case(Net(step), [(rows(),)])


@case
def two_steps_before_one_backward() -> Case:
    losses: list[Tensor] = []

    def backward(loss: Tensor) -> None:
        losses.append(loss)
        if len(losses) == 2:
            (losses[0] * 2 + losses[1]).backward()
            losses.clear()

    return Case(Net(lambda m, x: m.second(m.first(x).relu()).pow(2).mean()), [(rows(),)] * 2, backward)
