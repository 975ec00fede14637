"""The attention fusion."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_ort.fusions import fuse_attention
from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from tests.compare import assert_same_step, backend, mostly, relative_error
from tests.passes.reports import report_of

NAME, TARGET = "attention", "lit_ort.attention.default"
Step = Callable[[Any, Tensor], Tensor]


class Projection(nn.Module):
    """Queries, keys and values from one layer, a boolean mask, and a learned bias as a mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(2, 1, 5, 5))
        self.register_buffer("mask", torch.rand(2, 1, 5, 5) > 0.4)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.layer(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return query, key, value


def attend(dropout: float, **settings: Any) -> Step:
    return lambda m, x: F.scaled_dot_product_attention(*m.heads(x), dropout_p=dropout, **settings).square().sum()


def masked(m: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*m.heads(x), attn_mask=m.mask, dropout_p=0.2).square().sum()


def biased(m: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*m.heads(x), attn_mask=m.bias, dropout_p=0.2).square().sum()


def frozen_bias(m: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*m.heads(x), attn_mask=m.bias.detach(), dropout_p=0.2).square().sum()


def broadcast_query(m: Any, x: Tensor) -> Tensor:
    query, key, value = m.heads(x)
    return F.scaled_dot_product_attention(query[:1], key, value, dropout_p=0.2).square().sum()


def three_dimensions(m: Any, x: Tensor) -> Tensor:
    query, key, value = (part.flatten(0, 1) for part in m.heads(x))
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.2).square().sum()


def grouped(m: Any, x: Tensor) -> Tensor:
    query, key, value = m.heads(x)
    return F.scaled_dot_product_attention(query, key[:, :1], value[:, :1], dropout_p=0.2, enable_gqa=True).sum()


@pytest.fixture
def many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """All attention counts as attention to many keys."""
    monkeypatch.setattr(fuse_attention, "MOST_KEYS", 0)
    monkeypatch.setattr(fuse_attention, "MOST_KEYS_WITH_DROPOUT", 0)


@pytest.mark.usefixtures("many_keys")
@pytest.mark.parametrize("step", [attend(0.2), attend(0.2, is_causal=True, scale=0.3), masked, frozen_bias])
def test_fires(step: Step) -> None:
    engine = backend()
    torch.compile(step, backend=engine)(Projection(), torch.randn(2, 5, 8)).backward()
    assert report_of(engine, NAME).fired == 1
    assert engine.compile_log.graphs[0].torch_operators[TARGET] == 1


