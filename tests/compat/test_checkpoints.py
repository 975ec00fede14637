"""Checkpoints of a module are traced, regardless of the order in which onnxruntime and lit_ort are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKPOINT = "from torch.utils.checkpoint import checkpoint"
LIT_ORT = "import lit_ort"
ONNXRUNTIME = "import onnxruntime"
STEP = """
import torch
inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))

def step(x):
    for _ in range(3):
        x = checkpoint(inner, x, use_reentrant=False)
    return x.sum()

engine = lit_ort.ORTBackend(lit_ort.ORTOptions(fallback="error", disable_passes=("regions",)))
torch.compile(step, backend=engine)(torch.ones(2, 4)).backward()
(graph,) = engine.compile_log.graphs
print(graph.torch_operators.get("aten.tanh.default", 0), graph.operators_before.get("aten.tanh.default", 0))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        pytest.param((ONNXRUNTIME, LIT_ORT, CHECKPOINT), marks=pytest.mark.sweep),
        pytest.param((LIT_ORT, ONNXRUNTIME, CHECKPOINT), marks=pytest.mark.sweep),
        (ONNXRUNTIME, CHECKPOINT, LIT_ORT),
        pytest.param((CHECKPOINT, ONNXRUNTIME, LIT_ORT), marks=pytest.mark.sweep),
    ],
)
@pytest.mark.sweep
def test_checkpoints_are_traced(imports: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("\n".join([*imports, STEP]))
    process = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    after, before = map(int, process.stdout.split())
    assert before == 3
    assert after > before
