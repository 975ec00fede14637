"""The C library keeps what steps free, where it is told to."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch
from lit_ort.backend.backend import ORTBackend
from lit_ort.options import ORTOptions

ORTBackend(ORTOptions(keep_memory=sys.argv[1] == "True"))

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


@pytest.mark.skipif(sys.platform != "linux", reason="page faults of Linux, and glibc's heap")
def test_steps_take_the_memory_of_the_last_one() -> None:
    # In processes of their own: the setting holds until a process ends.
    runs = [
        subprocess.run([sys.executable, "-c", STEPS, keeps], capture_output=True, text=True, check=True)
        for keeps in ("True", "False")
    ]
    kept, given_back = (int(run.stdout) for run in runs)
    assert kept < 500
    assert given_back > 20 * 2**20 * 4 / resource.getpagesize()
