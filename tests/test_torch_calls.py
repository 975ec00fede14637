"""Operators that run as torch's own: their gradients, what they keep and for how long, and what they draw."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_ort.compiler.kernels.torch_call import BACKWARD, NAME, TorchCall, TorchCalls, call_of, words_for
from lit_ort.runtime.buffers import BufferPool
from tests.compare import TOLERANCE, assert_same_step, backend, compiled, relative_error

CALL = TorchCall("aten.elu.default", [{"tensor": 0}, 0.5], {})


def elu(wants: bool) -> TorchCall:
    return CALL.reordered([0], int(wants), [0] if wants else [])


def test_a_description_is_read_back() -> None:
    call = TorchCall("aten.add.Tensor", [{"tensor": 1}, {"tensor": 0}], {"alpha": 2}, wants=1, used=(0,))
    assert call_of(call.describe()) == call
    a, b = torch.randn(3), torch.randn(3)
    assert torch.equal(call.apply([a, b])[0], torch.add(b, a, alpha=2))


def test_words_for_what_operators_are_given() -> None:
    tensors: list[Tensor] = []
    x = torch.randn(2)
    given = [x, [x, None], 1, 2.5, "mean", True, torch.float32, torch.contiguous_format, torch.device("cpu")]
    words = words_for(given, tensors)
    assert len(tensors) == 1
    call = TorchCall("aten.elu.default", words, {})
    assert call_of(call.describe()) == call
    with pytest.raises(TypeError, match="complex"):
        words_for(1j, tensors)


def test_what_autograd_keeps_goes_with_the_backward_or_with_its_ticket() -> None:
    calls, pool, x = TorchCalls(), BufferPool(), torch.randn(5)
    kernels = calls.kernels
    description = elu(True).describe()
    result, ticket = kernels[NAME].run(description, pool, x)
    assert len(calls._saved) == 1
    (gradient,) = kernels[BACKWARD].run(description, pool, torch.ones(5), x, result, ticket)
    assert not calls._saved
    leaf = x.clone().requires_grad_()
    F.elu(leaf, 0.5).sum().backward()
    torch.testing.assert_close(gradient, leaf.grad, rtol=0, atol=0)
    outputs = kernels[NAME].run(description, pool, x)
    assert len(calls._saved) == 1
    del outputs
    gc.collect()
    assert not calls._saved


def test_without_gradients_nothing_is_kept() -> None:
    calls = TorchCalls()
    (result,) = calls.kernels[NAME].run(elu(False).describe(), BufferPool(), torch.randn(5))
    assert not result.requires_grad
    assert not calls._saved


def test_nothing_piles_up_over_many_steps() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.ELU(), nn.Linear(4, 1))
    step = compiled(lambda x: layer(x).mean())
    held = []
    for k in range(3000):
        loss = step(torch.randn(2, 4))
        if k % 2:
            loss.backward()
        if k % 1000 == 999:
            gc.collect()
            held.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
    assert held[2] <= held[1] + 5


def test_a_result_that_is_an_input_hands_its_gradient_on() -> None:
    kernels, x = TorchCalls().kernels, torch.randn(3)
    given: list[Tensor] = []
    words = words_for([[x, torch.zeros(3)]], given)
    call = TorchCall("aten.broadcast_tensors.default", words, {}, (0, 1)).reordered([0, 1], 1, [0])
    *results, ticket = kernels[NAME].run(call.describe(), BufferPool(), *given)
    (gradient,) = kernels[BACKWARD].run(call.describe(), BufferPool(), torch.full((3,), 2.0), *given, *results, ticket)
    assert torch.equal(gradient, torch.full((3,), 2.0))


def test_a_result_that_lies_in_an_input_gets_memory_of_its_own() -> None:
    calls, x = TorchCalls(), torch.randn(3, 3)
    call = TorchCall("aten.diagonal.default", [{"tensor": 0}], {})
    (result,) = calls.kernels[NAME].run(call.describe(), BufferPool(), x)
    x.zero_()
    assert bool(result.any())


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    # An operator in place behind a call must not write over what autograd has kept of it.
    "relu behind it": lambda x: F.relu(F.elu(x)).square().sum(),
    "several results": lambda x: (x.sort(0)[0] * x.sort(0)[1]).sum() + x.aminmax().max,
    "one input twice": lambda x: torch.cdist(x, x, p=1.0).sum() + torch.atan2(x, x + 3).sum(),
    "one of two inputs": lambda x: torch.atan2(x.detach(), x).sum(),
    "a constant": lambda x: torch.atan2(x, torch.ones(3)).sum(),
    "a result without gradient": lambda x: (x.cummax(0)[0] * 2).sum() + x.argsort(0).float().mean(),
    "calls on calls": lambda x: F.mish(F.celu(F.softplus(x))).cumsum(0).prod(),
}


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(3, 3))


@pytest.mark.parametrize("name", STEPS)
def test_gradients(name: str) -> None:
    engine = assert_same_step(Step(), lambda module: STEPS[name](module.x))
    (report,) = engine.compile_log.graphs
    assert report.torch_operators
    assert "by torch" in str(report)


def test_several_outputs_with_gradients_in_a_split_graph() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.elu(x), x.cumsum(0)

    engine = backend()
    first, second = torch.compile(step, backend=engine)(x)
    other = torch.compile(step, backend=engine)(x)
    (other[0].sum() * 2).backward()
    (first * 3 + second).sum().backward()
    (step(y)[0].sum() * 2 + (step(y)[0] * 3 + step(y)[1]).sum()).backward()
    assert engine.compile_log.graphs[0].kind == "split"
    assert x.grad is not None
    assert y.grad is not None
    assert relative_error(x.grad, y.grad) <= TOLERANCE


def test_draws_follow_the_seed_and_leave_torchs_generator_alone() -> None:
    x = torch.randn(50, 4, 3, requires_grad=True)
    step = compiled(lambda x: F.feature_alpha_dropout(F.rrelu(x, training=True), 0.4, True).square().sum())

    def drawn(seed: int) -> tuple[list[float], Tensor]:
        torch.manual_seed(seed)
        return [step(x).item() for _ in range(3)], torch.rand(1)

    assert drawn(1) == drawn(1)
    assert drawn(1)[0] != drawn(2)[0]
    assert len(set(drawn(1)[0])) == 3


def test_the_gradient_belongs_to_the_draw() -> None:
    x = torch.ones(1000, requires_grad=True)
    loss = compiled(lambda x: F.rrelu(-x, 0.1, 0.9, True).sum())(x)
    loss.backward()
    assert x.grad is not None
    assert float(x.grad.std()) > 0.1
    torch.testing.assert_close(x.grad.sum(), loss.detach())


class Counting(nn.Module):
    """Changes its buffers in several ways."""

    mean: Tensor
    count: Tensor
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("queue", torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.queue[self.count % 4] = x[0]
        self.count += 1
        return (x * self.weight - self.mean).square().mean()


def test_buffers_that_a_step_changes() -> None:
    module, twin = Counting(), Counting()
    twin.load_state_dict(module.state_dict())
    kept = module.mean
    step = compiled(lambda x: module(x))
    for k in range(6):
        x = torch.randn(5, 3)
        loss, expected = step(x), twin(x)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        assert int(module.count) == k + 1
    assert module.mean is kept
    for (name, buffer), other in zip(module.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=name)
    assert module.weight.grad is not None
    assert twin.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, twin.weight.grad)


def test_statistics_stay_in_evaluation_and_move_in_training() -> None:
    module = nn.BatchNorm1d(3, momentum=0.2)
    twin = nn.BatchNorm1d(3, momentum=0.2)
    step = compiled(lambda x: module(x).exp().mean())
    for mode in (True, True, False, True):
        module.train(mode)
        twin.train(mode)
        x = torch.randn(6, 3)
        torch.testing.assert_close(step(x), twin(x).exp().mean())
        for (name, buffer), other in zip(module.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(buffer, other, msg=f"{name} {mode}")


def test_results_that_depend_on_no_input() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = torch.ones(3, 3).tril()
        torch._dynamo.graph_break()
        return (x * mask).square().sum(), mask, (x * mask.bool()).mean()

    x = torch.randn(3, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    found, expected = compiled(step)(x), step(y)
    (found[0] + found[2]).backward()
    (expected[0] + expected[2]).backward()
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(x.grad, y.grad)
    found[1].zero_()
    assert bool(compiled(step)(x)[1].any())


def test_numbers_that_are_drawn_are_no_constants() -> None:
    step = compiled(lambda x: (x.sum(), torch.rand(3)))
    assert not torch.equal(step(torch.ones(2))[1], step(torch.ones(2))[1])
