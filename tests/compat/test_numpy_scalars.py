"""Steps with NumPy's scalars as sizes of layers and attributes of modules: one graph, eager's values and dtypes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

from lit_ort.backend.backend import ORTBackend
from lit_ort.errors import CaptureError
from tests.compare import backend, mostly

Step = Callable[[Any, Tensor], Tensor]

INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32)
FLOATS = (np.float16, np.float32, np.float64)
KINDS = {kind.__name__: kind for kind in (*INTEGERS, *FLOATS, np.bool_)}


class Net(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.options = {"value": value, "more": [value]}
        self.layer = nn.Linear(4, 4)


# Steps of a module with the attribute `value`, for x: float[rows, 4].
OF_ANY: dict[str, Step] = {
    "factor": lambda m, x: (m.layer(x) * m.value).sum(),
    "factor on the left": lambda m, x: (m.value * m.layer(x)).sum(),
    "arithmetic": lambda m, x: (m.layer(x) * (m.value * 100 + 1)).sum(),
    "quotient": lambda m, x: (m.layer(x) * (1 / (m.value + 1))).sum(),
    "in a dictionary": lambda m, x: (m.layer(x) * m.options["value"] * m.options["more"][0]).sum(),
    "branch": lambda m, x: m.layer(x).sum() * (2 if m.value > 1 else 3),
    "isinstance": lambda m, x: m.layer(x).sum() * (2 if isinstance(m.value, (int, float)) else 3),
    "NumPy's isinstance": lambda m, x: m.layer(x).sum() * (2 if isinstance(m.value, np.integer) else 3),
    "dtype": lambda m, x: m.layer(x).sum() * (2 if m.value.dtype == np.float32 else 3),
    "item": lambda m, x: m.layer(x).sum() * m.value.item(),
    "astype": lambda m, x: m.layer(x).sum() * m.value.astype(np.float32),
    "int": lambda m, x: m.layer(x).sum() * int(m.value),
    "float": lambda m, x: m.layer(x).sum() * float(m.value),
    "max": lambda m, x: m.layer(x).sum() * max(m.value, 2),
    "str": lambda m, x: m.layer(x).sum() * len(f"{m.value}"),
    "square root": lambda m, x: m.layer(x).sum() / np.sqrt(m.value),
    "ceiling": lambda m, x: m.layer(x)[:, : int(np.ceil(m.value / 2))].sum(),
    "root of math": lambda m, x: m.layer(x).sum() / math.sqrt(m.value),
    "integers": lambda m, x: (x > 0).long() * m.value,
    "where": lambda m, x: torch.where(x > 0, m.layer(x), m.value).sum(),
    "in place": lambda m, x: m.layer(x).mul_(m.value).sum(),
    "masked": lambda m, x: m.layer(x).masked_fill(x > 0, m.value).sum(),
    "tensor": lambda m, x: torch.tensor(m.value),
    "tensor of a list": lambda m, x: torch.tensor([m.value, m.value]),
    "as_tensor": lambda m, x: torch.as_tensor(m.value),
}
OF_INTEGERS: dict[str, Step] = {
    "size of a slice": lambda m, x: m.layer(x)[:, : m.value].sum(),
    "sizes": lambda m, x: m.layer(x).reshape(-1, m.value - 1).exp().sum(),
    "view": lambda m, x: m.layer(x).view(x.size(0), m.value - 1, 4 // (m.value - 1)).exp().sum(),
    "range": lambda m, x: sum(((m.layer(x) * k).sum() for k in range(m.value)), torch.zeros(())),
    "ones": lambda m, x: m.layer(x).sum() + torch.ones(m.value, 2).sum(),
    "key": lambda m, x: m.layer(x).sum() * {3: 5}[m.value],
    "dimension": lambda m, x: m.layer(x).sum(m.value - 2).exp(),
}
OF_FLOATS: dict[str, Step] = {
    "power": lambda m, x: (m.layer(x).abs() + 1).pow(m.value).sum(),
    "clamp": lambda m, x: m.layer(x).clamp(max=m.value).sum(),
    "full": lambda m, x: torch.full((2,), m.value),
    "dropout": lambda m, x: functional.dropout(m.layer(x), m.value * 0).sum(),
}
LAYERS: dict[str, Callable[[Callable[[int], Any]], nn.Module]] = {
    "Linear": lambda n: nn.Sequential(nn.Linear(n(4), n(8)), nn.Linear(n(8), n(2))),
    "LayerNorm": lambda n: nn.LayerNorm(n(4)),
    "Conv1d": lambda n: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(n(1), n(2), n(3), n(2), n(1))),
    "MaxPool1d": lambda n: nn.Sequential(nn.Linear(n(4), n(4)), nn.MaxPool1d(n(2))),
    "Flatten": lambda n: nn.Sequential(nn.Linear(n(4), n(4)), nn.Flatten(n(1))),
    "TransformerEncoderLayer": lambda n: nn.TransformerEncoderLayer(n(4), n(2), n(8), 0.0),
}


def steps() -> dict[str, tuple[Step, type[Any]]]:
    found = dict[str, tuple[Step, type[Any]]]()
    for name, kind in KINDS.items():
        own = OF_INTEGERS if kind in INTEGERS else OF_FLOATS if kind in FLOATS else {}
        found |= {f"{name}: {step}": (function, kind) for step, function in {**OF_ANY, **own}.items()}
    return found


STEPS = steps()


def assert_like_eager(
    module: nn.Module, step: Callable[[Tensor], Tensor], numbers_of_rows: Sequence[int] = (3, 3, 5)
) -> ORTBackend:
    engine = backend()
    compiled = torch.compile(step, backend=engine)
    for rows in numbers_of_rows:
        x = torch.linspace(-1, 1, 4 * rows).view(rows, 4)
        values = []
        for call in (compiled, step):
            module.zero_grad()
            result = call(x)
            if result.requires_grad:
                result.square().sum().backward()
            values.append((result.detach(), [None if p.grad is None else p.grad.clone() for p in module.parameters()]))
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)
    assert not engine.compile_log.breaks
    return engine


# Sessions don't support tensors of these types.
UNSUPPORTED = {
    f"{kind}: {step}" for kind in ("uint16", "uint32") for step in ("tensor", "tensor of a list", "as_tensor")
}


def joined(steps: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    """One step with the results of all of these."""

    def step(x: Tensor) -> Tensor:
        results = []
        for one in steps:
            results.append(one(x).reshape(-1).to(torch.float64))
        return torch.cat(results)

    return step


@pytest.mark.parametrize("kind", mostly(pytest.mark.sweep, ["float32", "int64"], 2))
def test_attributes(kind: str) -> None:
    module = Net(KINDS[kind](3))
    steps = [step for name, (step, _) in STEPS.items() if name.startswith(f"{kind}: ")]
    assert len(steps) > 25
    assert_like_eager(module, joined([functools.partial(step, module) for step in steps]), (3, 3))


# Those in which values meet sizes that change, of graphs with and without gradients.
ALONE = ("int64: size of a slice", "int64: view", "float32: factor", "float32: tensor")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ALONE else pytest.mark.sweep)
        for name in sorted(STEPS.keys() - UNSUPPORTED)
    ],
)
def test_each_attribute(name: str) -> None:
    step, kind = STEPS[name]
    module = Net(kind(3))
    assert_like_eager(module, lambda x: step(module, x))


def test_layers() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(make(np.int64) for make in LAYERS.values())
    assert_like_eager(layers, joined([lambda x, layer=layer: layer(x).square().sum() for layer in layers]), (3, 3))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) == ("Linear", np.int64) else pytest.mark.sweep)
        for name in LAYERS
        for kind in INTEGERS
    ],
)
def test_each_layer(name: str, kind: type[Any]) -> None:
    torch.manual_seed(0)
    module = LAYERS[name](kind)
    assert_like_eager(module, lambda x: module(x).square().sum())


def test_an_integer_that_changes_is_symbolic() -> None:
    def step(x: Tensor, value: Any) -> Tensor:
        return x[:, :value].exp() * value

    counters.clear()
    compiled = torch.compile(step, backend=backend())
    for value in map(np.int64, (2, 2, 3, 4, 3)):
        x = torch.linspace(-1, 1, 24).view(3, 8)
        torch.testing.assert_close(compiled(x, value), step(x, value))
    assert counters["stats"]["unique_graphs"] == 2


CHANGING: dict[str, Callable[[Tensor, Any], Any]] = {
    "isinstance": lambda x, n: x * (2 if isinstance(n, np.integer) else 3) + isinstance(n, int),
    "type": lambda x, n: x * (type(n) is np.int64),
    "item": lambda x, n: x * n.item(),
    "astype": lambda x, n: x * n.astype(np.float32),
    "returned": lambda x, n: (x.sum(), n),
    "arithmetic": lambda x, n: x[: n // 2 + n % 2 - 1] * (n / 2) * (1 / n) + (n + 1) ** 2 - -n,
    "comparison": lambda x, n: x * (2 if n > 2 else 3),
    "conversion": lambda x, n: x * int(n) * float(n) + sum(x[k] for k in range(n)),
    "sizes": lambda x, n: x.new_ones(n * 2).view(n, -1) * x[n - 1 : n, :1],
}


@pytest.mark.parametrize("name", CHANGING)
def test_an_integer_that_changes_is_numpys(name: str) -> None:
    compiled = torch.compile(CHANGING[name], backend=backend(fallback="error"))
    for value in map(np.int64, (2, 2, 3, 4)):
        x = torch.linspace(-1, 1, 24).view(6, 4)
        actual, expected = compiled(x, value), CHANGING[name](x, value)
        torch.testing.assert_close(actual, expected)
        if isinstance(expected, tuple):
            assert type(actual[1]) is np.int64


@pytest.mark.parametrize(
    "make",
    [lambda v: torch.tensor(data=v), lambda v: torch.as_tensor(v, dtype=None), lambda v: torch.tensor([v, v])],
)
def test_tensors_have_the_dtype_of_a_scalar(make: Callable[[Any], Tensor]) -> None:
    value, x = np.float64(2.5), torch.ones(2)
    compiled = torch.compile(lambda x: (make(value), x * 2), backend=backend(fallback="error"))
    assert compiled(x)[0].dtype == make(value).dtype == torch.float64


def test_a_float_that_changes_is_an_array() -> None:
    def step(x: Tensor, value: Any) -> Tensor:
        return x * value

    counters.clear()
    compiled = torch.compile(step, backend=backend())
    for value in map(np.float32, (0.5, 0.5, 0.25, 2.0)):
        x = torch.linspace(-1, 1, 24).view(3, 8)
        torch.testing.assert_close(compiled(x, value), step(x, value))
    assert counters["stats"]["unique_graphs"] == 2


def test_a_value_that_the_graph_needs_has_a_reason_without_names_of_exceptions() -> None:
    compiled = torch.compile(lambda x, n: x.reshape(-1, n), backend=backend())
    with pytest.raises(CaptureError, match="needs the value of a tensor, or of an array, as a number"):
        compiled(torch.ones(4), np.array(2))
