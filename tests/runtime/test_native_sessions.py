"""Sessions that call no Python: errors, threads, memory, and the builds that have them."""

from __future__ import annotations

import dataclasses
import gc
import math
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_ort import ORTBackend, ORTOptions, SessionError
from lit_ort.lower import native_operators
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.engines import training_interface
from lit_ort.runtime.engines.choice import engine_of
from lit_ort.runtime.engines.native_sessions import NativeSession
from lit_ort.runtime.latest import MOST_SIZES, Latest
from lit_ort.runtime.native_phase import NativePhase
from tests.compare import backend


@pytest.fixture(autouse=True)
def any_number_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_operators, "FEWEST_OPERATORS", 0)


pytestmark = pytest.mark.usefixtures("uses_openmp")


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[NativeSession]:
    """The sessions that a test makes."""
    made, create = [], NativeSession.__init__

    def init(session: NativeSession, *args: Any, **kwargs: Any) -> None:
        made.append(session)
        create(session, *args, **kwargs)

    monkeypatch.setattr(NativeSession, "__init__", init)
    return made


def native(function: Callable[..., Any], **settings: Any) -> tuple[Callable[..., Any], ORTBackend]:
    engine = backend()
    return torch.compile(function, backend=engine, **settings), engine


def test_this_build_has_native_sessions() -> None:
    assert engine_of("auto").native is not None


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.words(index)).exp()


@pytest.mark.parametrize("bad", [5, -1, 10**12])
def test_an_index_out_of_range_is_an_error_and_the_session_runs_again(bad: int) -> None:
    module = Lookup()
    compiled, engine = native(module)
    good = torch.tensor([0, 4, 2])
    with torch.no_grad():
        compiled(good)
        assert engine.compile_log.graphs[0].is_native
        with pytest.raises(SessionError, match=f"region of .*words.* failed: index {bad} is out of range"):
            compiled(torch.tensor([0, bad, 2]))
        torch.testing.assert_close(compiled(good), module(good))


def test_a_division_by_zero_is_an_error() -> None:
    compiled, _ = native(lambda x, k: (x @ x).exp() * (7 // k))
    x = torch.randn(3, 3)
    compiled(x, torch.tensor([1, 2, 3]))
    with pytest.raises(SessionError, match="an integer was divided by zero"):
        compiled(x, torch.tensor([1, 0, 3]))


def test_a_value_that_an_operator_does_not_accept_is_an_error() -> None:
    one, target = torch.eye(3), torch.rand(3, 3)
    compiled, engine = native(lambda x, y: F.binary_cross_entropy(x @ one, y))
    share = torch.rand(3, 3)
    for wrong in (1.5, -0.5, math.nan):
        torch.testing.assert_close(compiled(share, target), F.binary_cross_entropy(share, target))
        assert engine.compile_log.graphs[0].is_native
        with pytest.raises(SessionError, match="failed: .* is not a value that the operator accepts"):
            compiled(torch.full((3, 3), wrong), target)


def test_threads_share_a_session() -> None:
    module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))
    compiled, _ = native(module)
    inputs = [torch.randn(4, 8) for _ in range(4)]
    with torch.no_grad():
        compiled(inputs[0])
        expected = [module(x) for x in inputs]
    failures: list[BaseException] = []

    def run(k: int) -> None:
        try:
            for _ in range(50):
                with torch.no_grad():
                    torch.testing.assert_close(compiled(inputs[k]), expected[k])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_interpreter_is_free_during_a_run(sessions: list[NativeSession]) -> None:
    weight = torch.randn(1500, 1500)
    compiled, engine = native(lambda x: ((x @ x).tanh() @ x).tanh() @ x)
    compiled(weight)
    assert engine.compile_log.graphs[0].is_native
    session = sessions[-1]
    run, times = session._run, []

    def timed(*arguments: Any) -> Any:
        times.append(time.perf_counter())
        status = run(*arguments)
        times.append(time.perf_counter())
        return status

    session._run = timed  # type: ignore[assignment]
    thread = threading.Thread(target=compiled, args=(weight,))
    ticks = []
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.0005)
    start, end = times
    assert sum(start < tick < end for tick in ticks) >= 3


def test_memory_and_threads_are_flat() -> None:
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    compiled, engine = native(lambda x: module(x).square().mean(), dynamic=True)
    process, sizes = psutil.Process(), torch.randint(2, 300, (400,)).tolist()
    used = []
    for k, size in enumerate(sizes):
        compiled(torch.randn(size, 64)).backward()
        if k in (200, len(sizes) - 1):
            used.append((process.memory_info().rss, process.num_threads()))
    assert engine.count == 1
    assert used[1][0] - used[0][0] < 2e7
    assert used[1][1] <= used[0][1]


