"""The peak memory of a process during a function call (Linux)."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
from collections.abc import Callable

from lit_ort.callbacks import peak_rss_bytes, reset_peak_rss

MB = 1e6


def peak_mb(run: Callable[[], None]) -> float | None:
    """The peak memory during `run` above the memory before it, in MB; None if the system doesn't report it.

    Free memory that the allocator keeps is returned to the system first, since `run` could reuse it unnoticed.
    """
    gc.collect()
    _trim()
    # After a reset, the peak equals the current memory.
    before = peak_rss_bytes() if reset_peak_rss() else None
    run()
    peak = peak_rss_bytes()
    return None if before is None or peak is None else (peak - before) / MB


def _trim() -> None:
    library = ctypes.util.find_library("c")
    if library is not None and hasattr(ctypes.CDLL(library), "malloc_trim"):
        ctypes.CDLL(library).malloc_trim(0)
