"""A rank that raises, dies, hangs or is told to stop ends the whole job soon, says why, and no process is left."""

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
# Of imports, compilation and the watch of the processes.
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


# A rank that hangs is found by its neighbour's timeout, whoever started it.
@pytest.mark.parametrize(
    ("how", "launcher"),
    [pair for pair in itertools.product(CAUSES, LAUNCHERS) if pair[1] == "lightning" or pair[0] in ("raises", "dies")],
)
def test_one_failing_rank_ends_the_job(how: str, launcher: str) -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "LIT_ORT_TEST": mark, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [*LAUNCHERS[launcher], str(SCRIPT), how]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S + 2 * WAIT_S)
    assert job.returncode != 0 or how == "stopped"  # Lightning calls it an orderly end
    if how != "dies":
        assert CAUSES[how] in job.stderr
    elif launcher == "lightning":  # Lightning's watch may be first; torchrun stops the other rank before it notices
        assert CAUSES[how] in job.stderr or "terminated with code -9" in job.stderr
    _require_end(mark, within_s=10)


def _require_end(mark: str, within_s: float) -> None:
    until = time.monotonic() + within_s
    while processes_of(mark) and time.monotonic() < until:
        time.sleep(0.2)
    assert not processes_of(mark)


# Its child is still importing at the first time, and waits for it at the second one.
@pytest.mark.parametrize("after_s", [0, 25])
def test_no_process_waits_for_a_first_one_that_died_before_they_joined(after_s: float) -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "LIT_ORT_TEST": mark, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [*LAUNCHERS["lightning"], str(SCRIPT), "killed", str(after_s)]
    job = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=START_S)
    assert job.returncode == -signal.SIGKILL
    _require_end(mark, within_s=10 if after_s else 60)
    assert after_s or "RankError: process" in job.stderr


def test_a_first_rank_that_cannot_be_reached_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "1", "LOCAL_RANK": "0"}
    environment = {**os.environ, **place, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, str(SCRIPT), "alone"]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S)
    assert job.returncode != 0
    assert f"RankError: rank 1 of 2 could not join the others at 127.0.0.1:{port}" in job.stderr
    assert "Check that rank 0 runs there" in job.stderr
