"""A short version of the campaign in `benchmarks/faults.py`, which has hundreds of faults."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.kinds import KINDS, drawn_fault

ROOT = Path(__file__).parents[2]


def test_every_kind_of_fault_is_drawn_reproducibly() -> None:
    faults = [drawn_fault(random.Random(seed)) for seed in range(300)]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert faults == [drawn_fault(random.Random(seed)) for seed in range(300)]


@pytest.mark.sweep
def test_runs_with_faults_complete_correctly() -> None:
    options = ["--strategies", "ort", "--tasks", "gpt2", "--runs", "1", "--seed", "500", "--faults", "2"]
    command = [sys.executable, "-m", "benchmarks.faults", *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    findings = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [line["problems"] for line in findings] == [[] for _ in findings], result.stderr[-2000:]
    assert result.returncode == 0, result.stderr[-2000:]
    assert sum(sum(line["faults"].values()) for line in findings) >= 1