@pytest.mark.sampled(1)
def test_a_session_ends_with_its_graph() -> None:
    def one() -> None:
        torch.compiler.reset()
        compiled, _ = native(lambda x: (x @ x).exp() @ x)
        compiled(torch.randn(4, 4))

    one()
    gc.collect()
    before = psutil.Process().num_threads()
    for _ in range(10):
        one()
    torch.compiler.reset()
    gc.collect()
    assert psutil.Process().num_threads() <= before + 2


def test_results_are_new_memory_in_each_run() -> None:
    compiled, _ = native(lambda x: ((x @ x).exp(), (x @ x).sum(0)))
    first, second = compiled(torch.eye(4)), compiled(torch.zeros(4, 4))
    assert first[0][0, 0] == pytest.approx(2.718282)
    assert second[0][0, 0] == 1
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, second, strict=True))


def test_a_parameter_that_moves() -> None:
    layer = nn.Linear(4, 4)
    compiled, engine = native(lambda x: F.relu(layer(x)) @ x)
    x = torch.randn(4, 4)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), F.relu(layer(x)) @ x)
        layer.weight.data = torch.randn(4, 4)
    assert engine.count == 1


def test_without_native_sessions_there_are_torch_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine_of("auto")), "native", None)
    compiled, engine = native(lambda x: (x @ x).exp() @ x)
    x = torch.randn(4, 4)
    torch.testing.assert_close(compiled(x), (x @ x).exp() @ x)
    assert not engine.compile_log.graphs[0].is_native


def test_a_phase_of_another_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[Any] = []
    original = NativePhase.__init__

    def noted(self: NativePhase, *arguments: Any) -> None:
        phases.append(arguments)
        original(self, *arguments)

    monkeypatch.setattr(NativePhase, "__init__", noted)
    native(lambda x: (x @ x).exp() @ x)[0](torch.randn(4, 4))
    monkeypatch.undo()
    phase, engine, threads, *_ = phases[0]
    (region,) = phase.regions
    broken = dataclasses.replace(phase, regions=(dataclasses.replace(region, text="{}"),))
    with pytest.raises(SessionError, match="a region has no code"):
        NativePhase(broken, engine, threads)
    with pytest.raises(SessionError, match="ONNX Runtime rejects the model"):
        NativePhase(dataclasses.replace(phase, model=b"none"), engine, threads)
    monkeypatch.setattr(type(engine), "native", None)
    with pytest.raises(SessionError, match="no native sessions"):
        NativePhase(phase, engine, threads)


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("aarch64", 183)])
def test_the_library_is_a_whole_file(machine: str, number: int) -> None:
    address = 0x1122334455667788
    file = training_interface._shared_library(address, machine)
    assert file[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", file, 18) == (number,)
    start, count = struct.unpack_from("<Q", file, 32)[0], struct.unpack_from("<H", file, 56)[0]
    segments = [struct.unpack_from("<IIQQQQQQ", file, start + 56 * k) for k in range(count)]
    loaded, dynamic, stack = segments
    assert loaded[2:4] == (0, 0)
    assert loaded[5] == len(file)
    entries = dict(struct.iter_unpack("<QQ", file[dynamic[2] : dynamic[2] + dynamic[5]]))
    name = entries[5] + struct.unpack_from("<I", file, entries[6] + 24)[0]
    assert file[name:].split(b"\0")[0] == b"RegisterCustomOps"
    value, size = struct.unpack_from("<QQ", file, entries[6] + 32)
    assert struct.pack("<Q", address) in file[value : value + size]
    # Neither the stack nor what is loaded is both writable and executable.
    assert all(segment[1] & 3 != 3 for segment in (loaded, stack))


def test_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine_of("auto").name != "training":
        pytest.skip("stock onnxruntime exports its interface")
    import onnxruntime

    monkeypatch.setattr(training_interface.tempfile, "tempdir", str(tmp_path))
    assert training_interface.base_of(onnxruntime.SessionOptions())
    assert not list(tmp_path.iterdir())


def test_denormals_are_kept_by_regions_and_around_a_run() -> None:
    tiny = torch.full((4, 4), 1e-40)
    compiled, engine = native(lambda x, y: (x * 0.5, (y @ y) * 1.0, (x @ y).sum()))
    before = (tiny * 0.5)[0, 0].item()
    halves, squares, _ = compiled(tiny, torch.eye(4))
    assert engine.compile_log.graphs[0].is_native
    assert halves[0, 0].item() == before != 0
    assert torch.equal(squares, torch.eye(4))
    # Sums over rows end after the blocks.
    sums, _, _ = native(lambda x, y: (x.sum(0), y @ y, (y @ y).exp()))[0](tiny, torch.eye(4))
    assert torch.equal(sums, tiny.sum(0))
    assert (tiny * 0.5)[0, 0].item() == before


def test_denormals_are_kept_by_torch_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_operators, "OPERATORS_OF_SWITCH", 0)
    compiled, engine = native(lambda x, y: (x.cumsum(0), (y @ y).exp() @ y))
    tiny = torch.full((4, 4), 1e-40)
    sums, _ = compiled(tiny, torch.eye(4))
    assert engine.compile_log.graphs[0].torch_operators == {"aten.cumsum.default": 1}
    assert torch.equal(sums, tiny.cumsum(0))
    assert sums[0, 0] != 0


