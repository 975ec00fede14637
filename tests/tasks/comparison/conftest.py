"""A program that replaces train.py."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from lit_ort_tasks.comparison import processes

from tests.tasks.comparison.runs import METRICS, STEPS


@pytest.fixture
def train_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A train.py without training: a step of eager has 100 ms, of ort 80 ms, and compile fails as Hydra reports it."""
    path = tmp_path / "train.py"
    program = f"""
        import json, sys, time
        from pathlib import Path
        options = dict(argument.split("=", 1) for argument in sys.argv[1:])
        folder = Path(options["hydra.run.dir"].strip("'"))
        print("Epoch 0: 50%\\rEpoch 0: 100%", flush=True)
        if options["strategy"] == "compile":
            print("Error executing job with overrides: []")
            print("Traceback (most recent call last):\\n  File ...\\nbackend.CompileError: no such | kernel [yet]\\n")
            sys.exit("Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.")
        steps = {STEPS!r} | dict(started_unix_s=time.time())
        if options["strategy"] == "ort":
            steps |= dict(step_ms_median=80.0)
        (folder / "arguments.json").write_text(json.dumps(sys.argv[1:]))
        results = dict(steps=steps, metrics={METRICS!r}, headline=["ppl"], checkpoint="best.ckpt")
        (folder / "results.json").write_text(json.dumps(results))
    """
    path.write_text(textwrap.dedent(program))
    monkeypatch.setattr(processes, "TRAIN", (str(path),))
    return path
