"""Settings of the C library's allocator, so that memory freed by a step is reused by the next one.

By default, glibc returns the end of its heap, and every large block, to the system as soon as they are free, and the
next step allocates them again, page by page: steps of vision models have 3,000 to 12,000 page faults, which cost up to
a tenth of their time.

Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Blocks above this size are mapped separately and returned to the system when they are freed.
LARGEST_KEPT = 2**25
# The free memory that is kept at the end of the heap.
MOST_KEPT = 2**30


@functools.cache
def keep_freed_memory() -> bool:
    """Make the process keep freed memory until it ends. Returns whether its C library supports this."""
    name = ctypes.util.find_library("c")
    library = None if name is None else ctypes.CDLL(name)
    if library is None or not hasattr(library, "mallopt"):
        return False
    settings = ((_MMAP_THRESHOLD, LARGEST_KEPT), (_TRIM_THRESHOLD, MOST_KEPT))
    return all([library.mallopt(setting, value) == 1 for setting, value in settings])
