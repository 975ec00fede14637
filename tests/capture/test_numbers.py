"""Numbers that change at every step, which must not recompile at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_ort.errors import CaptureError
from tests.compare import SINCE_2_15, backend


def test_an_annealed_float_and_a_step_counter_need_few_graphs() -> None:
    engine = backend()
    weight = torch.randn(4, requires_grad=True)

    def step(weight: torch.Tensor, batch_idx: int, beta: float) -> torch.Tensor:
        return (weight**2).sum() * (batch_idx / 100) + beta * weight.sum()

    compiled = torch.compile(step, backend=engine)
    for batch_idx in range(12):
        beta = min(1.0, batch_idx / 10) + 0.05
        loss = compiled(weight, batch_idx, beta)
        torch.testing.assert_close(loss, step(weight, batch_idx, beta))
        (gradient,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(gradient, 2 * weight.detach() * batch_idx / 100 + beta)
    assert len(engine.compile_log.graphs) <= 4


BESIDE_SIZES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "a size of an input": lambda x, beta: x.square().sum() * (beta / x.shape[0]),
    "a size of a computed value": lambda x, beta: x.square().sum() * (beta * (x @ x.t()).size(0)),
    "a length": lambda x, beta: (x * 2).sum() * beta * len(x * 2),
    "the smaller": lambda x, beta: x.square().sum() * min(beta, x.shape[0]),
    "by name": lambda x, beta: (x * torch.tensor(data=beta)).sum(),
    "as an integer": lambda x, beta: (x * torch.tensor(beta * 1000, dtype=torch.long)).sum(),
    "as a complex number": lambda x, beta: (x * torch.tensor(beta, dtype=torch.complex128)).abs().sum(),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BESIDE_SIZES)
def test_a_number_and_a_size_that_change(name: str, default: torch.dtype) -> None:
    compiled = torch.compile(BESIDE_SIZES[name], backend=backend())
    torch.set_default_dtype(default)
    try:
        for rows, beta in ((3, 0.1), (4, 0.257), (5, 0.3), (7, 0.5)):
            x = torch.randn(rows, 4, dtype=torch.float32, requires_grad=True)
            actual, expected = compiled(x, beta), BESIDE_SIZES[name](x, beta)
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(torch.autograd.grad(actual, x), torch.autograd.grad(expected, x))
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_branch_on_the_step_counter_compiles_two_graphs() -> None:
    engine = backend()
    weight = torch.randn(4, requires_grad=True)

    def step(weight: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (weight**2).sum() * 2 if batch_idx % 5 == 0 else (weight**2).sum()

    compiled = torch.compile(step, backend=engine)
    for batch_idx in range(20):
        torch.testing.assert_close(compiled(weight, batch_idx), step(weight, batch_idx))
    assert len(engine.compile_log.graphs) == 2


@pytest.mark.parametrize("axis", [0, 1])
def test_a_number_that_is_not_an_operand_is_a_key(axis: int) -> None:
    engine = backend()
    x = torch.randn(3, 3, requires_grad=True)

    def step(x: torch.Tensor, smoothing: float, repeats: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(x, torch.tensor([0, 1, 2]), label_smoothing=smoothing)
        return loss + x.repeat(repeats, 1).sum(axis).sum()

    compiled = torch.compile(step, backend=engine)
    for smoothing, repeats in [(0.1, 2), (0.2, 3), (0.3, 4), (0.1, 3)]:
        torch.testing.assert_close(compiled(x, smoothing, repeats), step(x, smoothing, repeats))


def test_a_float_attribute_of_a_module_can_change() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.scale = 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.scale).sum()

    module, x, engine = Scaled(), torch.randn(2, 3), backend()
    compiled = torch.compile(module, backend=engine)
    for k in range(6):
        module.scale = 0.5 + k
        torch.testing.assert_close(compiled(x), module(x))
    assert len(engine.compile_log.graphs) <= 3


def test_a_counter_that_the_module_increments() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 1)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x).sum() / self.calls

    module, x, engine = Counting(), torch.randn(2, 3), backend()
    plain = module.linear(x).sum()
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        compiled = torch.compile(module, backend=engine)
        for k in range(1, 20):
            torch.testing.assert_close(compiled(x), plain / k)
            assert module.calls == k
    assert len(engine.compile_log.graphs) <= 4


def test_a_number_that_is_used_and_returned_does_not_recompile() -> None:
    # As in `weight = min(1.0, self.global_step / 1000); self.log("weight", weight)`.
    engine = backend()
    x = torch.randn(4, requires_grad=True)

    def step(x: torch.Tensor, number: int) -> tuple[torch.Tensor, float]:
        weight = min(1.0, number / 10)
        return (x**2).sum() * weight + x.double().sum() * weight, weight

    compiled = torch.compile(step, backend=engine)
    for number in range(2, 14):
        (loss, weight), (expected, expected_weight) = compiled(x, number), step(x, number)
        torch.testing.assert_close(loss, expected)
        assert weight == expected_weight
    assert len(engine.compile_log.graphs) <= 3


@pytest.mark.parametrize("as_tensor", [torch.tensor, torch.scalar_tensor], ids=lambda function: function.__name__)
def test_a_number_that_becomes_a_tensor_does_not_recompile(as_tensor: Callable[[float], torch.Tensor]) -> None:
    engine = backend()
    x = torch.randn(4, requires_grad=True)

    def step(x: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = as_tensor(number / 10).to(x.device)
        return x.square().sum() * weight, weight.detach()

    compiled = torch.compile(step, backend=engine)
    for number in range(2, 10):
        torch.testing.assert_close(compiled(x, number), step(x, number))
    assert len(engine.compile_log.graphs) <= 2


# Not in the stubs.
FOREACH: Any = torch
AVERAGES, WEIGHTS = [torch.zeros(2, 3), torch.zeros(4)], [torch.ones(2, 3), torch.arange(4.0)]


def averaged(x: torch.Tensor, number: float) -> torch.Tensor:
    with torch.no_grad():
        FOREACH._foreach_mul_(AVERAGES, number)
        FOREACH._foreach_add_(AVERAGES, WEIGHTS, alpha=1 - number)
    return x * AVERAGES[1]


def interpolated(x: torch.Tensor, number: float) -> torch.Tensor:
    with torch.no_grad():
        FOREACH._foreach_lerp_(AVERAGES, WEIGHTS, number)
    return x * AVERAGES[1]


SETTINGS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "an average of weights": averaged,
    "an interpolation of weights": interpolated,
    "alpha": lambda x, n: torch.add(x, x * 2, alpha=n) + (x * 3).sub(x, alpha=n),
    "alpha in place": lambda x, n: x.clone().add_(x * 2, alpha=-n),
    "lerp": lambda x, n: torch.lerp(x, x * 2, n) + x.exp().lerp(x, n),
    "comparisons": lambda x, n: x * (x > n) + x * (n >= x.sigmoid()) + x * x.ge(n),
    "a comparison of integers": lambda x, n: x * (torch.arange(4) < int(n * 8)),
    "where": lambda x, n: torch.where(x > 0, x, n) + x * torch.where(x > 0, n, 1.0),
    "masked_fill": lambda x, n: x.masked_fill(x > 0.1, -n).square(),
    "full": lambda x, n: x * torch.full((5, 4), n) * torch.full_like(x, n),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changes(name: str, dtype: torch.dtype) -> None:
    engine, step = backend(), SETTINGS[name]
    compiled = torch.compile(step, backend=engine)
    for number in (0.5, 0.75, 0.2, 0.9, 0.33):
        x = torch.randn(5, 4, dtype=dtype, requires_grad=True)
        before = [value.clone() for value in AVERAGES]
        actual = compiled(x, number)
        averages = [value.clone() for value in AVERAGES]
        for value, old in zip(AVERAGES, before, strict=True):
            value.copy_(old)
        expected = step(x, number)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(averages, AVERAGES)
        torch.testing.assert_close(torch.autograd.grad(actual.sum(), x), torch.autograd.grad(expected.sum(), x))
    # In 16 bits, an interpolation and a sum round once in eager.
    if dtype != torch.bfloat16 or not name.startswith(("alpha", "lerp")):
        assert len(engine.compile_log.graphs) <= 3


@pytest.mark.parametrize("hard", [False, True])
def test_a_temperature_that_changes(hard: bool) -> None:
    def step(x: torch.Tensor, temperature: float) -> torch.Tensor:
        return torch.nn.functional.gumbel_softmax(x, tau=temperature, hard=hard).square()

    engine, x = backend(), torch.randn(5, 4, requires_grad=True)
    compiled = torch.compile(step, backend=engine)
    for temperature in (1.0, 0.9, 0.7, 0.6):
        results = []
        for call in (compiled, step):
            torch.manual_seed(1)
            results.append(call(x, temperature))
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(result[:, 0].sum(), x) for result in results))
    assert len(engine.compile_log.graphs) == 2


class Reversed(torch.autograd.Function):
    """Reverses the gradient; the strength follows a schedule."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.strength = strength
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -(ctx.strength / 2 + 1) * gradient, None


