"""Trains with an exported training step, by the program of its folder in another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.export.training_cases import Batch
from tests.scripts import run_code

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
    folder: Path, batches: Sequence[Batch], rate: float, python: str | None = None
) -> dict[str, np.ndarray]:
    """Takes a step with each batch; returns the reports of all steps, and `eval/NAME` with the last batch.

    Args:
        folder: the folder of the exported step.
        batches: the batches.
        rate: the learning rate.
        python: the interpreter of an environment with onnxruntime and numpy; None forks a process of this one.
    """
    given, taken = folder / "given.npz", folder / "taken.npz"
    arrays = {f"{k}/{name}": value.numpy() for k, batch in enumerate(batches) for name, value in batch.items()}
    np.savez(given, **arrays)  # pyright: ignore[reportArgumentType] - names of arrays
    command = [python or sys.executable, "-c", _TRAIN, str(folder), str(given), str(taken), str(rate)]
    run = subprocess.run if python else run_code
    result = run(command, capture_output=True, text=True, check=False, timeout=300, env={})
    assert not result.returncode, result.stderr
    with np.load(taken) as found:
        return {name: found[name] for name in found.files}


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in arrays.items()}
