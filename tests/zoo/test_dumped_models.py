"""The steps of complete models as `dump_dir` writes them, run by ONNX Runtime without lit_ort's operators."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.runtime.engines.engine_interface import REGION_OPERATOR
from lit_ort.runtime.native_phase import NativePhase
from tests.compare import backend
from tests.zoo.cases import Case
from tests.zoo.report import TORCH_OPERATORS
from tests.zoo.test_models import CASES

# Interpreters of environments with onnxruntime, without torch and lit_ort, with colons between them.
PYTHONS = os.environ.get("LIT_ORT_TEST_PYTHONS", sys.executable).split(":")
_RUN = """
import sys
import numpy, onnxruntime
model, given, taken = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
with numpy.load(given) as arrays:
    results = session.run(None, {value.name: arrays[value.name] for value in session.get_inputs()})
numpy.savez(taken, *results)
# The training build of onnxruntime imports torch itself.
assert "lit_ort" not in sys.modules
"""
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


class Runs:
    """The tensors that native sessions get and return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        run = NativePhase.run

        def recorded(phase: NativePhase, tensors: Sequence[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
            given = [tensor.clone() for tensor in tensors]
            results = run(phase, tensors, *rest)
            self.found.append((given, [result.clone() for result in results]))
            return results

        monkeypatch.setattr(NativePhase, "run", recorded)


def dumped(case: Case, dropout: float, folder: Path) -> Path:
    """Runs a step, and returns the file of its model."""
    torch.manual_seed(0)
    module, batch = case.make(dropout)
    compiled = torch.compile(lambda module, batch: case.loss(module(**batch)), backend=backend(dump_dir=str(folder)))
    with dynamo_settings("step", strict=True):
        loss = compiled(module.train(), batch)
    loss.backward()
    (path,) = folder.glob("*/4_forward.onnx")
    return path


def run_elsewhere(python: str, path: Path, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    given, taken = path.parent / "given.npz", path.parent / "taken.npz"
    np.savez(given, **{name: value.numpy() for name, value in inputs.items()})  # pyright: ignore[reportArgumentType]
    command = [python, "-c", _RUN, str(path), str(given), str(taken)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env={})
    assert not ended.returncode, ended.stderr
    with np.load(taken) as arrays:
        return [torch.from_numpy(arrays[name]) for name in arrays.files]


def compare(path: Path, inputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Requires the results of a session from its dumped model in every onnxruntime."""
    model = onnx.load(path)
    given = {value.name: tensor for value, tensor in zip(model.graph.input, inputs, strict=True)}
    names = [value.name for value in model.graph.output]
    assert "loss" in names
    floor = 1e-2 * max(float(value.norm()) for value in expected if value.is_floating_point())
    for python in PYTHONS:
        for label, result, wanted in zip(names, run_elsewhere(python, path, given), expected, strict=True):
            error = float((result.reshape(wanted.shape).double() - wanted).norm())
            assert error / max(float(wanted.double().norm()), floor) <= 1e-4, label


def calls_torch(path: Path) -> bool:
    return any(node.op_type in TORCH_OPERATORS for node in onnx.load(path).graph.node)


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("BERT", 0.3),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in (("BERT", 0.0), ("GPT-2", 0.0), ("GPT-2", 0.3))),
    ],
)
def test_a_dumped_step_runs_in_any_onnxruntime(
    name: str, dropout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(monkeypatch)
    path = dumped(CASES[name], dropout, tmp_path)
    assert not calls_torch(path)
    assert REGION_OPERATOR not in {node.op_type for node in onnx.load(path).graph.node}
    ((inputs, expected),) = runs.found
    compare(path, inputs, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.breaks])
def test_every_dumped_step_without_torch_nodes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    path = dumped(CASES[name], 0.0, tmp_path)
    if calls_torch(path):
        pytest.skip("its step calls torch")
    ((inputs, expected),) = runs.found
    compare(path, inputs, expected)
