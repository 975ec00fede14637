"""Checkpoints of a module are traced, wherever onnxruntime's Python module is imported and whatever it replaces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LATE_NAME = "from torch.utils.checkpoint import checkpoint"
OURS = "import lit_ort"
THEIRS = "import onnxruntime"
STEP = """
import torch
inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))

def step(x):
    for _ in range(3):
        x = checkpoint(inner, x, use_reentrant=False)
    return x.sum()

engine = lit_ort.ORTBackend(lit_ort.ORTOptions(fallback="error"))
torch.compile(step, backend=engine)(torch.ones(2, 4)).backward()
(graph,) = engine.compile_log.graphs
print(graph.torch_operators.get("aten.tanh.default", 0), graph.operators_before.get("aten.tanh.default", 0))
"""


@pytest.mark.parametrize(
    "imports",
    [
        (THEIRS, OURS, LATE_NAME),
        pytest.param((OURS, THEIRS, LATE_NAME), marks=pytest.mark.slow),
        (THEIRS, LATE_NAME, OURS),
        pytest.param((LATE_NAME, THEIRS, OURS), marks=pytest.mark.slow),
    ],
)
def test_checkpoints_are_traced(imports: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("\n".join([*imports, STEP]))
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    after, before = map(int, ended.stdout.split())
    assert before == 3
    assert after > before
