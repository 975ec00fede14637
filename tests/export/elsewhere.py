"""Trains with an exported training step in a process that has onnxruntime and numpy alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.export.training_cases import Batch

# The program of the folder, and that nothing else was needed.
_TRAIN = """
import sys
folder, batches, results, rate = sys.argv[1:]
sys.path.insert(0, folder)
import numpy, train
arrays, steps = numpy.load(batches), {}
for key in arrays.files:
    number, name = key.split("/", 1)
    steps.setdefault(int(number), {})[name] = arrays[key]
reports = list(train.train([steps[k] for k in sorted(steps)], float(rate)))
assert "lit_ort" not in sys.modules
last = steps[max(steps)]
evaluated = {f"eval/{n}": v for m in ("eval_step.onnx", "predict.onnx") for n, v in train.run(m, last).items()}
numpy.savez(results, **{n: [r[n] for r in reports] for n in reports[0]}, **evaluated)
"""


def train_elsewhere(
    folder: Path, batches: Sequence[Batch], rate: float, python: str = sys.executable
) -> dict[str, np.ndarray]:
    """Takes a step with each batch; returns the reports of all steps, and `eval/NAME` with the last batch."""
    given, taken = folder / "given.npz", folder / "taken.npz"
    arrays = {f"{k}/{name}": value.numpy() for k, batch in enumerate(batches) for name, value in batch.items()}
    np.savez(given, **arrays)  # pyright: ignore[reportArgumentType] - names of arrays
    command = [python, "-c", _TRAIN, str(folder), str(given), str(taken), str(rate)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env={})
    assert not result.returncode, result.stderr
    with np.load(taken) as found:
        return {name: found[name] for name in found.files}


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in arrays.items()}
