"""The engines: selection, dtypes, memory, order of nodes, errors and threads."""

from __future__ import annotations

import gc
import importlib.util
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from lit_ort.errors import EngineError, OptionsError, SessionError
from lit_ort.lower.model import ModelBuilder
from lit_ort.options import AUTO
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.elements import ELEMENTS
from lit_ort.runtime.engines import choice
from lit_ort.runtime.engines.choice import engine_of
from lit_ort.runtime.engines.engine_interface import Model
from lit_ort.runtime.nodes import RunState
from tests.scripts import run_code

Function = Callable[..., Sequence[Tensor]]


class Graph:
    """Builds a model whose torch nodes can call any function."""

    def __init__(self, **inputs: Tensor) -> None:
        self.builder, self.functions = ModelBuilder(), list[Function]()
        self.inputs, self.tensors = list(inputs), list(inputs.values())
        for name, tensor in inputs.items():
            self.builder.input(name, tensor.dtype, [None] * tensor.dim())

    def by_torch(self, function: Function, inputs: Sequence[str], *outputs: torch.dtype) -> list[str]:
        self.functions.append(lambda state, *tensors: function(*tensors))
        return self.builder.torch_node(len(self.functions) - 1, inputs, [(dtype, None) for dtype in outputs], "value")

    def session(self, outputs: dict[str, torch.dtype], threads: int = 1) -> Any:
        for name, dtype in outputs.items():
            self.builder.output(name, dtype, None)
        engine = engine_of(AUTO)
        data = self.builder.build("test", engine.keeps_order).SerializeToString()
        model = Model(data, self.functions, lambda k, _: f"node {k}", self.inputs, list(outputs))
        return engine.session(model, threads=threads, allow_spinning=False)

    def run(self, outputs: dict[str, torch.dtype]) -> list[Tensor]:
        return self.session(outputs).run(self.tensors, state())


def state() -> RunState:
    return RunState(BufferPool())


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
@pytest.mark.parametrize("dtype", [dtype for dtype in ELEMENTS if dtype != torch.bool], ids=str)
def test_types_and_shapes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=dtype)
    graph = Graph(x=x)
    (doubled,) = graph.by_torch(lambda x: [x + x], ["x"], dtype)
    again = graph.builder.node("Identity", [doubled], "again")
    for result in graph.run({doubled: dtype, again: dtype}):
        assert (result.dtype, result.shape) == (dtype, x.shape)
        assert torch.equal(result, x + x)


def test_booleans_are_passed_as_bytes() -> None:
    x = torch.tensor([True, False])
    graph = Graph(x=x)
    (negated,) = graph.by_torch(lambda x: [(x.view(torch.bool) == 0).view(torch.uint8)], ["x"], torch.uint8)
    cast = graph.builder.node("Cast", [negated], "cast", to=ELEMENTS[torch.bool])
    by_onnx = graph.builder.node("Not", ["x"], "by_onnx")
    results = graph.run({cast: torch.bool, by_onnx: torch.bool})
    assert all(torch.equal(value, ~x) for value in results)


def test_nodes_run_in_the_listed_order() -> None:
    order: list[str] = []
    graph = Graph(x=torch.ones(2))
    names = {"x": "x"}
    for name, sources in {"a": "x", "b": "x", "c": "a", "d": "b", "e": "c", "f": "d", "g": "ef", "h": "c"}.items():

        def function(*tensors: Tensor, name: str = name) -> list[Tensor]:
            order.append(name)
            return [sum(tensors[1:], tensors[0]) * 2]

        (names[name],) = graph.by_torch(function, [names[source] for source in sources], torch.float32)
    g, h = graph.run({names["g"]: torch.float32, names["h"]: torch.float32})
    assert "".join(order) == "abcdefgh"
    assert torch.equal(g, torch.full((2,), 32.0))
    assert torch.equal(h, torch.full((2,), 8.0))


def test_results_are_not_copied() -> None:
    addresses: list[int] = []

    def function(x: Tensor) -> list[Tensor]:
        result = x * 2
        addresses.append(result.data_ptr())
        return [result]

    graph = Graph(x=torch.randn(100_000))
    (value,) = graph.by_torch(function, ["x"], torch.float32)
    (result,) = graph.run({value: torch.float32})
    assert result.data_ptr() == addresses[0]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: [x, x], id="its input"),
        pytest.param(lambda x: [y := x * 2, y], id="the same twice"),
        pytest.param(lambda x: [y := x * 2, y.view(-1)], id="a view"),
        pytest.param(lambda x: [y := x * 2, y[:0]], id="an empty part"),
    ],
)
def test_results_that_share_memory_are_not_overwritten(function: Function) -> None:
    """ONNX Runtime can compute in the memory of a value that is no longer needed."""
    x = torch.randn(1000)
    graph = Graph(x=x)
    first, second = graph.by_torch(function, ["x"], torch.float32, torch.float32)
    value = first
    for _ in range(4):
        value = graph.builder.node("Neg", [value], "negated")
    summed = graph.builder.node("Add", [second, second], "summed")
    expected = function(x.clone())
    before = x.clone()
    negated, unchanged, doubled = graph.run({value: torch.float32, second: torch.float32, summed: torch.float32})
    assert torch.equal(x, before)
    assert torch.equal(negated, expected[0])
    assert torch.equal(unchanged, expected[1])
    assert torch.equal(doubled, expected[1] * 2)


