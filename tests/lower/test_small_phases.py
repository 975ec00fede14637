"""Graphs of a few torch operators, which run without a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lit_ort
from lit_ort.lower.small_phases import MOST_OPERATORS
from lit_ort.runtime.engines import no_session
from lit_ort.runtime.program import Phase, Source, TorchNode
from lit_ort.runtime.report import GraphReport
from lit_ort.runtime.session import Session

Function = Callable[..., Any]


def compiled(function: Function, *arguments: Any) -> tuple[Any, GraphReport]:
    backend = lit_ort.ORTBackend(lit_ort.ORTOptions(fallback="error", disable_passes=("regions",)))
    result = torch.compile(function, backend=backend)(*arguments)
    (report,) = backend.compile_log.graphs
    return result, report


def sines(x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = x.sin()
    return x


def test_up_to_a_number_of_operators() -> None:
    x = torch.randn(3)
    for count in (MOST_OPERATORS, MOST_OPERATORS + 1):
        result, report = compiled(sines, x, count)
        torch.testing.assert_close(result, sines(x, count))
        assert report.is_small == (count == MOST_OPERATORS)
        assert ("without a session" in str(report)) == report.is_small


SMALL: dict[str, Function] = {
    "one operator": lambda x: x.sin(),
    "several results, in another order": lambda x: (x.cos(), x.sin() + 1, x.sin()),
    "booleans": lambda x: (x > 0, (x > 0) & (x < 1), x.isnan().any()),
    "complex numbers": lambda x: torch.complex(x, x) * 2j,
    "integers": lambda x: (x * 10).long() // 3,
    "a result in the layout of a transposed input": lambda x: x.t() * 2,
    "a view of a result": lambda x: (x + 1).t()[1:],
    "an input that is returned": lambda x: (x, x + 1),
    "a constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "no input": lambda x: torch.arange(3) + 1,
    "an input of size 0": lambda x: x[:0] * 2,
    "a change of an input": lambda x: x.mul_(2).sum(),
}


@pytest.mark.parametrize("function", SMALL.values(), ids=SMALL.keys())
def test_results_are_eagers(function: Function) -> None:
    x = torch.randn(4, 3)
    other = x.clone()
    expected = function(other)
    torch.testing.assert_close(compiled(function, x)[0], expected, rtol=0, atol=0)
    torch.testing.assert_close(x, other, rtol=0, atol=0)


def test_results_are_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result can be resized and changed, as memory of eager's, and is not the input's."""
    x = torch.randn(4)
    result, report = compiled(lambda x: x.double().float() + 0, x)
    assert report.is_small
    result.resize_(8).fill_(0)
    assert x.abs().min() > 0


def test_a_node_that_returns_its_input() -> None:
    x = torch.randn(4)
    model: Any = type("Model", (), {"nodes": [lambda state, x: [x]], "location_of": None, "device": x.device})
    (result,) = no_session.NoSession(model).run([x], None)  # pyright: ignore[reportArgumentType]
    assert result is not x


def test_gradients() -> None:
    x, w = torch.randn(4, 3), torch.randn(3, requires_grad=True)
    loss, report = compiled(lambda x: ((x @ w).relu() ** 2).mean(), x)
    assert report.is_small
    assert report.kind == "fused"
    loss.backward()
    assert w.grad is not None
    expected = torch.autograd.grad(((x @ w).relu() ** 2).mean(), w)
    torch.testing.assert_close((w.grad,), expected)


def test_draws_follow_the_seed() -> None:
    def dropped(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    function = torch.compile(dropped, backend=lit_ort.ORTBackend(lit_ort.ORTOptions()))
    x = torch.ones(100)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(function(x))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_any_size_in_one_graph() -> None:
    backend = lit_ort.ORTBackend(lit_ort.ORTOptions())
    function = torch.compile(lambda x: x.new_zeros(x.shape[0]) + x.sum(1), backend=backend, dynamic=True)
    for size in (4, 5, 7):
        x = torch.randn(size, 3)
        torch.testing.assert_close(function(x), x.sum(1))
    assert backend.count == 1
    assert backend.compile_log.graphs[0].is_small


def test_an_error_names_the_operator() -> None:
    backend = lit_ort.ORTBackend(lit_ort.ORTOptions(fallback="error"))
    function = torch.compile(lambda weight, k: weight[k] * 2, backend=backend)
    weight = torch.randn(4, 3)
    function(weight, torch.tensor([1]))
    assert backend.compile_log.graphs[0].is_small
    with pytest.raises((lit_ort.SessionError, IndexError), match="index"):
        function(weight, torch.tensor([9]))


def test_autocast_of_the_caller_does_not_apply() -> None:
    backend = lit_ort.ORTBackend(lit_ort.ORTOptions())
    function = torch.compile(lambda x: torch.mm(x, x), backend=backend)
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(x).dtype == torch.bfloat16
    assert function(x).dtype == torch.float32


def test_a_phase_without_a_model_is_one_node() -> None:
    node = TorchNode(("",), (), (0,), ("",))
    options: Any = lit_ort.ORTBackend(lit_ort.ORTOptions())._session_options({})
    phase = Phase(b"", (node, node), (("x", Source("tensor")),), ("y",), ("",))
    for wrong in (phase, dataclasses.replace(phase, nodes=(node,), outputs=("y", "z"), forms=("", ""))):
        with pytest.raises(lit_ort.SessionError, match="has no model"):
            Session(wrong, options)
