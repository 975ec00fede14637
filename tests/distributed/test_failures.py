"""A rank that raises, dies, hangs or is stopped ends the whole job soon, reports the cause, and leaves no process."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.distributed.failing import WAIT_S

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("failing.py")
LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"],
}
# The time for imports, compilation and the detection of a failed process.
START_S = 150
CAUSES = {
    "raises": "rank 1 of 2 stops at step 2: ValueError: row 17 of the data is broken",
    "dies": "rank 0 of 2 stops at step 2: it lost another rank",
    "hangs": "rank 0 of 2 stops at step 2: it lost another rank, or waited for it longer than the timeout",
    "stopped": "rank 0 of 2 stops at step 3: SIGTERMException",
}


def processes_of(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _mark_of(process) == mark]


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("LIT_ORT_TEST")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


# A rank that hangs is detected by another rank's timeout, with both launchers. torchrun itself stops the others of one
# that dies.
@pytest.mark.parametrize(
    ("failure", "launcher"),
    [
        pytest.param(
            cause,
            launcher,
            marks=[] if launcher == "lightning" and cause == "dies" else [pytest.mark.sweep],
        )
        for cause, launcher in itertools.product(CAUSES, LAUNCHERS)
        if launcher == "lightning" or cause in ("raises", "dies")
    ],
)
def test_one_failing_rank_ends_the_job(failure: str, launcher: str) -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "LIT_ORT_TEST": mark, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [*LAUNCHERS[launcher], str(SCRIPT), failure]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S + 2 * WAIT_S)
    assert job.returncode != 0 or failure == "stopped"  # Lightning exits with 0 after SIGTERM
    if failure != "dies":
        assert CAUSES[failure] in job.stderr
    elif launcher == "lightning":  # Lightning can detect it first; torchrun stops the other rank before it detects it
        assert CAUSES[failure] in job.stderr or "terminated with code -9" in job.stderr
    _require_end(mark, within_s=10)


def _require_end(mark: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes_of(mark)


# With 0 s the child process is still importing; with 25 s it is already waiting for its parent.
@pytest.mark.sweep
@pytest.mark.parametrize("after_s", [0, 25])
def test_no_process_waits_for_a_first_process_that_died_before_joining(after_s: float) -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "LIT_ORT_TEST": mark, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [*LAUNCHERS["lightning"], str(SCRIPT), "killed", str(after_s)]
    job = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=START_S)
    assert job.returncode == -signal.SIGKILL
    _require_end(mark, within_s=10 if after_s else 60)
    assert after_s or "RankError: process" in job.stderr


@pytest.mark.sweep
def test_the_address_of_an_unreachable_first_rank_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "1", "LOCAL_RANK": "0"}
    environment = {**os.environ, **address, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, str(SCRIPT), "alone"]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S)
    assert job.returncode != 0
    assert f"RankError: rank 1 of 2 could not join the others at 127.0.0.1:{port}" in job.stderr
    assert "Check that rank 0 runs there" in job.stderr
