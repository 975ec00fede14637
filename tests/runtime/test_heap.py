"""The C library keeps what steps free, where it is told to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lit_ort.backend import backend as module
from lit_ort.backend.backend import ORTBackend
from lit_ort.options import ORTOptions

STEPS = """
import resource
import torch
from lit_ort.backend.backend import ORTBackend
from lit_ort.options import ORTOptions

ORTBackend(ORTOptions())

def step():
    held = [torch.ones(2**20) for _ in range(20)]
    del held

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="page faults of Linux, and glibc's heap")
def test_steps_take_the_memory_of_the_last_one() -> None:
    # In a process of its own: the setting holds until a process ends. Without it most runs have 100,000 faults.
    run = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 500


@pytest.mark.parametrize("keeps", [True, False])
def test_a_backend_asks_for_it_by_its_option(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(module, "keep_freed_memory", lambda: asked.append(True))
    ORTBackend(ORTOptions(keep_memory=keeps))
    assert asked == [True] * keeps
