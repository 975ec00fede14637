"""Public reports of in-place operations and state that compilers lose, as programs of our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.reports.report import Compile, row, steps


@steps()
def test_copies_into_a_reinterpreted_input(compiled: Compile[Any]) -> Any:
    """A write through `view(dtype)` of an input was lost or failed a check.

    https://github.com/pytorch/pytorch/issues/136064
    """
    x, words = torch.zeros(2, 3), row(2, 3).view(torch.int32)

    def step(x: Tensor, words: Tensor, y: Tensor) -> None:
        x.view(torch.float32).copy_(y)
        words.view(torch.float32).mul_(2)

    compiled(step)(x, words, row(2, 3))
    return x, words


@steps(falls_back="torch traces .* incorrectly")
def test_writes_through_windows_with_gaps(compiled: Compile[Any]) -> Any:
    """A write through `unfold` with a step larger than its size zeroed what lies between the windows.

    https://github.com/pytorch/pytorch/issues/198102
    """
    x, flat = torch.arange(1.0, 25).view(4, 6), torch.arange(24.0).view(4, 6)

    def step(x: Tensor, flat: Tensor) -> Tensor:
        windows = x.unfold(1, 1, 5)
        windows.add_(windows)
        flat.view(24).unfold(0, 4, 10).index_fill_(1, torch.tensor([1, 2]), -1.0)
        return x.sum() + flat.sum()

    return compiled(step)(x, flat), x, flat


@steps(falls_back="internal overlap")
def test_writes_through_windows_that_overlap(compiled: Compile[Any]) -> Any:
    """A write through `unfold` with overlapping windows is refused in graphs, and does what it can in eager.

    https://github.com/pytorch/pytorch/issues/165409
    """

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x + x
        return total.unfold(1, 3, 2).abs_(), total

    return compiled(step)(row(1, 7))


@steps()
def test_writes_into_a_view_with_gradients(compiled: Compile[Any]) -> Any:
    """A write into an input that is a view, of a tensor with gradients, did not reach the tensor.

    https://github.com/pytorch/pytorch/issues/93363
    """
    leaf = torch.ones(6, requires_grad=True)
    base = leaf * 2
    compiled(lambda view: view.mul_(3.0))(base[::2])
    (base * row(6)).sum().backward()
    return base, leaf.grad


@steps()
def test_a_cache_that_is_replaced_from_outside(compiled: Compile[Any]) -> Any:
    """A tensor that is a plain attribute, and is replaced between two calls, was still the old one in the graph.

    https://github.com/pytorch/pytorch/issues/115774
    """

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache, self.layer = torch.zeros(3, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            self.cache[position] = self.layer(x).detach()
            return (self.layer(x) - self.cache).square().mean()

    module = Cached()
    step, results = compiled(module), []
    for k in range(3):
        loss = step(row(1, 2), torch.tensor([k]))
        loss.backward()
        results.append((loss.detach(), module.cache.clone()))
        module.cache = torch.full((3, 2), float(k))
    return results, module


@steps()
def test_a_buffer_that_is_an_alias_of_another(compiled: Compile[Any]) -> Any:
    """A module selects one row of a buffer between calls and writes into it: every call wrote into the first row.

    https://github.com/pytorch/pytorch/issues/111785
    """

    class Rows(nn.Module):
        rows: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(4, 6))
            self.current = self.rows[:1]

        def forward(self, x: Tensor) -> Tensor:
            self.current.copy_(x)
            return (x * 2).sum()

    module = Rows()
    step = compiled(module)
    for k in range(4):
        module.current = module.rows[k : k + 1]
        step(torch.full((1, 6), k + 1.0))
    return module.rows


@steps()
def test_a_buffer_that_is_cast_to_the_batch(compiled: Compile[Any]) -> Any:
    """`self.buffer = self.buffer.to(x)`, which mostly changes nothing, lost that it is a buffer.

    https://github.com/pytorch/pytorch/issues/106060 and https://github.com/pytorch/pytorch/issues/133509
    """

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("angles", row(3, 4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.angles = self.angles.to(x.device, dtype=x.dtype)
            return (self.layer(x) * self.angles.cos()).square().mean()

    module = Rotary()
    step = compiled(module)
    for _ in range(3):
        step(row(3, 4)).backward()
        module.angles += 0.1
    return module, module.angles, "angles" in dict(module.named_buffers())


@steps()
def test_copies_into_an_argument_without_gradients(compiled: Compile[Any]) -> Any:
    """`copy_` into an argument raised an error about gradients that eager doesn't have.

    https://github.com/pytorch/pytorch/issues/158561
    """
    layer, memory = nn.Linear(3, 3), torch.zeros(2, 3)

    def step(x: Tensor, memory: Tensor) -> Tensor:
        hidden = layer(x)
        memory.copy_(hidden.detach() * 0.5)
        return (hidden * memory).sum()

    loss = compiled(step)(row(2, 3), memory)
    loss.backward()
    return loss, memory, layer


@steps()
def test_adapters_that_are_switched_off_for_a_reference(compiled: Compile[Any]) -> Any:
    """A flag of submodules that a context manager sets, for the reference model's pass, did not count.

    https://github.com/pytorch/pytorch/issues/124717
    """

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter, self.disabled = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), False

        def forward(self, x: Tensor) -> Tensor:
            result = self.base(x)
            return result if self.disabled else result + self.adapter(x)

    parts = [Adapted(), Adapted()]
    net = nn.Sequential(parts[0], nn.Tanh(), parts[1])

    @contextmanager
    def reference() -> Iterator[None]:
        for part in parts:
            part.disabled = True
        yield
        for part in parts:
            part.disabled = False

    step, losses = compiled(lambda x: net(x).log_softmax(-1).mean()), []
    for k in range(2):
        x = row(2, 3) + k
        with torch.no_grad(), reference():
            expected = step(x)
        losses.append((step(x) - expected).square())
        losses[-1].backward()
    return losses, net


class Schedule:
    """Settings of a training, as attributes of a class."""

    weight = 1.0


@steps()
def test_an_attribute_of_a_class_that_changes(compiled: Compile[Any]) -> Any:
    """A class attribute that the step reads, and that is changed between two calls, kept its first value.

    https://github.com/pytorch/pytorch/issues/176851
    """
    layer = nn.Linear(3, 1)
    step, losses = compiled(lambda x: layer(x).square().mean() * Schedule.weight), []
    for weight in (1.0, 10.0, 0.25):
        Schedule.weight = weight
        losses.append(step(row(2, 3)))
        losses[-1].backward()
    return losses, layer


@steps()
def test_averaged_weights_are_swapped_in_for_an_evaluation(compiled: Compile[Any]) -> Any:
    """Weights that were exchanged through `.data` for an evaluation were not those that the compiled model used.

    https://github.com/wandb/senpai/pull/3303
    """
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1))
    step, optimizer = compiled(lambda x: net(x).square().mean()), torch.optim.SGD(net.parameters(), 0.1)
    averages, results = [p.detach().clone() for p in net.parameters()], []
    for _ in range(3):
        optimizer.zero_grad()
        step(row(4, 3)).backward()
        optimizer.step()
        own = [p.data for p in net.parameters()]
        for average, p in zip(averages, net.parameters(), strict=True):
            average.lerp_(p.detach(), 0.5)
            p.data = average
        with torch.no_grad():
            results.append(step(row(4, 3)))
        for weight, p in zip(own, net.parameters(), strict=True):
            p.data = weight
    return results, net


@steps()
def test_data_of_one_tensor_becomes_that_of_another(compiled: Compile[Any]) -> Any:
    """`a.data = b` inside of the step made an alias where eager has none afterwards.

    https://github.com/pytorch/pytorch/issues/113030
    """
    a, b = row(6), row(6).cos()

    def step(a: Tensor, b: Tensor) -> Tensor:
        a.data = b
        b.data = torch.zeros(2)
        return a * 2

    return compiled(step)(a, b), a, b


@steps()
def test_control_flow_by_the_identity_of_an_object(compiled: Compile[Any]) -> Any:
    """Steps that compare objects with `is`, and change them, took the branch of the first call.

    https://github.com/pytorch/pytorch/issues/196173
    """

    class Phase:
        def __init__(self) -> None:
            self.steps = 0

    warm_up, main, net = Phase(), Phase(), nn.Linear(3, 3)
    holder = {"phase": warm_up}

    def step(x: Tensor) -> Tensor:
        holder["phase"].steps += 1
        return net(x).abs().mean() if holder["phase"] is warm_up else net(x).square().mean()

    compiled_step, losses = compiled(step), []
    for phase in (warm_up, main, main, warm_up):
        holder["phase"] = phase
        losses.append(compiled_step(row(2, 3)))
    return losses, warm_up.steps, main.steps


@pytest.mark.slow
@steps()
def test_ghost_batch_norm_with_a_short_last_chunk(compiled: Compile[Any]) -> Any:
    """Batch normalization of chunks of a batch, as tabular models have it, where the chunks differ in size.

    https://github.com/dreamquark-ai/tabnet/issues/243 and https://github.com/pytorch-tabular/pytorch_tabular/issues/166
    """
    norm, head = nn.BatchNorm1d(3, momentum=0.02), nn.Linear(3, 1)

    def step(x: Tensor) -> Tensor:
        chunks = x.chunk(-(-x.size(0) // 4), 0)
        return head(torch.cat([norm(chunk) for chunk in chunks]).relu()).square().mean()

    compiled_step, losses = compiled(step), []
    for rows in (8, 8, 7):
        losses.append(compiled_step(row(rows, 3).sin() * 3))
        losses[-1].backward()
    return losses, norm, head


@steps()
def test_a_batch_norm_without_statistics(compiled: Compile[Any]) -> Any:
    """`track_running_stats=False` was advised where losses of training and validation differ; then it has no buffers.

    https://github.com/chemprop/chemprop/issues/607
    """
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.ReLU(), nn.Linear(4, 1))
    step = compiled(lambda x: net(x).square().mean())
    loss = step(row(6, 3).cos())
    loss.backward()
    net.eval()
    with torch.no_grad():
        validation = step(row(6, 3).sin())
    return loss, validation, net