def test_matmuls_of_denormals_take_as_long_as_others() -> None:
    compiled, _ = native(lambda x, y: ((x @ y).relu() @ y).relu() @ y)
    y, times = torch.randn(300, 300) * 1e-20, []
    for x in (torch.randn(300, 300), torch.randn(300, 300) * 1e-20):
        runs = []
        for _ in range(20):
            start = time.perf_counter()
            compiled(x, y if times else torch.randn(300, 300))
            runs.append(time.perf_counter() - start)
        times.append(min(runs))
    assert times[1] < 3 * times[0]


def test_idle_threads_of_torch_end_before_a_long_run(uses_openmp: bool, sessions: list[NativeSession]) -> None:
    compiled, _ = native(lambda x: ((x @ x).tanh() @ x).tanh() @ x)
    weight, called = torch.randn(64, 64), []
    compiled(weight)
    session = sessions[-1]
    if uses_openmp:
        assert session._pause is None
        return
    if session._pause is None:
        pytest.skip("this OpenMP has no function that ends threads")
    pause = session._pause
    session._pause = lambda kind: called.append(pause(kind)) or 0
    # On a busy CPU, the first run may have been a long one.
    session._seconds = 0.0
    compiled(weight)
    assert not called
    session._seconds = 1.0
    compiled(weight)
    assert called == [0]
    assert torch.equal(torch.ones(10**6).add(1), torch.full((10**6,), 2.0))


class Wide(nn.Module):
    """A step whose values are large enough for the memory of a run."""

    def __init__(self, width: int = 300) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(width, width), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def gradients_of(step: Callable[..., Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(step(x), list(module.parameters())))


@pytest.mark.parametrize("runs", [2, 6])
def test_gradients_of_several_runs_are_kept_apart(runs: int) -> None:
    module = Wide()
    step, engine = native(module)
    inputs = [torch.randn(512, 300) for _ in range(runs)]
    kept = [gradients_of(step, module, x) for x in inputs]
    assert engine.compile_log.graphs[0].is_native
    for gradients, x in zip(kept, inputs, strict=True):
        torch.testing.assert_close(gradients, gradients_of(module, module, x))


def test_accumulated_gradients() -> None:
    module, batches = Wide(), [torch.randn(512, 300) for _ in range(5)]
    step, _ = native(module)
    for x in batches:
        step(x).backward()
    accumulated = [parameter.grad for parameter in module.parameters()]
    expected = [sum(parts) for parts in zip(*(gradients_of(module, module, x) for x in batches), strict=True)]
    torch.testing.assert_close(accumulated, expected)


@pytest.mark.sampled(2)
def test_a_value_of_each_run_that_is_kept_keeps_no_more_than_its_own_memory() -> None:
    module, pool = Wide(), BufferPool()
    step = torch.compile(module, backend=ORTBackend(ORTOptions(), pool=pool))
    x = torch.randn(4096, 300)
    kept, reserved = [], []
    for _ in range(12):
        kept.append(gradients_of(step, module, x)[0])
        reserved.append(pool.reserved_bytes)
    assert 0 < reserved[0] < reserved[3] == reserved[-1]


def test_changing_sizes_in_the_memory_of_a_run(uses_openmp: bool) -> None:
    module = Wide()
    step, engine = native(module, dynamic=True)
    for rows in (512, 700, 64, 2, 700, 1500):
        x = torch.randn(rows, 300)
        torch.testing.assert_close(gradients_of(step, module, x), gradients_of(module, module, x))
    # Torch sums the rows.
    assert [graph.is_native for graph in engine.compile_log.graphs] == [uses_openmp]


def test_sizes_that_are_contracted_away() -> None:
    """No size of a region, of a result or of a matmul on OpenMP's threads tells the number of rows."""
    weights = [torch.randn(8, 8) for _ in range(3)]

    def gram(x: Tensor) -> Tensor:
        values = x.t() @ x
        for weight in weights:
            values = (values @ weight).tanh()
        return values

    compiled, engine = native(gram)
    with torch.no_grad():
        for rows in (16, 32, 64, 20, 32):
            x = torch.randn(rows, 8) / 8
            torch.testing.assert_close(compiled(x), gram(x))
    assert engine.count == 2


def test_the_latest_sizes_are_kept() -> None:
    compiled, engine = native(lambda x: (x * 2).tanh() @ x.t())
    for rows in range(2, 2 + 2 * MOST_SIZES):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), (x * 2).tanh() @ x.t())
    kept = [part for part in gc.get_objects() if type(part) is Latest]
    assert engine.count == 2
    assert max(map(len, kept)) == MOST_SIZES
