"""Public reports of mixed and low precision that compilers get wrong, as programs of our own, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compare import backend
from tests.reports.report import Compile, Strategy, row, steps, trained, trainings

pytestmark = pytest.mark.filterwarnings("ignore:You .* Skipping val loop:UserWarning")


def low() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@steps()
def test_a_region_without_autocast(compiled: Compile[Any]) -> Any:
    """In the backward of a region with autocast disabled, matmuls were computed in low precision.

    https://github.com/pytorch/pytorch/issues/179804
    """
    layer = nn.Linear(16, 16)
    x = row(4, 16).bfloat16().requires_grad_()

    def exact(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() @ layer.weight.t()

    with low():
        result = compiled(exact)(x)
    result.sin().sum().backward()
    return result, x.grad, layer


@steps()
def test_large_gradients_of_a_float32_head(compiled: Compile[Any]) -> Any:
    """Large gradients of a float32 region behind a low-precision matmul became infinite.

    https://github.com/pytorch/pytorch/issues/153044
    """

    class Model(nn.Module):
        mix: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mix", torch.ones(4, 4))
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            mixed = x @ self.mix
            with torch.autocast("cpu", enabled=False):
                return self.head(mixed.float())

    model = Model()
    with low():
        result = compiled(model)(torch.ones(1, 4))
    (result * 1e30).sum().backward()
    return result.dtype, [p.grad * 1e-30 for p in model.parameters() if p.grad is not None]


@steps(bfloat16=True)
def test_a_region_for_another_device(compiled: Compile[Any]) -> Any:
    """`torch.autocast("cuda", enabled=False)` doesn't change the autocast of a CPU, so that matmuls stay in bfloat16.

    https://github.com/jwohlwend/boltz/issues/662
    """
    layer = nn.Linear(8, 8)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", enabled=False):
            hidden = layer(x.float())
        return hidden, hidden.float().square().mean()

    with low():
        hidden, loss = compiled(step)(row(3, 8))
    loss.backward()
    return hidden, loss, layer


@steps(bfloat16=True)
def test_a_matmul_that_is_rounded_before_a_sum(compiled: Compile[Any]) -> Any:
    """The rounding to bfloat16 between a matmul and a float32 sum was left out.

    https://github.com/pytorch/pytorch/issues/181568
    """
    x, w = row(5, 16).requires_grad_(), row(16, 6).cos().requires_grad_()

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rounded = (x @ w).to(torch.bfloat16)
        total = rounded + torch.full((5, 6), 1000.0)
        return total, total.mean(1, keepdim=True) - rounded

    total, rest = compiled(step)(x, w)
    rest.sum().backward()
    return total, rest, x.grad, w.grad


@steps(bfloat16=True)
def test_a_default_dtype_of_bfloat16(compiled: Compile[Any]) -> Any:
    """With `torch.set_default_dtype(torch.bfloat16)` constants and drawn numbers had another dtype in graphs.

    https://github.com/pytorch/pytorch/issues/138015
    """
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = nn.Linear(4, 4)

        def step(x: Tensor) -> tuple[Tensor, Any, Tensor]:
            weights = torch.linspace(0, 1, 4)
            return (layer(x) * weights).sum(), torch.randn(2).dtype, torch.tensor(0.5) * weights

        loss, dtype, scaled = compiled(step)(torch.ones(2, 4))
        loss.backward()
        return loss, dtype, scaled, layer
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_backward_outside_of_the_default_dtype(dtype: torch.dtype) -> None:
    """Lightning leaves the default dtype of `precision="64-true"` before the backward, which may need another graph."""

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (x @ w) @ torch.eye(4) + torch.linspace(0, 1, 4)
        return hidden.square().mean(), hidden

    x, w, gradients = torch.randn(3, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype, requires_grad=True), []
    for call in (step, torch.compile(step, backend=backend())):
        torch.set_default_dtype(dtype)
        try:
            loss, hidden = call(x, w)
        finally:
            torch.set_default_dtype(torch.float32)
        gradients += torch.autograd.grad(loss + hidden.abs().sum(), w)
    torch.testing.assert_close(*gradients)


class Encoder(nn.Module):
    """Attention with a causal mask and a padding mask, as forecasting models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key, self.value = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        query, key = self.query_key(x).chunk(2, -1)
        scores = query @ key.transpose(1, 2) / 8**0.5
        later = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later | padded[:, None], float("-inf"))
        return (scores.softmax(-1) @ self.value(x)).tanh()


@pytest.mark.slow
@trainings(bfloat16=True)
def test_attention_masks_in_mixed_precision(strategy: Strategy) -> Any:
    """Masks of -1e9 overflow in low precision, so that users change them to infinities; the training must work.

    https://github.com/sktime/pytorch-forecasting/issues/1325 and https://github.com/unit8co/darts/issues/3081
    """
    encoder, head = Encoder(), nn.Linear(8, 1)

    def loss_of(x: Tensor) -> Tensor:
        padded = torch.arange(6) > 3 + torch.arange(len(x))[:, None] % 3
        hidden = encoder(x.view(-1, 6, 8), padded)
        return F.smooth_l1_loss(head(hidden)[~padded].float(), x.view(-1, 6, 8).mean(-1, keepdim=True)[~padded])

    return trained([encoder, head], loss_of, row(32, 48).sin(), strategy, precision="bf16-mixed")


@pytest.mark.slow
@trainings(bfloat16=True)
def test_a_transformer_encoder_that_is_validated_in_mixed_precision(strategy: Strategy) -> Any:
    """`nn.TransformerEncoder` fails under autocast in evaluation mode, where it takes its fast path.

    https://github.com/Lightning-AI/pytorch-lightning/issues/19980
    """
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    parts = [encoder, nn.Linear(8, 1)]
    return trained(parts, lambda x: parts[1](encoder(x.view(-1, 4, 8))).square().mean(), row(16, 32).sin(), strategy,
                   precision="bf16-mixed", validates=True)  # fmt: skip


@trainings(bfloat16=True)
def test_weights_in_bfloat16(strategy: Strategy) -> Any:
    """A compiled model that is trained with `precision="bf16-true"` failed with mixed dtypes in its backward.

    https://github.com/Lightning-AI/pytorch-lightning/issues/19207
    """
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
    return trained([net], lambda x: net(x).square().mean(), row(16, 8).sin(), strategy, precision="bf16-true")