@pytest.mark.parametrize("few_keys", [False, True])
@pytest.mark.parametrize("mixed", [True, False])
def test_bfloat16_without_dropout(mixed: bool, few_keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is as close to float64's as eager's is, and no random numbers are drawn."""
    if not few_keys:
        monkeypatch.setattr(fuse_attention, "MOST_KEYS", 0)
    module, x = Projection(), torch.randn(2, 5, 8)
    step, engine = attend(0.0, is_causal=True), backend(precision="bf16-mixed" if mixed else "32-true")
    exact = gradient_of(step, copy.deepcopy(module).double(), x.double())
    low = module if mixed else module.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        eager = gradient_of(step, low, x.to(low.layer.weight.dtype))
    state = torch.get_rng_state()
    actual = gradient_of(torch.compile(step, backend=engine), low, x.to(low.layer.weight.dtype))
    assert relative_error(actual.double(), exact) <= 2 * relative_error(eager.double(), exact)
    assert torch.equal(torch.get_rng_state(), state)
    is_written = few_keys and has_bfloat16_matmuls()
    assert engine.compile_log.graphs[0].torch_operators.get(TARGET, 0) == (0 if is_written else 1)


def gradient_of(step: Step, module: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(step(module, x), module.layer.weight)[0]


def test_long_causal_attention_in_bfloat16_is_declined() -> None:
    x = torch.randn(1, 1, 512, 4, dtype=torch.bfloat16, requires_grad=True)
    engine = backend()
    torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True).sum(), backend=engine)(x)
    assert report_of(engine, NAME).declined


@pytest.mark.usefixtures("many_keys")
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (attend(0.0), "no dropout"),
        (biased, "the mask requires grad"),
        (broadcast_query, "broadcast"),
        (three_dimensions, "3 dimensions"),
        (grouped, "fewer heads"),
    ],
)
def test_must_not_fire(step: Step, reason: str) -> None:
    engine = backend()
    torch.compile(step, backend=engine)(Projection(), torch.randn(2, 5, 8)).backward()
    report = report_of(engine, NAME)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert TARGET not in engine.compile_log.graphs[0].torch_operators


@pytest.mark.usefixtures("many_keys")
@pytest.mark.parametrize("step", [attend(1e-9), attend(1e-9, is_causal=True, scale=0.3)])
def test_same_numbers(step: Step) -> None:
    engine = assert_same_step(Projection(), step, torch.randn(2, 5, 8))
    assert report_of(engine, NAME).fired == 1


@pytest.mark.usefixtures("many_keys")
def test_same_numbers_with_a_mask_and_disabled() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*m.heads(x), attn_mask=m.mask, dropout_p=1e-9).square().sum()

    module = Projection()
    module.mask[..., 0] = True
    engine = assert_same_step(module, step, torch.randn(2, 5, 8))
    assert report_of(engine, NAME).fired == 1
    torch.compiler.reset()
    engine = backend(disable_passes=(NAME,))
    torch.compile(masked, backend=engine)(module, torch.randn(2, 5, 8)).backward()
    assert NAME not in [report.name for report in engine.compile_log.graphs[0].passes]


def _mask(kind: str) -> dict[str, Any]:
    """A mask of three queries and five keys."""
    visible = torch.rand(2, 1, 3, 5) > 0.4
    # One query sees no key.
    visible[0, 0, 1] = False
    masks = {"bool": visible, "float": torch.randn(3, 5), "gradient": torch.randn(2, 1, 3, 5, requires_grad=True)}
    return {"attn_mask": masks[kind]} if kind in masks else {"is_causal": kind == "causal"}


SHAPES = {
    "heads": ((2, 3, 3, 4), (2, 3, 5, 4), (2, 3, 5, 6)),
    "broadcast": ((1, 3, 3, 4), (2, 1, 5, 4), (2, 3, 5, 4)),
    "without heads": ((2, 3, 4), (2, 5, 4), (2, 5, 4)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dropout", mostly(pytest.mark.sweep, [1e-9, 0.0], 2))
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "gradient"])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", mostly(pytest.mark.sweep, [torch.float32, torch.float64], 2))
def test_few_keys(dtype: torch.dtype, shapes: str, kind: str, dropout: float) -> None:
    if shapes == "without heads" and kind in ("bool", "gradient"):
        pytest.skip("these masks have four dimensions")
    settings = _mask(kind)
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in SHAPES[shapes]]
    if isinstance(mask := settings.get("attn_mask"), Tensor) and mask.is_floating_point():
        settings["attn_mask"] = mask = mask.detach().to(dtype).requires_grad_(mask.requires_grad)
    wanted = [*inputs, *(x for x in settings.values() if isinstance(x, Tensor) and x.requires_grad)]
    engine = backend()

    def attention_of(*args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, dropout_p=dropout, **kwargs)

    found = []
    for call in (attention_of, torch.compile(attention_of, backend=engine)):
        result = call(*inputs, **settings)
        found.append([result, *torch.autograd.grad(result.square().sum(), wanted)])
    for actual, expected in zip(*reversed(found), strict=True):
        assert relative_error(actual.detach(), expected.detach()) <= 1e-5
    assert found[0][0].stride() == found[1][0].stride()
    assert report_of(engine, NAME).fired == 1
    assert not any("attention" in name for name in engine.compile_log.graphs[0].torch_operators)


def test_few_keys_of_any_number() -> None:
    engine = backend()
    step = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True).sum(), backend=engine)
    for length in (5, 7, 9):
        x, twin = (torch.ones(2, 2, length, 4).cumsum(2).requires_grad_() for _ in range(2))
        step(x).backward()
        F.scaled_dot_product_attention(twin, twin, twin, is_causal=True).sum().backward()
        assert x.grad is not None
        assert twin.grad is not None
        assert relative_error(x.grad, twin.grad) <= 1e-5
    assert len(engine.compile_log.graphs) == 2


def test_autocast_does_not_convert_float64() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(F.linear(hidden, weight), labels)

    q, k, v = torch.randn(3, 2, 2, 9, 8, dtype=torch.float64)
    hidden, weight = torch.randn(1500, 8, dtype=torch.float64), torch.randn(200, 8, dtype=torch.float64)
    for function, inputs in ((attend, (q, k, v)), (loss, (hidden, weight, torch.arange(1500) % 200))):
        torch.testing.assert_close(torch.compile(function, backend=backend())(*inputs), function(*inputs))