# Dynamo's own use of torch's classes.
of_functions = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@of_functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), ()])
def test_an_autograd_function_with_a_changing_float(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if dtype == torch.bfloat16 and not shape and SINCE_2_15:
        pytest.skip("a float32 tensor would change the dtype of the gradient: in eager")
    engine = backend()

    def step(x: torch.Tensor, strength: float) -> torch.Tensor:
        return Reversed.apply(x, strength).square().sum()

    compiled, x = torch.compile(step, backend=engine), torch.full(shape, 0.7, dtype=dtype, requires_grad=True)
    for strength in (0.1, 0.2, 0.35, 0.5):
        own, reference = (torch.autograd.grad(call(x, strength), x)[0] for call in (compiled, step))
        torch.testing.assert_close(own, reference)
    assert len(engine.compile_log.graphs) == 2


class Powered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exponent: float) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.nn.functional.threshold(x, exponent, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


@of_functions
def test_an_autograd_function_that_uses_a_changing_float_other_than_in_arithmetic() -> None:
    compiled = torch.compile(lambda x, exponent: Powered.apply(x, exponent).sum(), backend=backend())
    x = torch.ones(3, requires_grad=True)
    compiled(x, 0.5)
    with pytest.raises(CaptureError, match="a number that changes from step to step.*Pass the number.*as a tensor"):
        compiled(x, 0.7)


class Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
        factor: Any = beta
        factor *= x
        total: Any = beta
        total += x.double().sum()
        ctx.beta = beta
        return factor + total + beta

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.beta, None


@of_functions
def test_an_autograd_function_that_accumulates_into_a_changing_float() -> None:
    compiled = torch.compile(lambda x, beta: Accumulated.apply(x, beta), backend=backend())
    for beta in (0.1, 0.2, 0.3):
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x, beta), beta * x + (beta + x.double().sum()) + beta)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(x.sum(), dtype=torch.float64) * x


