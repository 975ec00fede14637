"""Shared by all tests: a fresh Dynamo and fixed seeds for each, and the processors shared between their processes."""

from __future__ import annotations

import collections
import gc
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.scripts import run_code

# torch and lit_ort are imported in functions: the process that gives tests to others needs neither, and starts them
# seconds earlier.
if TYPE_CHECKING:
    from lit_ort.backend.backend import ORTBackend
    from lit_ort.backend.recorder import EventRecorder
    from lit_ort.runtime.report import EagerFunction, GraphReport


def pytest_configure() -> None:
    """Gives each of pytest-xdist's processes, and those that they start, their part of the processors.

    Steps are compiled at their first call, as the tests are about compiled steps.
    """
    os.environ.setdefault("LIT_ORT_COMPILE", "always")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        import torch

        threads = max(1, torch.get_num_threads() // workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Samples cases, and leaves out of the fast part what is left out of the whole."""
    cases = collections.defaultdict[tuple[str, int], list[pytest.Item]](list)
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and item.get_closest_marker("sweep") is None:
            cases[item.nodeid.partition("[")[0], sampled.args[0]].append(item)
    for (_, count), ones in cases.items():
        # By their names, so that other cases don't change which are run, and one product of options isn't favoured.
        ones.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in ones[count:]:
            item.add_marker(pytest.mark.sweep)
    for item in items:
        if item.get_closest_marker("sweep") is not None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    import torch

    from lit_ort.strategies.compiled_code import IDLE

    torch.compiler.reset()
    IDLE.clear()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
    IDLE.clear()


@pytest.fixture(autouse=True)
def no_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which an error in this package is the reason for a fallback, or for compiling each size."""
    from lit_ort.backend.backend import ORTBackend
    from lit_ort.backend.recorder import EventRecorder
    from lit_ort.errors import DEFECT

    report_graph, leave = ORTBackend._report, EventRecorder._leave

    def checked(backend: ORTBackend, report: GraphReport, start: float) -> None:
        reasons = f"{report.fallback} {report.fixed_sizes}"
        assert DEFECT not in reasons, reasons
        report_graph(backend, report, start)

    def leave_checked(recorder: EventRecorder, function: EagerFunction) -> None:
        assert DEFECT not in function.reason, function.reason
        leave(recorder, function)

    monkeypatch.setattr(ORTBackend, "_report", checked)
    monkeypatch.setattr(EventRecorder, "_leave", leave_checked)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So small a model gains nothing from a second thread, and would wait for it on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def every_thread() -> Iterator[None]:
    """Runs a test on as many threads as the machine has processors, as a user's process does."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def forked_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of exports are in processes with onnxruntime imported: its training build's import takes two seconds."""
    from lit_ort.export import process

    monkeypatch.setattr(process, "subprocess", SimpleNamespace(run=run_code))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[str]]:
    """The folder of an exported language model, the model and its vocabulary."""
    from tests.tasks.exported import language_model  # takes seconds, for few tests

    return language_model(tmp_path_factory)


@pytest.fixture(scope="session")
def berts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of exported classifiers, of texts and of pairs, and an exported masked language model."""
    from tests.tasks.exported import berts

    return berts(tmp_path_factory)


def pytest_collection_finish() -> None:
    """Keeps what was imported out of garbage collections, of which Dynamo runs one at every compilation."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def compiled_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions on the threads of OpenMP whose matmuls are compiled, as on CPUs of whose vectors MKL uses half."""
    from lit_ort._compat import openmp
    from lit_ort.kernels.matmul_library import MatmulLibrary
    from lit_ort.runtime.engines.choice import engine_of
    from lit_ort.runtime.region_calls import kernels

    if openmp.find_openmp() is None:
        pytest.skip("torch has no OpenMP here")
    native = engine_of("auto").native
    assert native is not None
    monkeypatch.setattr(kernels(), "matmuls", MatmulLibrary(kernels().cpu, kernels().runner, None))
    # How sessions run is known from the first one on.
    monkeypatch.setattr(native, "_pools", {})


@pytest.fixture(params=[True, False], ids=["OpenMP", "own threads"])
def uses_openmp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Sessions on the threads of OpenMP, and on their own."""
    from lit_ort._compat import openmp

    if request.param and openmp.find_openmp() is None:
        pytest.skip("torch has no OpenMP here")
    monkeypatch.setattr(openmp, "uses_openmp", lambda: request.param)
    return request.param