def test_returned_inputs_and_constants_are_copies() -> None:
    x = torch.randn(5)
    graph = Graph(x=x)
    constant = graph.builder.tensor(torch.ones(3))
    input_output = graph.builder.node("Identity", ["x"], "input_output")
    constant_output = graph.builder.node("Identity", [constant], "constant_output")
    session = graph.session({input_output: torch.float32, constant_output: torch.float32})
    first, ones = session.run([x], state())
    ones.zero_()
    first.zero_()
    again, ones = session.run([x], state())
    assert torch.equal(again, x)
    assert torch.equal(ones, torch.ones(3))
    assert x.count_nonzero() == 5


def test_an_input_is_updated_in_place() -> None:
    parameter = torch.full((3,), 3.0)

    def update(parameter: Tensor, gradient: Tensor) -> list[Tensor]:
        parameter.sub_(gradient)
        return [parameter.new_empty(0)]

    graph = Graph(parameter=parameter, gradient=torch.ones(3))
    (done,) = graph.by_torch(update, ["parameter", "gradient"], torch.float32)
    graph.run({done: torch.float32})
    assert torch.equal(parameter, torch.full((3,), 2.0))


def test_results_outlive_their_session() -> None:
    graph = Graph(x=torch.ones(400_000))
    (value,) = graph.by_torch(lambda x: [x + 1], ["x"], torch.float32)
    total = graph.builder.node("Add", [value, value], "total")
    session = graph.session({value: torch.float32, total: torch.float32})
    results = session.run(graph.tensors, state())
    del session, graph
    gc.collect()
    assert torch.equal(results[0], torch.full((400_000,), 2.0))
    assert torch.equal(results[1], torch.full((400_000,), 4.0))


def test_shapes_that_depend_on_values() -> None:
    graph = Graph(x=torch.ones(3))
    (value,) = graph.by_torch(lambda x: [x[x > 0]], ["x"], torch.float32)
    session = graph.session({value: torch.float32})
    for x in (torch.randn(9), torch.randn(4), -torch.ones(3), torch.ones(2, 2).t()[0]):
        assert torch.equal(session.run([x], state())[0], x[x > 0])


@pytest.mark.parametrize("kind", [IndexError, KeyboardInterrupt])
def test_the_error_of_a_node(kind: type[BaseException]) -> None:
    def failing(x: Tensor) -> list[Tensor]:
        raise kind("no row 3")

    graph = Graph(x=torch.ones(3))
    (value,) = graph.by_torch(failing, ["x"], torch.float32)
    (after,) = graph.by_torch(lambda x: [x], [value], torch.float32)
    session = graph.session({after: torch.float32})
    for _ in range(2):
        if kind is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt, match="no row 3"):
                session.run(graph.tensors, state())
        else:
            with pytest.raises(SessionError, match="^node 0 failed: no row 3. Check the batch") as caught:
                session.run(graph.tensors, state())
            assert isinstance(caught.value.__cause__, IndexError)


def test_errors_of_onnx_runtime_itself() -> None:
    graph = Graph(x=torch.ones(3), y=torch.ones(4))
    value = graph.builder.node("Add", ["x", "y"], "value")
    with pytest.raises(SessionError, match="a run failed"):
        graph.run({value: torch.float32})
    broken = Graph(x=torch.ones(3))
    value = broken.builder.node("NoSuchOperator", ["x"], "value")
    with pytest.raises(SessionError, match="ONNX Runtime rejects the model"):
        broken.run({value: torch.float32})


def test_threads_with_separate_sessions_and_with_a_shared_one() -> None:
    def chain() -> tuple[Graph, str]:
        graph = Graph(x=torch.ones(2))
        value = "x"
        for _ in range(6):
            (value,) = graph.by_torch(lambda x: [x + 1], [value], torch.float32)
        return graph, value

    graph, value = chain()
    shared = graph.session({value: torch.float32}, threads=2)
    wrong: list[float] = []

    def run(start: int) -> None:
        separate, name = chain()
        for session in (separate.session({name: torch.float32}, threads=2), shared):
            for k in range(20):
                x = torch.full((2,), float(100 * start + k))
                if not torch.equal(session.run([x], state())[0], x + 6):
                    wrong.append(x[0].item())

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_session_within_a_node() -> None:
    inner = Graph(x=torch.ones(2))
    (doubled,) = inner.by_torch(lambda x: [x * 2], ["x"], torch.float32)
    session = inner.session({doubled: torch.float32})
    outer = Graph(x=torch.ones(2))
    (value,) = outer.by_torch(lambda x: session.run([x + 1], state()), ["x"], torch.float32)
    negated = outer.builder.node("Neg", [value], "negated")
    assert torch.equal(outer.run({negated: torch.float32})[0], torch.full((2,), -4.0))


