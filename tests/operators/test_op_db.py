"""Torch's database of operators: all results are correct, none raises an error, and all fallbacks are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.operators import known
from tests.operators.op_db import BAD, FALLBACK, Outcome

# One in twenty-four operators; `python -m tests.operators.op_db` compares all of them.
PARTS = 24
TESTED_PARTS = [0, *(pytest.param(part, marks=pytest.mark.sweep) for part in range(1, PARTS))]


@pytest.mark.slow
@pytest.mark.parametrize("part", TESTED_PARTS)
def test_matches_eager(part: int, tmp_path: Path) -> None:
    file = tmp_path / "outcomes.json"
    # In a separate process that has no sessions, since it forks.
    command = [sys.executable, "-m", "tests.operators.op_db", "--part", f"{part}/{PARTS}", "--json", str(file)]
    subprocess.run(command, check=True, timeout=1800)
    outcomes = [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]
    assert len(outcomes) > 20
    assert not [outcome for outcome in outcomes if outcome.kind in BAD]
    fallbacks = {outcome.name.split()[0] for outcome in outcomes if outcome.kind == FALLBACK}
    assert fallbacks == {outcome.name.split()[0] for outcome in outcomes} & known.FALLBACKS.keys()
