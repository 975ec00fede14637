"""Operators with randomly drawn shapes, axes, dtypes and edge values, compared with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.compare import backend

# Values at which gradients jump, vanish or are not finite.
EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 30.0, -90.0, float("inf"), float("nan"))
# A name, a function and its inputs.
Case = tuple[str, Callable[..., Tensor], list[Tensor]]

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "log": torch.log,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "relu": torch.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "gelu": F.gelu,
    "square": lambda x: x**2,
    "cube": lambda x: x**3,
    "power": lambda x: x**1.5,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "where": lambda a, b: torch.where(b > 0.3, a, b),
    "maximum": torch.maximum,
}
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "logsumexp": torch.logsumexp,
}

sizes = st.integers(1, 4)
shapes = st.lists(sizes, min_size=1, max_size=3).map(tuple)
types = st.sampled_from([torch.float32, torch.float32, torch.float32, torch.float64])


@st.composite
def tensors(draw: Any, shape: tuple[int, ...], dtype: torch.dtype, edges: bool = True) -> Tensor:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))), dtype=dtype)
    for _ in range(draw(st.integers(0, 2)) if edges else 0):
        value.view(-1)[draw(st.integers(0, value.numel() - 1))] = draw(st.sampled_from(EDGES))
    return value.requires_grad_()


@st.composite
def broadcast(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to another one."""
    trailing = shape[draw(st.integers(0, len(shape) - 1)) :]
    return tuple(1 if draw(st.booleans()) else size for size in trailing)


@st.composite
def unary(draw: Any) -> Case:
    name = draw(st.sampled_from(sorted(UNARY)))
    return name, UNARY[name], [draw(tensors(draw(shapes), draw(types)))]


@st.composite
def binary(draw: Any) -> Case:
    name, shape, dtype = draw(st.sampled_from(sorted(BINARY))), draw(shapes), draw(types)
    pair = [draw(tensors(shape, dtype)), draw(tensors(draw(broadcast(shape)), dtype))]
    return name, BINARY[name], pair[::-1] if draw(st.booleans()) else pair


@st.composite
def reduction(draw: Any) -> Case:
    name, shape = draw(st.sampled_from(sorted(REDUCTIONS))), draw(shapes)
    axes = tuple(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    keep = draw(st.booleans())
    return f"{name}{axes}", lambda x: REDUCTIONS[name](x, axes, keep), [draw(tensors(shape, draw(types)))]


@st.composite
def normalization(draw: Any) -> Case:
    shape, dtype = draw(shapes), draw(types)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    cases: dict[str, Case] = {
        "softmax": ("softmax", lambda x: x.softmax(axis), [draw(tensors(shape, dtype))]),
        "log_softmax": ("log_softmax", lambda x: x.log_softmax(axis), [draw(tensors(shape, dtype))]),
        "layer_norm": (
            "layer_norm",
            lambda x, w, b: F.layer_norm(x, w.shape, w, b),
            [draw(tensors(part, dtype, edges=False)) for part in (shape, shape[axis:], shape[axis:])]
            if axis < 0
            else [draw(tensors(part, dtype, edges=False)) for part in (shape, shape, shape)],
        ),
    }
    return cases[draw(st.sampled_from(sorted(cases)))]


@st.composite
def product(draw: Any) -> Case:
    rows, inner, columns, dtype = draw(sizes), draw(sizes), draw(sizes), draw(types)
    leading = draw(st.lists(sizes, max_size=2).map(tuple))
    other = draw(broadcast(leading)) if leading else ()
    left, right = draw(tensors((*leading, rows, inner), dtype)), draw(tensors((*other, inner, columns), dtype))
    if draw(st.booleans()) and not leading:
        bias = draw(tensors((columns,), dtype))
        return "linear", lambda x, w, b: F.linear(x, w.transpose(0, 1), b), [left, right, bias]
    return "matmul", torch.matmul, [left, right]


@st.composite
def movement(draw: Any) -> Case:
    shape, dtype = draw(shapes), draw(types)
    x, axis = draw(tensors(shape, dtype)), draw(st.integers(0, len(shape) - 1))
    order = draw(st.permutations(range(len(shape))))
    start = draw(st.integers(0, shape[axis] - 1))
    index = torch.tensor(draw(st.lists(st.integers(0, shape[axis] - 1), min_size=1, max_size=5)))
    part = draw(st.integers(1, shape[axis]))
    expanded = index.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    expanded = expanded.expand([len(index) if k == axis else size for k, size in enumerate(shape)])
    cases: dict[str, Callable[[Tensor], Tensor]] = {
        "permute": lambda x: x.permute(order),
        "flatten": lambda x: x.reshape(-1),
        "unsqueeze": lambda x: x.unsqueeze(axis) * 2,
        "squeeze": lambda x: x.squeeze(),
        "slice": lambda x: x.narrow(axis, start, shape[axis] - start),
        "stride": lambda x: x.transpose(0, axis)[::2],
        "expand": lambda x: x.expand(3, *shape),
        "tile": lambda x: x.repeat(2, *(1 + k % 2 for k in range(len(shape)))),
        "cat": lambda x: torch.cat([x, x * 2, x], axis),
        "stack": lambda x: torch.stack([x, x * 3], axis),
        "split": lambda x: torch.cat([piece * k for k, piece in enumerate(x.split(part, axis), 1)], axis),
        "index_select": lambda x: x.index_select(axis, index),
        "rows": lambda x: x[index % shape[0]],
        "gather": lambda x: x.gather(axis, expanded),
        "flip": lambda x: x.flip(axis),
        "roll": lambda x: x.roll(1, axis),
        "cumsum": lambda x: x.cumsum(axis),
        "select": lambda x: x.select(axis, start),
        "masked_fill": lambda x: x.masked_fill(x > 0.2, 0.5),
        "clamp": lambda x: x.clamp(-0.5, 0.5),
        "dropout": lambda x: F.dropout(x, 0.0, True),
    }
    name = draw(st.sampled_from(sorted(cases)))
    return f"{name} {axis}", cases[name], [x]


@st.composite
def loss(draw: Any) -> Case:
    rows, classes = draw(sizes), draw(st.integers(2, 5))
    labels = torch.tensor(draw(st.lists(st.integers(-1, classes - 1), min_size=rows, max_size=rows)))
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.2])),
        "weight": draw(st.none() | st.just(torch.linspace(0.5, 2.0, classes))),
    }
    scores = draw(tensors((rows, classes), torch.float32))

    def loss_of(x: Tensor) -> Tensor:
        weight = options["weight"]
        typed: dict[str, Any] = {**options, "weight": weight.to(x.dtype) if isinstance(weight, Tensor) else None}
        return F.cross_entropy(x, labels, ignore_index=-1, **typed)

    return "cross_entropy", loss_of, [scores]


