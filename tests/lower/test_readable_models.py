"""The models of native sessions for readers: what they compute in ONNX Runtime alone, names, steps of views."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_ort.lower import native_operators
from lit_ort.lower.memory_steps import MemorySteps, memory_steps
from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from tests.compare import backend
from tests.lower.test_native_phases import loss, mlp


@pytest.fixture(autouse=True)
def any_number_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_operators, "FEWEST_OPERATORS", 0)


def run(path: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results of a dumped model; sizes are computed from the texts of their inputs."""
    import onnxruntime  # takes two seconds

    model = onnx.load(path)
    sizes = {value.name: eval(f"[{value.doc_string}]", dict(inputs)) for value in model.graph.input if value.doc_string}
    given = {name: tensor.detach().numpy() for name, tensor in inputs.items()}
    given |= {name: np.array(numbers) for name, numbers in sizes.items()}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {value.name: given[value.name] for value in session.get_inputs()})
    return {value.name: torch.from_numpy(y) for value, y in zip(session.get_outputs(), found, strict=True)}


def test_a_step_has_the_names_of_the_module(tmp_path: Path) -> None:
    module, x, labels = mlp().eval(), torch.randn(4, 6), torch.tensor([0, 2, 1, 1])
    value = torch.compile(loss, backend=backend(dump_dir=str(tmp_path)))(module, x, labels)
    value.backward()
    (path,) = tmp_path.glob("*/4_forward.onnx")
    found = run(path, {"x": x, "labels": labels, **dict(module.named_parameters())})
    expected = {"loss": value, **{f"{name}.grad": p.grad for name, p in module.named_parameters()}}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].reshape(gradient.shape), gradient.detach(), msg=name)
    model = onnx.load(path)
    assert {node.name for node in model.graph.node} >= {"0.Gemm", "4.Gemm", "4.backward.Gemm"}
    functions = {function.name: function for function in model.functions}
    assert {node.op_type for node in model.graph.node if node.domain == "lit_ort"} == functions.keys()
    assert any("region over r0 | c0" in function.doc_string for function in functions.values())


def test_a_step_under_autocast(tmp_path: Path) -> None:
    """Its matmuls are standard ones of float32 values, and regions round."""
    if not has_bfloat16_matmuls():
        pytest.skip("torch's matmuls are faster here")
    module, x, labels = mlp().eval(), torch.randn(4, 6), torch.tensor([0, 2, 1, 1])
    with torch.autocast("cpu", torch.bfloat16):
        value = torch.compile(loss, backend=backend(dump_dir=str(tmp_path)))(module, x, labels)
    value.backward()
    (path,) = tmp_path.glob("*/4_forward.onnx")
    found = run(path, {"x": x, "labels": labels, **dict(module.named_parameters())})
    for name, parameter in module.named_parameters():
        gradient = found[f"{name}.grad"].reshape(parameter.shape)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-2, atol=1e-3, msg=name)


# Functions of x, y: float32[n, n], of any n.
OF_ANY_SIZE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rows": lambda x, y: F.layer_norm((x @ y).relu() + y, [x.shape[1]]).softmax(1) @ y,
    "views": lambda x, y: (x.t() @ y).exp().t().reshape(-1)[4:].sigmoid() + 1,
    "a concatenation": lambda x, y: torch.cat([x @ y, y.exp()], 1) @ torch.cat([x, y], 0),
    "a gather": lambda x, y: y.exp()[(x @ y).sum(1).long() % 4] * 2 @ x,
    "numbers of sizes": lambda x, y: (x @ y).exp().mean(1) / x.shape[0] + torch.arange(x.shape[0]),
}


@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_functions_of_any_size(name: str, tmp_path: Path) -> None:
    function = OF_ANY_SIZE[name]
    compiled = torch.compile(lambda x, y: function(x, y), backend=backend(dump_dir=str(tmp_path)), dynamic=True)
    compiled(torch.randn(9, 9), torch.randn(9, 9))
    (path,) = tmp_path.glob("*/4_forward.onnx")
    for size in (9, 5):
        x, y = torch.randn(size, size), torch.randn(size, size)
        (found,), expected = run(path, {"x": x, "y": y}).values(), function(x, y)
        torch.testing.assert_close(found.reshape(expected.shape), expected)


def test_views_are_steps_where_they_can_be() -> None:
    assert memory_steps(24, [(4, 6), (6, 1)], 0) == MemorySteps((4, 6), (0, 0), (4, 6), (0, 1))
    assert memory_steps(24, [(6, 1), (4, 6)], 0) == MemorySteps((4, 6), (0, 0), (4, 6), (1, 0))
    assert memory_steps(24, [(2, 6), (3, 1)], 7) == MemorySteps((4, 6), (1, 1), (2, 3), (0, 1))
    assert memory_steps(24, [(4, 6)], 2) == MemorySteps((4, 6), (0, 2), (4, 1), (0,))
    assert memory_steps(1, [], 0) == MemorySteps((1,), (0,), (1,), ())
    # Windows that overlap, an end beyond a row, a backward view.
    assert memory_steps(6, [(4, 1), (3, 1)], 0) is None
    assert memory_steps(24, [(4, 6), (6, 1)], 1) is None
    assert memory_steps(6, [(6, -1)], 5) is None
