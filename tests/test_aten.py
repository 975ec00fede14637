"""torch kernels as nodes: errors come out, memory goes back, threads don't mix."""

from __future__ import annotations

import threading

import onnx_ir as ir
import psutil
import pytest
import torch

from lit_ort.errors import SessionError
from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.session import Session, SessionOptions
from tests.passes.models import model

TEXT = """g (float[64, 64] x) => (float[64, 64] y) {
    a = org.pytorch.aten.ATen<operator = "lit_ort::double", overload_name = "">(x)
    y = Relu(a)
}"""


def session(run) -> Session:  # type: ignore[no-untyped-def]
    made = model(TEXT)
    made.opset_imports["org.pytorch.aten"] = 1
    node = made.graph[0]
    node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.FLOAT, made.graph.inputs[0].shape
    return Session(made, ["x"], ["y"], SessionOptions(1, kernels={"double": Kernel("double", run)}))


def double(pool: BufferPool, x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 2, out=pool.empty(*x.shape))


def test_a_kernel_runs_inside_a_session() -> None:
    x = torch.randn(64, 64)
    (y,) = session(double).run([x])
    torch.testing.assert_close(y, (x * 2).relu())


def test_its_error_reaches_the_caller() -> None:
    def fails(pool: BufferPool, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the kernel's own words")

    broken = session(fails)
    for _ in range(3):
        with pytest.raises(SessionError, match=r"lit_ort::double failed.*the kernel's own words") as caught:
            broken.run([torch.randn(64, 64)])
        assert isinstance(caught.value.__cause__, ValueError)
    x = torch.ones(64, 64)
    torch.testing.assert_close(session(double).run([x])[0], x * 2)


def test_many_calls_leak_nothing() -> None:
    runs, x = session(double), torch.randn(64, 64)
    for _ in range(500):
        runs.run([x])
    before = psutil.Process().memory_info().rss
    for _ in range(10_000):
        runs.run([x])
    assert psutil.Process().memory_info().rss - before < 10e6


def test_results_of_several_threads_stay_apart() -> None:
    runs = [session(double), session(lambda pool, x: torch.mul(x, 3, out=pool.empty(*x.shape)))]
    wrong: list[str] = []

    def work(k: int) -> None:
        for j in range(200):
            x = torch.full((64, 64), float(j))
            (y,) = runs[k].run([x])
            if not torch.equal(y, x * (k + 2)):
                wrong.append(f"thread {k}, run {j}")

    threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
