"""The C library keeps the memory that steps free if `keep_memory` is set."""

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
    tensors = [torch.ones(2**20) for _ in range(20)]
    del tensors

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures page faults of Linux with glibc's heap")
@pytest.mark.sweep
def test_steps_reuse_the_memory_of_the_previous_step() -> None:
    # In a separate process, since the setting lasts until the process ends. Without it, most runs have 100,000 faults.
    run = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 500


@pytest.mark.parametrize("keep_memory", [True, False])
def test_a_backend_keeps_memory_if_the_option_is_set(keep_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(module, "keep_freed_memory", lambda: calls.append(True))
    ORTBackend(ORTOptions(keep_memory=keep_memory))
    assert calls == [True] * keep_memory
