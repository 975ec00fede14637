"""Steps that write in place: into results, views, the batch, parameters and buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.steps.case import Case, Net, case
from tests.steps.reported import rows


@case
def writes_into_a_view_of_a_result() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        hidden[:, :4].mul_(2)
        hidden[0] += 1
        hidden.t()[3].zero_()
        return hidden.pow(2).mean()

    return Case(Net(step), [(rows(),)])


@case
def accumulates_into_zeros() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        total = torch.zeros(3, 8)
        total.index_put_((torch.tensor([0, 1, 1, 2, 0, 1]),), m.first(x), accumulate=True)
        total.index_add_(0, torch.tensor([0, 2]), m.first(x)[:2], alpha=0.5)
        return total.pow(2).mean()

    return Case(Net(step), [(rows(),)])


@case
def masked_writes() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        hidden.masked_fill_(x > 1, -3.0)
        hidden[x < -1] = 0.5
        return hidden.masked_scatter_(x > 0, m.first(x).flatten()).tanh().pow(2).sum()

    return Case(Net(step), [(rows(),)])


@case
def chain_of_activations_in_place() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = F.leaky_relu(m.first(x) * 2, 0.1, inplace=True)
        hidden = (hidden * 1).add_(1).sub_(0.3).div_(2).clamp_(-0.5, 2)
        return m.second(F.elu_(hidden * 1) * 2).square().sum()

    return Case(Net(step), [(rows(),)])


@case
def fills_a_tensor_of_time_steps() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        states = torch.empty(4, 6, 8)
        state = x
        for k in range(4):
            state = m.first(state).tanh()
            states[k] = state
        return states.std()

    return Case(Net(step), [(rows(),)])


@case
def changes_its_batch() -> Case:
    def step(m: Any, x: Tensor, count: Tensor) -> Tensor:
        x.sub_(x.mean()).div_(x.std())
        count += 1
        return m.first(x).pow(2).mean() * count

    return Case(Net(step), [(rows(), torch.tensor(2)), (rows(), torch.tensor(5))])


@case
def changes_a_slice_of_its_batch() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        x[2:4, ::2] = 0
        return m.first(x).pow(2).mean()

    return Case(Net(step), [(rows(),), (rows().t().contiguous().t(),)])


@case
def changes_the_data_of_parameters() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        m.first.weight.data.mul_(0.9)
        m.second.bias.detach().add_(1)
        return m.second(m.first(x)).pow(2).mean()

    return Case(Net(step), [(rows(),)] * 2)


@case
def clips_weights_with_foreach_after_the_loss() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        loss = m.second(m.first(x)).pow(2).mean()
        with torch.no_grad():
            torch._foreach_clamp_min_(list(m.first.parameters()), -0.1)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(list(m.first.parameters()), 0.5)  # pyright: ignore[reportPrivateImportUsage]
        return loss

    return Case(Net(step), [(rows(),)] * 2)


@case
def normalizes_rows_of_a_codebook() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.codes.copy_(F.normalize(m.codes, dim=1))
        hidden = m.first(x)
        index = torch.cdist(hidden, m.codes).argmin(1)
        quantized = m.codes[index]
        straight = hidden + (quantized - hidden).detach()
        return (
            F.mse_loss(hidden, quantized.detach()) + F.mse_loss(quantized, hidden.detach()) + m.second(straight).mean()
        )

    return Case(Net(step, codes=nn.Parameter(torch.randn(5, 8))), [(rows(),)] * 2)


@case
def moving_average_after_the_forward() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        m.mean.lerp_(hidden.detach().mean(0), 0.1)
        m.steps += 1
        return (hidden - m.mean).pow(2).mean() / m.steps

    return Case(Net(step, mean=torch.zeros(8), steps=torch.tensor(0)), [(rows(),)] * 3)


@case
def a_buffer_is_reassigned() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        m.center = m.center * 0.9 + hidden.detach().mean(0) * 0.1
        return ((hidden - m.center) / 0.1).softmax(-1).log().mean()

    return Case(Net(step, center=torch.zeros(8)), [(rows(),)] * 3)


@case
def queue_with_a_pointer() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        query = F.normalize(m.first(x), dim=1)
        with torch.no_grad():
            key = F.normalize(m.key(x), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ m.queue.clone()], 1)
        with torch.no_grad():
            index = (m.pointer + torch.arange(6)) % 12
            m.queue[:, index] = key.t()
            m.pointer.add_(6).remainder_(12)
        return F.cross_entropy(scores / 0.07, torch.zeros(6, dtype=torch.long))

    parts = {"key": nn.Linear(8, 8), "queue": F.normalize(torch.randn(8, 12), dim=0), "pointer": torch.tensor(0)}
    return Case(Net(step, **parts), [(rows(),)] * 3)


@case
def queue_with_a_pointer_that_python_reads() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        start = int(m.pointer)
        m.queue[start : start + 6] = hidden.detach()
        m.pointer[0] = (start + 6) % 12
        return (hidden @ m.queue.t()).logsumexp(1).mean()

    return Case(Net(step, queue=torch.randn(12, 8), pointer=torch.zeros(1, dtype=torch.long)), [(rows(),)] * 3)


@case
def writes_into_buffers_with_out_under_no_grad() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.add(m.sums, x.mean(0), out=m.sums)
            torch.mul(x, 2, out=m.scratch)
        return (m.first(x) * m.sums + m.scratch).pow(2).mean()

    return Case(Net(step, sums=torch.ones(8), scratch=torch.zeros(6, 8)), [(rows(),)] * 2)


@case
def batch_norm_counts_each_call_once() -> Case:
    norm = nn.BatchNorm1d(8, momentum=0.3)
    return Case(Net(lambda m, x: m.second(m.norm(m.first(x)).relu()).pow(2).mean(), norm=norm), [(rows(),)] * 3)


@case
def batch_norm_called_twice_and_with_cumulative_average() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        return (m.norm(m.first(x)) * m.norm(x * 2)).sum() + m.average(x).exp().mean()

    return Case(Net(step, norm=nn.BatchNorm1d(8), average=nn.BatchNorm1d(8, momentum=None)), [(rows(),)] * 3)


@case
def spectral_norm() -> Case:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return Case(Net(lambda m, x: m.layer(m.first(x)).pow(2).mean(), layer=layer), [(rows(),)] * 2)


@case
def swaps_two_halves_of_a_buffer() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        upper, lower = m.pair[0], m.pair[1]
        upper.add_(x.mean(0))
        lower.copy_(upper * 2)
        return (m.first(x) * m.pair.sum(0)).sum()

    return Case(Net(step, pair=torch.zeros(2, 8)), [(rows(),)] * 2)


@case
def the_loss_is_changed_in_place() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        loss = m.first(x).pow(2).mean()
        loss += m.second(x).abs().mean()
        loss *= 0.5
        return loss

    return Case(Net(step), [(rows(),)])


@case
def detaches_in_place() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x).tanh()
        logits = m.second(hidden)
        target = (hidden * 2).detach_()
        return logits.pow(2).mean() + (m.first(x) - target).abs().mean()

    return Case(Net(step), [(rows(),)])


@case
def writes_after_dropout_that_drops_nothing() -> Case:
    def step(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        F.dropout(x, 0.0).contiguous().mul_(0.5)
        F.dropout(y[:, ::2], 0.3, training=False).contiguous().mul_(0.5)
        return m.first(x).square().mean() + m.first(y).sum(), F.dropout(x, 0.0)

    return Case(Net(step), [(rows(), rows())])


@case
def an_updated_buffer_is_the_loss() -> Case:
    def step(m: Any, x: Tensor) -> Tensor:
        m.total.detach_()
        m.total.mul_(0.9)
        m.total += m.first(x).square().mean()
        return m.total

    return Case(Net(step, total=torch.zeros(())), [(rows(),)])


@case
def a_copy_into_a_buffer_is_the_loss() -> Case:
    return Case(Net(lambda m, x: m.total.copy_(m.first(x).square().mean()), total=torch.zeros(())), [(rows(),)])


in_eager: Any = torch.compiler.disable(lambda module, x: module(x))


@case
def batch_norm_in_eager_and_then_in_a_graph() -> Case:
    """The backward of the part in eager accepts the statistics only if they have the version that it saved."""

    def step(m: Any, x: Tensor) -> Tensor:
        return in_eager(m.norm, m.first(x)).square().mean() + m.norm(m.first(x * 2)).exp().mean()

    return Case(Net(step, norm=nn.BatchNorm1d(8)), [(rows(),)] * 2)
