"""The kinds of faults: signals, disks that fail or are slow, clocks that jump, files that change."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lit_ort.files

SIGNALS = {
    "kill": signal.SIGKILL,
    "kill one process": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}
# These stop a run through its first process, as a service manager does. Other signals reach every process, as from a
# terminal.
TO_THE_FIRST = ("terminate", "slow disk")
DISKS = {"full": errno.ENOSPC, "input/output error": errno.EIO, "read-only": errno.EROFS}
# After these the last checkpoint is damaged, so another one must be used to resume.
DAMAGES = ("cut off", "flipped bit", "folder in its place", "pipe in its place")
OTHERS = ("suspend", "file size limit", "slow disk", "clock jumps", "damaged graph cache")
KINDS = (*SIGNALS, *DISKS, *DAMAGES, *OTHERS)
_DAY_S = 86400.0
# The output and the events of a small run are smaller.
_LEAST_LIMIT_BYTES = 16_000


@dataclass(frozen=True)
class Fault:
    """A fault of a process.

    Args:
        kind: one of `KINDS`.
        when: the time of a signal, as a fraction of the time of a complete run.
        count: the number of the write at which a disk fails.
        seed: the seed of all other random choices.
    """

    kind: str
    when: float
    count: int
    seed: int


def drawn_fault(draw: random.Random) -> Fault:
    """Draw the next fault of a sequence."""
    return Fault(draw.choice(KINDS), draw.random(), draw.randint(1, 6), draw.getrandbits(32))


def install(fault: Fault | None, checkpoint_bytes: int) -> None:
    """Prepares a fault that occurs inside the process, before the run starts.

    Args:
        fault: the fault, or None.
        checkpoint_bytes: the size of the run's checkpoints.
    """
    if fault is None:
        return
    draw = random.Random(fault.seed)
    if fault.kind in DISKS:
        _replace_os(_FailingOS(DISKS[fault.kind], fault.count))
    elif fault.kind == "slow disk":
        _replace_os(_SlowOS(draw.uniform(0.05, 0.3)))
    elif fault.kind == "file size limit":
        limit = max(_LEAST_LIMIT_BYTES, int(checkpoint_bytes * draw.uniform(0.2, 0.95)))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    elif fault.kind == "clock jumps":
        _make_clock_jump(draw)


def signal_of(fault: Fault | None) -> signal.Signals | None:
    """The signal that ends a run with this fault, or None."""
    if fault is None:
        return None
    if fault.kind in DAMAGES or fault.kind == "damaged graph cache":
        return signal.SIGKILL
    return SIGNALS.get(fault.kind, signal.SIGTERM if fault.kind == "slow disk" else None)


def damage(path: Path, fault: Fault) -> None:
    """Damages a file."""
    draw = random.Random(fault.seed)
    content = path.read_bytes()
    path.unlink()
    if fault.kind == "folder in its place":
        path.mkdir()
    elif fault.kind == "pipe in its place":
        os.mkfifo(path)
    elif fault.kind == "cut off":
        path.write_bytes(content[: draw.randrange(len(content))])
    else:
        path.write_bytes(with_flipped_bit(content, draw))


def with_flipped_bit(content: bytes, draw: random.Random) -> bytes:
    """`content` with one bit changed."""
    changed = bytearray(content)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


class _OS:
    """Replaces `os` in the module that writes files."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _FailingOS(_OS):
    """An `os` whose `count`-th call that reaches the disk fails, and all later ones.

    Args:
        number: the errno.
        count: the number of the first call that fails.
    """

    def __init__(self, number: int, count: int) -> None:
        self._number, self._remaining = number, count

    def fsync(self, handle: int) -> None:
        self._count()
        os.fsync(handle)

    def replace(self, source: Any, target: Any) -> None:
        self._count()
        os.replace(source, target)

    def _count(self) -> None:
        self._remaining -= 1
        if self._remaining <= 0:
            raise OSError(self._number, os.strerror(self._number))


class _SlowOS(_OS):
    """An `os` whose fsync takes some seconds longer."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def fsync(self, handle: int) -> None:
        time.sleep(self._wait_s)
        os.fsync(handle)


def _replace_os(replacement: _OS) -> None:
    lit_ort.files.os = replacement  # pyright: ignore[reportAttributeAccessIssue] - in a separate process


def _make_clock_jump(draw: random.Random) -> None:
    now = time.time

    def jumping() -> float:
        return now() + draw.uniform(-_DAY_S, _DAY_S)

    time.time = jumping
