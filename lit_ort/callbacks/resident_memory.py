"""The resident memory of this process and its peak, as the system reports them."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

MIB = 2**20


def rss_bytes() -> int:
    """The resident memory of this process."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes() -> int | None:
    """The peak of this process's resident memory since its start or `reset_peak_rss`; None if the system has none."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
        return int(line.split()[1]) * 1024 if line else None
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_rss() -> bool:
    """Resets the peak to the current resident memory (Linux, proc(5) clear_refs). Returns whether that worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
