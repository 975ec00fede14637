"""Loops of recurrent layers: against torch's operators, between guard pages, and equal for any number of threads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lit_ort.kernels import recurrent_loop
from lit_ort.kernels.machine_code import cpu_of, host_cpu
from lit_ort.kernels.recurrent_arguments import CELLS, Layer, LayerGradients
from lit_ort.kernels.recurrent_text import rows_at_once
from lit_ort.ops import recurrent_steps
from tests.kernels.test_generated_regions import threads
from tests.regions.guarded import guarded

if TYPE_CHECKING:
    from lit_ort.kernels.recurrent_loop import RecurrentLoops


@pytest.fixture(scope="module")
def loops() -> RecurrentLoops:
    return recurrent_loop.RecurrentLoops()


def layer(mode: str, shape: tuple[int, int, int], reverse: bool, dtype: torch.dtype) -> tuple[Layer, LayerGradients]:
    """A layer with random values, and gradients."""
    length, batch, hidden = shape
    kind = CELLS[mode]
    size = kind.gates * hidden

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype)

    cell = random(batch, hidden) if mode == "lstm" else None
    saved = random(length, batch, kind.saved * hidden) if kind.saved else None
    made = Layer(
        mode,
        reverse,
        random(size, hidden),
        random(size),
        random(size),
        random(batch, hidden),
        cell,
        random(*shape),
        saved,
        random(length, batch, size),
    )
    of_cell = None if cell is None else random(batch, hidden)
    gates = random(length, batch, kind.gradients * hidden)
    return made, LayerGradients(random(*shape), gates, random(batch, hidden), of_cell)


def tensors_of(value: Layer | LayerGradients) -> dict[str, torch.Tensor]:
    return {name: item for name, item in vars(value).items() if isinstance(item, torch.Tensor)}


def copied(value: Any, at_end: bool | None = None) -> tuple[Any, Any]:
    """A copy, between guard pages if `at_end` is given, and the memory to keep."""
    tensors = tensors_of(value)
    if at_end is None:
        copies, memory = [tensor.clone() for tensor in tensors.values()], None
    else:
        copies, memory = guarded([tensor.flatten() for tensor in tensors.values()], at_end=at_end)
    shaped = {name: copy.view(tensors[name].shape) for name, copy in zip(tensors, copies, strict=True)}
    return dataclasses.replace(value, **shaped), memory


def run(loops: RecurrentLoops, given: tuple[Layer, LayerGradients], at_end: bool | None) -> list[torch.Tensor]:
    (made, one), (gradients, two) = (copied(value, at_end) for value in given)
    elements = loops.packed_elements(made.mode, made.output.shape[2], made.output.dtype)
    (packed,), three = guarded([torch.empty(elements, dtype=made.output.dtype)], at_end=bool(at_end))
    loops.forward(made, packed)
    loops.backward(made, gradients, packed)
    results = [tensor.clone() for value in (made, gradients) for tensor in tensors_of(value).values()]
    del one, two, three
    return results


def check(loops: RecurrentLoops, mode: str, shape: tuple[int, int, int], reverse: bool, dtype: torch.dtype) -> None:
    given = layer(mode, shape, reverse, dtype)
    (made, _), (gradients, _) = (copied(value) for value in given)
    recurrent_steps.forward(made)
    recurrent_steps.backward(made, gradients)
    wanted = [tensor for value in (made, gradients) for tensor in tensors_of(value).values()]
    limit = 1e-10 if dtype == torch.float64 else 2e-3
    for at_end in (True, False):
        with threads(1):
            results = run(loops, given, at_end)
        for result, expected in zip(results, wanted, strict=True):
            torch.testing.assert_close(result, expected, rtol=limit, atol=limit)
        with threads(2):
            again = run(loops, given, at_end)
        assert all(torch.equal(result, repeated) for result, repeated in zip(results, again, strict=True))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts small batches into blocks."""
    monkeypatch.setattr(recurrent_loop, "_ONE_BLOCK", 0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mode", CELLS)
def test_a_loop_is_within_its_memory_and_the_same_for_any_number_of_threads(loops: RecurrentLoops, mode: str) -> None:
    for number, shape in enumerate([(1, 1, 1), (4, 3, 17), (3, 11, 16), (2, 21, 33)]):
        check(loops, mode, shape, number % 2 == 1, torch.float64)
    check(loops, mode, (3, 13, 15), True, torch.float32)


@pytest.mark.sweep
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", CELLS)
def test_loops_of_all_sizes(loops: RecurrentLoops, mode: str, dtype: torch.dtype) -> None:
    for hidden in (*range(1, 36), 47, 48, 64, 65):
        for batch in (1, 2, 4, 7, 8, 16, 19):
            check(loops, mode, (1 + hidden % 3, batch, hidden), batch % 2 == 1, dtype)


def test_vectors_of_other_cpus() -> None:
    host = host_cpu()
    if host.vector_bytes == 16:
        pytest.skip("there is one width of vectors on this CPU")
    features = {name[1:]: name[0] == "+" for name in host.features.split(",")}
    narrow = {name: has and not name.startswith("avx512") for name, has in features.items()}
    loops = recurrent_loop.RecurrentLoops(cpu_of(host.name, narrow, "x86_64-unknown-linux-gnu"))
    assert loops.cpu.vector_bytes == 32
    check(loops, "lstm", (3, 5, 11), False, torch.float32)
    check(loops, "gru", (3, 5, 11), False, torch.float64)


def test_rows_at_once_fit_in_the_registers() -> None:
    assert [rows_at_once(gates, 64) for gates in (4, 3, 1)] == [4, 8, 8]
    assert [rows_at_once(gates, 32) for gates in (4, 3, 1)] == [2, 2, 4]
