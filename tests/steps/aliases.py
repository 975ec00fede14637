"""Steps whose results share memory with each other or with inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.steps.case import Case, Net, case
from tests.steps.reported import LABELS, rows


@case
def a_result_and_its_views() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = m.first(x)
        return (
            hidden.pow(2).mean(),
            hidden,
            hidden.view(-1),
            hidden[1:3],
            hidden.t(),
            hidden.unsqueeze(0).expand(2, 6, 8),
        )

    return Case(Net(step), [(rows(),)])


@case
def only_views() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = m.first(x)
        return hidden.view(2, 3, 8), hidden[:, 4:]

    def backward(output: tuple[Tensor, Tensor]) -> None:
        (output[0].pow(2).sum() + output[1].sum()).backward()

    return Case(Net(step), [(rows(),)], backward)


@case
def one_result_twice() -> Case:
    def step(m: Any, x: Tensor) -> dict[str, Any]:
        loss = m.first(x).pow(2).mean()
        return {"loss": loss, "again": loss, "log": loss.detach(), "more": [loss]}

    return Case(Net(step), [(rows(),)])


@case
def a_result_and_what_operators_return_it_unchanged() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = m.first(x)
        mean, scale = torch.broadcast_tensors(hidden, m.second(x).sum().exp())
        same = hidden.contiguous(), hidden.float(), hidden.real, hidden.expand_as(hidden), torch.atleast_2d(hidden)
        return hidden, mean, scale, *torch.broadcast_tensors(mean, scale), *same

    def backward(output: tuple[Tensor, ...]) -> None:
        torch.stack([(k + 1) * value.pow(2).sum() for k, value in enumerate(output)]).sum().backward()

    return Case(Net(step), [(rows(),)] * 2, backward)


@case
def a_broadcast_result_beside_a_loss() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        loss = m.first(x).pow(2).mean()
        return loss, *torch.broadcast_tensors(loss, loss), loss.contiguous()

    return Case(Net(step), [(rows(),)])


@case
def the_batch_and_its_slices_are_returned() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return F.cross_entropy(m.second(x), y), x, x[0], x.view(2, 24), y, y[::2]

    return Case(Net(step), [(rows(), LABELS)])


@case
def a_changed_batch_is_returned() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        x.mul_(2)
        return m.first(x).mean(), x, x.t(), x + 0

    return Case(Net(step), [(rows(),)])


@case
def parameters_and_buffers_are_returned() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        m.count += 1
        return m.first(x).sum(), m.first.weight, m.count, m.first.weight[0], m.first.bias.detach()

    return Case(Net(step, count=torch.tensor(0)), [(rows(),)] * 2)


@case
def gradient_for_a_returned_parameter() -> Case:
    def backward(output: tuple[Tensor, Tensor]) -> None:
        (output[0] + output[1].pow(2).sum()).backward()

    return Case(Net(lambda m, x: (m.first(x).sum(), m.first.weight[2:4])), [(rows(),)], backward)


@case
def a_result_is_changed_by_the_caller() -> Case:
    def backward(output: tuple[Tensor, Tensor]) -> None:
        output[0].backward()
        with torch.no_grad():
            output[1].zero_()

    def step(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = m.first(x)
        return hidden.sigmoid().sum(), hidden

    return Case(Net(step), [(rows(),)] * 2, backward)


@case
def two_overlapping_slices() -> Case:
    def slices() -> tuple[Tensor, Tensor]:
        whole = torch.randn(9, 8)
        return whole[:6], whole[3:]

    return Case(Net(lambda m, a, b: (m.first(a) - m.first(b)).pow(2).mean()), [slices(), slices()])


@case
def two_overlapping_slices_one_of_which_is_changed() -> Case:
    def step(m: Any, a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return (m.first(a) - m.first(b)).pow(2).mean()

    whole = torch.randn(9, 8)
    return Case(Net(step), [(whole[:6], whole[3:])], falls_back="shares its memory|share memory")


@case
def results_with_other_strides() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = m.first(x)
        return hidden.pow(2).mean(), hidden.t() * 2, (hidden.t() * 3).contiguous(), x.t().clone()

    return Case(Net(step), [(rows(),)])


@case
def strided_views() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        windows = hidden.unfold(1, 4, 2) + hidden.as_strided((6, 3, 4), (8, 2, 1))
        return windows.pow(2).mean() + hidden.as_strided((4,), (9,), 3).exp().sum()

    return Case(Net(step), [(rows(),)])


@case
def strided_views_of_a_contiguous_copy() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x).t().contiguous()
        return hidden.as_strided((3, 4), (4, 1)).exp().sum() + m.first(x).t().clone().as_strided((8,), (1,)).sin().sum()

    return Case(Net(step), [(rows(),)])


@case
def strided_views_of_the_batch() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        return m.first(x.as_strided((4, 8), (8, 1), 8)).pow(2).mean()

    # Dynamo doesn't guard on the second batch's storage offset.
    return Case(Net(step), [(rows(),), (torch.randn(7, 8)[1:],)], falls_back="storage_offset")


@case
def strided_views_of_the_batch_returned() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        return m.first(x).pow(2).mean(), x.as_strided((2, 8), (8, 1), 8)

    return Case(Net(step), [(torch.randn(7, 8)[1:],)], falls_back="storage_offset")


@case
def batches_with_any_strides() -> Case:
    batches = [(torch.randn(8, 6).t(),), (torch.randn(6, 16)[:, ::2],), (torch.randn(1, 8).expand(6, 8),)]
    return Case(Net(lambda m, x: m.first(x).pow(2).mean() + x.view_as(x).mean()), batches)


@case
def conjugates_and_real_parts() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        z = torch.view_as_complex(m.first(x).view(6, 4, 2))
        return (z.conj() * z).real.sum(), z.imag * 2, z.conj().resolve_conj(), z

    return Case(Net(step), [(rows(),)])


@case
def lazy_conjugates_of_a_result() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        z = torch.view_as_complex(m.first(x).view(6, 4, 2))
        return (z.conj() * z).real.sum(), z, z.conj()

    return Case(Net(step), [(rows(),)], falls_back="torch.complex64 view")


@case
def a_transposed_slice_of_a_result() -> Case:
    def step(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        bounded = x.clamp(-1, 1)
        return m.first(x).square().mean(), bounded[1:].t()

    return Case(Net(step), [(rows(),)])


@case
def no_gradient_for_the_first_graph() -> Case:
    """The results of the graph before the break receive no gradients."""

    def step(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        score = m.first(x).mean()
        torch._dynamo.graph_break()
        return m.second(x).square().mean() + (score.detach() * 2), score.tanh()

    return Case(Net(step), [(rows(),)])


@case
def views_of_a_batch_that_is_changed_without_gradients() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        transposed = x.t()
        with torch.no_grad():
            transposed.masked_fill_(transposed > 0.5, 1.5)
            y.add_(1)
        flat = y.view(-1)
        torch._dynamo.graph_break()
        return m.first(x).square().mean() + (flat * 2).sum() + y.sum(), transposed, flat

    return Case(Net(step), [(rows(), rows().requires_grad_())])
