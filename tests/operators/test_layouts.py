"""Samples of operators and modules in several memory layouts are as in eager, and kernels that need one are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lit_ort._compat.torch_ops import CONTIGUOUS, IMAGES_IN_ONE_FORMAT, LAST_DIMENSION_CONTIGUOUS
from lit_ort.errors import DEFECT
from tests.operators.kernels import find
from tests.operators.layouts import outcomes_of, subjects
from tests.operators.op_db import BAD, RIGHT, Outcome

# `python -m tests.operators.layouts` compares all of them.
SAMPLE = ("nn.GroupNorm", "pixel_shuffle")
LARGER_SAMPLE = ("nn.BatchNorm1d", "nn.MultiheadAttention", "nn.LSTM")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", [*SAMPLE, *(pytest.param(text, marks=pytest.mark.sweep) for text in LARGER_SAMPLE)])
@pytest.mark.sampled(1)
def test_layouts(text: str) -> None:
    outcomes = [outcome for subject in subjects(text) for outcome in outcomes_of(subject)]
    assert outcomes
    assert not [outcome for outcome in outcomes if outcome.kind != RIGHT]


# A part takes one to two minutes.
PARTS = 32


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators_and_modules_in_all_layouts(part: int, tmp_path: Path) -> None:
    file = tmp_path / "outcomes.json"
    # In a separate process that has no sessions, since it forks.
    command = [sys.executable, "-m", "tests.operators.layouts", "--part", f"{part}/{PARTS}", "--json", str(file)]
    subprocess.run(command, check=True, timeout=1800)
    outcomes = [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]
    assert len(outcomes) > 20
    assert not [outcome for outcome in outcomes if outcome.kind in BAD or DEFECT in outcome.detail]


@pytest.mark.parametrize("text", ["Norm", "Pool", "CTC", "attention", "embedding_bag", "weight_norm"])
def test_kernels_that_depend_on_strides_are_known(text: str) -> None:
    known = {str(target) for target in (*CONTIGUOUS, *IMAGES_IN_ONE_FORMAT, *LAST_DIMENSION_CONTIGUOUS)}
    assert find(text) <= known