def weighted(x: torch.Tensor) -> torch.Tensor:
    values = [x.mean(), x.square().mean()]
    return (torch.tensor(values).softmax(0) * torch.stack(values)).sum()


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor", "ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("step", [scaled, weighted])
def test_a_tensor_of_tensors_has_its_own_dtype_and_no_gradient(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weights = [torch.arange(4.0).requires_grad_() for _ in range(2)]
    for weight, function in zip(weights, (step, torch.compile(step, backend=backend(fallback="warn"))), strict=True):
        function(weight).sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    torch.testing.assert_close(step(weights[0]), step(weights[1]))


NARROW: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "a mean": lambda x, n: x.mean() / n,
    "a product": lambda x, n: x.mean() * 1e-4 * n,
    "of integers": lambda x, n: (x > 0).long() * n,
}


@pytest.mark.parametrize("name", NARROW)
def test_numbers_beyond_float16(name: str) -> None:
    compiled, x = torch.compile(NARROW[name], backend=backend()), torch.full((8,), 100.0).half()
    for number in (2.0, 3.0, 100_000.0):
        torch.testing.assert_close(compiled(x, number), NARROW[name](x, number))


def test_constants_beyond_float16() -> None:
    def compared(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x > 1e5, x + 1e5, x - 1e9, (x < -70000.0).half() * x

    x = torch.randn(40).half()
    for actual, expected in zip(
        torch.compile(compared, backend=backend(fallback="error"))(x), compared(x), strict=True
    ):
        assert torch.equal(actual, expected)