cases = st.one_of(unary(), binary(), reduction(), normalization(), product(), movement(), loss())


@pytest.mark.slow
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    # A failure reports the operator and its input; shrinking the example would take minutes.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(cases, min_size=6, max_size=6))
def test_drawn_operators_match_eager(drawn: list[Case]) -> None:
    leaves = [tensor for _, _, inputs in drawn for tensor in inputs]

    def step(*flat: Tensor) -> Tensor:
        total, rest = flat[0].new_zeros((), dtype=torch.float32), list(flat)
        for _, function, inputs in drawn:
            value = function(*rest[: len(inputs)])
            del rest[: len(inputs)]
            total = total + (value * torch.linspace(0.3, 1.7, value.numel()).reshape(value.shape)).float().sum()
        return total

    torch._dynamo.reset()
    expected = torch.autograd.grad(step(*leaves), leaves)
    exact = torch.autograd.grad(step(*(wide := [leaf.detach().double().requires_grad_() for leaf in leaves])), wide)
    engine = backend()
    actual = torch.autograd.grad(torch.compile(step, backend=engine)(*leaves), leaves)
    names = [name for name, _, inputs in drawn for _ in inputs]
    for name, tensor, own, eager, right in zip(names, leaves, actual, expected, exact, strict=True):
        assert_close(own, eager, right, f"{name} at {tensor.detach().tolist()}")
    (report,) = engine.compile_log.graphs
    assert report.kind == "fused"


def assert_close(actual: Tensor, expected: Tensor, exact: Tensor, label: str) -> None:
    """Compares finite elements. Infinity and NaN count as equal, since they depend on the order of operations.

    Where eager itself is far from the exact value, the difference may be that.
    """
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite), f"{label}: {actual.tolist()}, in eager {expected.tolist()}"
    largest = float(expected[finite].abs().max()) if finite.any() else 0.0
    difference, error = (actual - expected)[finite].abs(), (expected - exact)[finite].abs().nan_to_num(0.0)
    allowed = 1e-4 * expected[finite].abs() + 1e-6 * max(largest, 1.0) + 2 * error
    assert (difference <= allowed).all(), f"{label}: {actual.tolist()}, in eager {expected.tolist()}"
