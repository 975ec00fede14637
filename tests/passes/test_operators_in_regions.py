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
    "binary_cross_entropy.": lambda x, y: F.binary_cross_entropy(x.nan_to_num().sigmoid(), share(y), y.detach()) * y,
    "binary_cross_entropy_backward": lambda x, y: F.binary_cross_entropy(share(x), share(y), reduction="none") * x * y,
    "binary_cross_entropy_with_logits": lambda x, y: (
        F.binary_cross_entropy_with_logits(x, share(y), y.detach(), pos_weight=y[0].detach()) * y
    ),
    "nll_loss": lambda x, y: F.nll_loss(x, labels(x), reduction="none")[:, None] * y + F.nll_loss(x, labels(x)),
    "nll_loss2d": lambda x, y: (
        F.nll_loss(x[None], labels(x.t())[None], y[:, 0].detach(), ignore_index=1)
        + F.nll_loss(x[None, ..., None], labels(x.t())[None, :, None], reduction="none").view(-1) * y
    ),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.detach().sign()) * y,
    "argmax": lambda x, y: x.argmax(-1, keepdim=True) * y + x.argmin(0) * x,
    "max.dim": lambda x, y: x.max(-1, keepdim=True).values * y + x.max(0).values,
    "min.dim": lambda x, y: x.min(-1, keepdim=True).values * y + x.min(0).values,
    "max.default": lambda x, y: x.max() * y + x.min(),
    "aminmax": lambda x, y: sum(torch.aminmax(x, dim=1, keepdim=True)) * y,
    "nansum": lambda x, y: x.nansum(-1, keepdim=True) * y + x.nansum(),
    "count_nonzero": lambda x, y: x.relu().count_nonzero(0) * y * x + x.relu().count_nonzero(),
    "trace": lambda x, y: x.square().trace() * y,
    "logit": lambda x, y: torch.logit(x.sigmoid() * 0.9 + 0.05) * y + torch.logit(x, eps=0.1),
    "aten.norm": lambda x, y: F.pairwise_distance(x, y)[:, None] * x + F.pairwise_distance(x, y, p=1)[:, None],
    "flip": lambda x, y: x.flip(0) * y.flip(0, 1) + x.exp().flip(1).t().flip(0).t(),
    "repeat": lambda x, y: x.repeat(2, 3)[: len(x), : x.shape[1]] * y + x.exp().repeat(3, 1, 1).sum(0),
    "aten.unfold.": lambda x, y: x.detach().unfold(0, 2, 1).sum(0)[:, :1].t() * y * x,
    "diagonal": lambda x, y: torch.diagonal(x.detach(), 0).exp().sum() * y * x + x.detach().diagonal(-1).sum(),
    "hardswish": lambda x, y: F.hardswish(x * 2) * y,
    "copysign": lambda x, y: torch.copysign(x, y - 1) + torch.copysign(y, -2.0),
    "replication_pad": lambda x, y: F.pad(x.detach()[None], (1, 3), "replicate")[0, :, 1:-3] * y * x,
    "reflection_pad": lambda x, y: F.pad(x.detach().exp().t()[None], (1, 1), "reflect")[0, :, 2:].t() * y[:1] * x[:1],
    "batch_norm": lambda x, y: F.batch_norm(x, *x.detach().aminmax(dim=0), y[0], y[1], training=True) + x,
    "scatter": lambda x, y: (
        torch.zeros_like(x).scatter(1, labels(x)[:, None], x[:, :1])
        + torch.ones_like(x).scatter_add(0, labels(x.t())[None], x[:1])
        + torch.full_like(x, 2.0).scatter(1, labels(x)[:, None], 3.0) * y
        + x.gather(1, labels(x)[:, None])
    ),
    "aten.index.": lambda x, y: (
        x[torch.arange(len(x)), -1 - labels(x)][:, None] * y + x[None].exp()[0, labels(x.t())][: len(x)]
    ),
    "fill": lambda x, y: shifted(x, 2.0) * y + shifted(y.exp(), -1.0).relu(),
    "slice_backward": lambda x, y: x[1:].exp().sum() * y + x[:, -1].exp()[:, None] * x[0],
}


def share(x: Tensor) -> Tensor:
    """Numbers from 0 to 1."""
    return x.detach().nan_to_num().sigmoid()


def shifted(x: Tensor, first: float) -> Tensor:
    """As encoder-decoders shift their labels."""
    result = x.new_zeros(x.shape)
    result[1:] = x[:-1].clone()
    result[0] = first
    return result


def labels(x: Tensor) -> Tensor:
    """A column for each row."""
    return torch.arange(len(x)) % x.shape[1]


SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 1e30, -1e30, 88.0, -88.0, 0.5, 2.0, -3.0]


def numbers(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, *shape, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), (y.abs() + 0.1).to(dtype).requires_grad_()


def step_of(name: str, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    result = OPERATORS[name](x * 1.1, y * 0.9)
    return (result, *torch.autograd.grad((result * 1.3).sigmoid().sum(), (x, y)))


@pytest.mark.sampled(12)
@pytest.mark.filterwarnings("ignore:std:UserWarning")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((6, 37), torch.float32),
        ((2, 1), torch.bfloat16),
        *(
            pytest.param(shape, dtype, marks=pytest.mark.sweep)
            for shape, dtype in [
                ((8, 16), torch.float32),
                ((2, 1), torch.float32),
                ((8, 16), torch.bfloat16),
                ((6, 37), torch.bfloat16),
            ]
        ),
    ],
)
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


@pytest.mark.parametrize("part", range(4))
@pytest.mark.sampled(2)
def test_operators_have_eagers_values_at_special_numbers(part: int) -> None:
    x = torch.tensor(SPECIAL).repeat(16, 1)
    y = x.t().contiguous()
    operators = {name: OPERATORS[name] for name in list(OPERATORS)[part::4]}

    def values(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {name: operator(x, y) for name, operator in operators.items()}

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(values, backend=backend())(x, y), values(x, y), equal_nan=True)


def test_a_window_of_one_number() -> None:
    number = torch.tensor(3.5)
    compiled = torch.compile(lambda x: x.unfold(0, 1, 1).exp(), backend=backend())
    torch.testing.assert_close(compiled(number), number.unfold(0, 1, 1).exp())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_limits_of_logit_are_rounded_to_its_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1e-3, 0.5, 0.999, 1.0, math.nan], dtype=dtype)
    compiled = torch.compile(lambda x: torch.logit(x, 1e-3), backend=backend())
    torch.testing.assert_close(compiled(x), torch.logit(x, 1e-3), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64])
def test_extremes_of_equal_elements_have_the_first_index(dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 3, 3, 0, 0], [2, 2, 2, 2, 2], [0, 1, 0, 3, 3]]).to(dtype)
    function = lambda x: (*x.max(1), *x.min(0, keepdim=True), *torch.aminmax(x, dim=1), x.count_nonzero(0))  # noqa: E731
    for actual, expected in zip(torch.compile(function, backend=backend())(x), function(x), strict=True):
        assert torch.equal(actual, expected)