def test_released_sessions_leak_no_memory_threads_or_files() -> None:
    process = psutil.Process()

    def create_and_run() -> None:
        graph = Graph(x=torch.ones(300_000))
        (value,) = graph.by_torch(lambda x: [x + 1], ["x"], torch.float32)
        total = graph.builder.node("Add", [value, value], "total")
        graph.session({total: torch.float32}, threads=2).run(graph.tensors, state())

    for _ in range(20):
        create_and_run()
    gc.collect()
    before = process.memory_info().rss, process.num_threads(), process.num_fds()
    for _ in range(200):
        create_and_run()
    gc.collect()
    assert process.memory_info().rss - before[0] < 8e6
    assert (process.num_threads(), process.num_fds()) == before[1:]


@pytest.mark.slow
def test_a_process_exits_cleanly_with_live_sessions_and_tensors() -> None:
    code = (
        "import torch, lit_ort; m = torch.nn.Linear(3, 700_000); f = torch.compile(lambda x: m(x).sum(), backend='ort',"
        "options={'fallback': 'error'}); loss = f(torch.ones(2, 3)); loss.backward(); live = [m.weight.grad, loss, f]"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_one_engine_for_the_process() -> None:
    engine = engine_of(AUTO)
    with ThreadPoolExecutor(4) as threads:
        assert {id(other) for other in threads.map(engine_of, [AUTO, engine.name] * 4)} == {id(engine)}


def pretend_installed(folder: Path, monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Makes the given distributions appear to be the only ones installed."""
    module = folder / "onnxruntime"
    module.mkdir()
    for package in packages:
        name, version = package.split("==")
        dist_info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        dist_info.mkdir()
        (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    spec = types.SimpleNamespace(submodule_search_locations=[str(module)]) if packages else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    # Without its cache, which keeps the real installation for other tests.
    monkeypatch.setattr(choice, "installed_package", choice.installed_package.__wrapped__)


def test_nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(tmp_path, monkeypatch)
    with pytest.raises(
        EngineError, match=r"^ONNX Runtime is not installed, but lit_ort needs it\. Up to Python 3\.12: pip"
    ):
        choice.engine_of(AUTO)


def test_two_packages_with_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(tmp_path, monkeypatch, "onnxruntime==1.24.1", "onnxruntime-training-cpu==1.19.2")
    with pytest.raises(
        EngineError, match=r"onnxruntime.* 1\.\d+\.\d and onnxruntime.* are installed\. They share the module"
    ):
        choice.engine_of(AUTO)


@pytest.mark.parametrize(
    ("name", "package"), [("training", "onnxruntime==1.24.1"), ("stock", "onnxruntime-training-cpu==1.19.2")]
)
def test_an_engine_that_is_not_installed(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(tmp_path, monkeypatch, package)
    with pytest.raises(OptionsError, match=rf"^engine='{name}', but .* is installed, .* pip uninstall"):
        choice.engine_of(name)


def test_a_package_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(tmp_path, monkeypatch, "onnxruntime==1.24.1")
    with pytest.raises(EngineError, match=r"^onnxruntime 1\.24\.1 has no shared library in .*Reinstall it: pip"):
        choice.engine_of(AUTO)


@pytest.mark.parametrize("content", [b"no library", b""])
def test_a_file_that_is_not_a_library(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(tmp_path, monkeypatch, "onnxruntime==1.24.1")
    (tmp_path / "onnxruntime" / "capi").mkdir()
    (tmp_path / "onnxruntime" / "capi" / "libonnxruntime.so.1.24.1").write_bytes(content)
    with pytest.raises(EngineError, match=r"can't be loaded as ONNX Runtime's library"):
        choice.engine_of(AUTO)


_TOO_LARGE = """
import torch
from lit_ort.errors import SessionError
from tests.runtime.test_engines import Graph
graph = Graph(x=torch.ones(1), size=torch.tensor([2**48]))
large = graph.builder.node("Expand", ["x", "size"], "large")
(total,) = graph.by_torch(lambda large: [large.sum()], [large], torch.float32)
try:
    graph.run({total: torch.float32})
except SessionError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_failed_allocation_is_reported() -> None:
    result = run_code([sys.executable, "-c", _TOO_LARGE])
    if engine_of(AUTO).name == "stock":
        assert result.returncode == -signal.SIGABRT
        assert f"lit_ort: {2**50} bytes for one value can't be allocated: Cannot allocate memory. Use" in result.stderr
    else:
        assert f"Failed to allocate memory for requested buffer of size {2**50}" in result.stdout
