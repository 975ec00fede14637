"""A few faults of the campaign in `benchmarks/faults.py`, which has hundreds."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.kinds import KINDS, drawn_fault

ROOT = Path(__file__).parents[2]


def test_every_kind_of_fault_is_drawn_and_the_same_again() -> None:
    drawn = [drawn_fault(random.Random(seed)) for seed in range(300)]
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert drawn == [drawn_fault(random.Random(seed)) for seed in range(300)]


@pytest.mark.slow
def test_runs_with_faults_are_whole_in_the_end() -> None:
    options = ["--ways", "ort", "--tasks", "gpt2", "--runs", "1", "--seed", "500", "--faults", "3"]
    command = [sys.executable, "-m", "benchmarks.faults", *options]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [each["problems"] for each in found] == [[] for _ in found], ended.stderr[-2000:]
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert sum(sum(each["faults"].values()) for each in found) >= 1
