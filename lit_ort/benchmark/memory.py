"""The most memory that a process holds while something runs (Linux)."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
from collections.abc import Callable

from lit_ort.callbacks import peak_rss_bytes, reset_peak_rss

MB = 1e6


def peak_mb(run: Callable[[], None]) -> float | None:
    """The peak above what the process held before, in MB; None where the system does not tell.

    What the allocator keeps of earlier runs is given back first, since a run would take it without asking.
    """
    gc.collect()
    _give_back()
    # A peak that begins here is what the process holds here.
    before = peak_rss_bytes() if reset_peak_rss() else None
    run()
    peak = peak_rss_bytes()
    return None if before is None or peak is None else (peak - before) / MB


def _give_back() -> None:
    library = ctypes.util.find_library("c")
    if library is not None and hasattr(ctypes.CDLL(library), "malloc_trim"):
        ctypes.CDLL(library).malloc_trim(0)
