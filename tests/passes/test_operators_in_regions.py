"""Operators of torch that regions compute: eager's numbers and gradients, and no call of torch is left."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compare import backend

# By ATen's name. Arguments are two matrices of one shape, the second positive.
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "xlogy": lambda x, y: torch.xlogy(x, y) + torch.xlogy(2.0, y),
    "logaddexp": torch.logaddexp,
    "frac": lambda x, y: (x * 3).frac() + y,
    "celu": lambda x, y: F.celu(x, 0.7) * y,
    "addcmul": lambda x, y: torch.addcmul(x, x, y) + torch.addcdiv(x, x, y, value=0.3),
    "nan_to_num": lambda x, y: torch.nan_to_num(x) + torch.nan_to_num(y, 1.0, 2.0, 3.0),
    "tril": lambda x, y: x.tril() + x.triu(1) * y + x.tril(-2).exp(),
    "std": lambda x, y: x.std(-1, keepdim=True) * y + x.std(),
    "logsumexp": lambda x, y: x.logsumexp(-1, keepdim=True) * y + x.logsumexp((0, 1)),
    "linalg_vector_norm": lambda x, y: F.normalize(x, dim=-1) * x.norm(p=1) + y.norm(p=math.inf, dim=0),
    "log_sigmoid": lambda x, y: F.logsigmoid(x) * y,
    "prelu": lambda x, y: F.prelu(x, y[0, :1]) + F.prelu(x, y[0]),
    "roll": lambda x, y: x.roll(1, 0) * y.roll((-3, 5), (1, 0)) + x.roll((2, -1), (0, 0)) + y.exp().roll(7, -1),
    "glu": lambda x, y: F.glu(x, 0) + F.glu(y, 0),
    "huber_loss": lambda x, y: F.huber_loss(x, y, delta=0.6) + F.huber_loss(x, y, reduction="none"),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, beta=0.6) + F.smooth_l1_loss(x, y, reduction="sum"),
}
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 1e30, -1e30, 88.0, -88.0, 0.5, 2.0, -3.0]


def numbers(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, *shape, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), (y.abs() + 0.1).to(dtype).requires_grad_()


def step_of(name: str, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    result = OPERATORS[name](x * 1.1, y * 0.9)
    return (result, *torch.autograd.grad((result * 1.3).sigmoid().sum(), (x, y)))


@pytest.mark.filterwarnings("ignore:std:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 16), (6, 37), (2, 1)])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_eagers_numbers_and_gradients(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, y = numbers(shape, dtype)
    exact = step_of(name, *(one.detach().double().requires_grad_() for one in (x, y)))
    expected, engine = step_of(name, x, y), backend()

    @torch.compile(backend=engine)
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        result = OPERATORS[name](x * 1.1, y * 0.9)
        return result, (result * 1.3).sigmoid().sum()

    result, loss = forward(x, y)
    found = (result, *torch.autograd.grad(loss, (x, y)))
    for actual, eager, right in zip(found, expected, exact, strict=True):
        assert (actual.shape, actual.dtype) == (eager.shape, eager.dtype)
        distance, allowed = ((one.double() - right).abs().nan_to_num(0.0) for one in (actual, eager))
        scale = right.nan_to_num(0.0).abs().max()
        assert (distance <= 4 * allowed.max() + (1e-2 if dtype == torch.bfloat16 else 1e-6) * scale).all()
        assert torch.equal(actual.isnan(), eager.isnan())
    assert not any(name in target for target in engine.compile_log.graphs[0].torch_operators)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_eagers_values_at_special_numbers(name: str) -> None:
    x = torch.tensor(SPECIAL).repeat(16, 1)
    y = x.t().contiguous()
    compiled = torch.compile(OPERATORS[name], backend=backend())
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, y), OPERATORS[name](x, y), equal_nan=True)
