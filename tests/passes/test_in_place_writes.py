"""Writes into parts of values are made in place: they fire, they must not fire, same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_ort.ops.writes import IN_PLACE, WHOLE
from tests.compare import SINCE_2_15, assert_same_call, assert_same_step, backend
from tests.passes.reports import report_of

WIDTH = 8
Step = Callable[[Any, Tensor], Tensor]
IDS = ["[:, 1]", "[-1]", "[2:4]", "[:, 3:]", "[1:4, ::2]", "[0, 1]", ".t()[2]", "[:, :, None][1]"]


def copies(engine: Any) -> dict[str, int]:
    """The operators of the only graph that copy a value to change a part of it, and copies of whole values."""
    (graph,) = engine.compile_log.graphs
    names = {str(target) for target in IN_PLACE if target not in WHOLE} - {"lit_ort.add_slices.default"}
    names |= {"aten.copy.default", "aten.clone.default"}
    return {name: count for name, count in graph.torch_operators.items() if name in names}


def columns(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(6, WIDTH)
    for k in range(WIDTH):
        out[:, k] = x @ m.weight[:, k]
    return out.square().mean()


def recurrence(m: Any, x: Tensor) -> Tensor:
    states = torch.zeros(WIDTH, 6, WIDTH)
    for k in range(1, WIDTH):
        states[k] = (m(x) + states[k - 1]).tanh()
    return states.square().mean()


def modes(m: Any, x: Tensor) -> Tensor:
    """Two corners of a spectrum, as in Fourier neural operators."""
    spectrum = torch.fft.rfft2(m(x).view(2, 3, WIDTH))
    out = torch.zeros_like(spectrum)
    out[:, :2, :2] = spectrum[:, :2, :2] * 2
    out[:, -1:, :2] = spectrum[:, -1:, :2] * 3
    return torch.fft.irfft2(out, s=(3, WIDTH)).square().sum()


def in_turns(m: Any, x: Tensor) -> Tensor:
    hidden = m(x)
    hidden[:, 0] = hidden[:, 1].exp()
    hidden[2:4] *= 0.5
    hidden[0][hidden[0] > 0] = 0.1
    hidden.t()[3].mul_(3)
    hidden.index_add_(0, torch.tensor([0, 2]), x[:2])
    return hidden.square().sum()


@pytest.mark.parametrize("step", [columns, recurrence, modes, in_turns])
def test_no_value_is_copied(step: Step) -> None:
    engine = assert_same_step(nn.Linear(WIDTH, WIDTH), step, torch.randn(6, WIDTH))
    assert report_of(engine, "in_place_writes").fired
    # Since torch 2.15, a number is written with a mask as a new row.
    assert copies(engine) == ({"aten.select_scatter.default": 1} if SINCE_2_15 and step is in_turns else {})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("index", IDS)
def test_a_write_of_any_slice_is_in_place(index: str) -> None:
    scope: dict[str, Any] = {}
    lines = [f"y = m(x); y{index} = x{index} * 2", f"y{index} += 1", f"y{index}.mul_(3)", "return y.sin().sum()"]
    exec("def step(m, x):\n" + "\n".join(f"    {line}" for line in lines), scope)
    engine = assert_same_step(nn.Linear(WIDTH, WIDTH), scope["step"], torch.randn(6, WIDTH))
    assert report_of(engine, "in_place_writes").fired >= 3
    assert not copies(engine)


def old_elements_are_read_later(m: Any, x: Tensor) -> Tensor:
    hidden = m(x)
    changed = hidden.clone()
    changed[:, 0] = 0.0
    return changed.exp().sum() + hidden.sin().sum()


def rows_move(m: Any, x: Tensor) -> Tensor:
    hidden = m(x)
    hidden[1:] = hidden[:-1].clone()
    return hidden.exp().sum()


def a_slice_of_what_is_written(m: Any, x: Tensor) -> Tensor:
    hidden = m(x)
    hidden[3:, 4] = 0.25
    hidden.index_add_(0, torch.tensor([0, 2]), hidden[1:3].clone())
    return hidden.exp().sum()


def a_batch(m: Any, x: Tensor) -> Tensor:
    changed = x.clone()
    changed[:, 0] = 0.0
    return m(changed).exp().sum()


def a_constant(m: Any, x: Tensor) -> Tensor:
    table = torch.tensor([[0.5], [2.0]])
    table[0] = x.sum()
    return (m(x).sum() * table).sum()


@pytest.mark.parametrize(
    "step", [old_elements_are_read_later, rows_move, a_slice_of_what_is_written, a_batch, a_constant]
)
def test_must_not_fire(step: Step) -> None:
    module, x = nn.Linear(WIDTH, WIDTH), torch.randn(6, WIDTH)
    before = x.clone()
    engine = assert_same_step(module, step, x)
    assert copies(engine)
    assert torch.equal(x, before)


def test_results_that_share_memory_inside_of_the_run_are_apart() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * 2
        row = hidden[0].clone()
        hidden[1] = 5.0
        return row, hidden

    x = torch.randn(6, WIDTH)
    row, hidden = torch.compile(step, backend=backend())(x)
    hidden.zero_()
    assert torch.equal(row, x[0] * 2)


def test_constants_that_onnx_runtime_computes_once_are_not_written() -> None:
    def step(x: Tensor) -> Tensor:
        constant = torch.tensor([[0.5, 1.0], [2.0, 3.0]])
        for _ in range(10):
            constant = -(constant * 0.9)
        constant[0] += x[0]
        return constant.sin()

    compiled = torch.compile(step, backend=backend())
    for _ in range(3):
        x = torch.randn(2, 2)
        torch.testing.assert_close(compiled(x), step(x))


def test_dynamic_sizes() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        out = m(x)
        half = x.shape[0] // 2
        out[:half] += 1
        out[half:, 1] = 0.5
        for k in range(3, WIDTH):
            out[:, k] = out[:, k - 1] * x[:, 0]
        return out.square().mean()

    module, engine = nn.Linear(WIDTH, WIDTH), backend()
    compiled = torch.compile(step, backend=engine)
    for rows in (6, 8, 11, 10):
        assert_same_call(module, step, compiled, torch.randn(rows, WIDTH))
    assert len(engine.compile_log.graphs) == 2
    # Since torch 2.15 the gradient of one write is a copy of its columns.
    left = {"aten.select_scatter.default"} if SINCE_2_15 else set[str]()
    for graph in engine.compile_log.graphs:
        assert {name for name in graph.torch_operators if name.startswith("aten.") and "scatter" in name} <= left


WINDOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.unfold(1, 3, 1).clone(),
    "contiguous": lambda x: x.unfold(1, 3, 1).contiguous(),
    "product with 1": lambda x: x.unfold(1, 3, 1) * 1.0,
    "conversion": lambda x: x.unfold(1, 3, 1).to(torch.float32, copy=True),
    "copy": lambda x: torch.empty(6, WIDTH - 2, 3).copy_(x.unfold(1, 3, 1)),
    "expanded": lambda x: x[:1].expand(6, WIDTH).clone(),
    "strides": lambda x: (x * 2).as_strided((3, 3), (1, 1)).clone(),
}
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "element": lambda w: w[..., 0].fill_(1),
    "slice": lambda w: w[..., :2].add_(1),
    "diagonal": lambda w: w.diagonal(0, -2, -1).zero_(),
    "part of a part": lambda w: w[0][..., 0].zero_(),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("windows", WINDOWS)
def test_copies_of_windows_that_share_memory_are_written(windows: str, change: str) -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        copied = WINDOWS[windows](m(x))
        CHANGES[change](copied)
        return copied.sum(-1).tanh().square().mean()

    assert_same_step(nn.Linear(WIDTH, WIDTH), step, torch.randn(6, WIDTH))
