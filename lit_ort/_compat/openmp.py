"""The functions of the OpenMP library that torch has loaded, by their addresses."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

from lit_ort._compat.torch_blas import torch_library

_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads", "omp_in_parallel")


@dataclass(frozen=True)
class OpenMP:
    """Addresses of functions of the OpenMP library that torch has loaded."""

    parallel: int
    thread: int
    threads: int
    most_threads: int
    is_parallel: int


@functools.cache
def find_openmp() -> OpenMP | None:
    """The OpenMP library of torch; None if torch has none of this interface, so that kernels run on one thread."""
    library = torch_library()
    if library is None:
        return None
    try:
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    except AttributeError:
        return None
    return OpenMP(*(address or 0 for address in addresses))


def uses_openmp() -> bool:
    """Whether native sessions run on OpenMP's threads, as torch's operators do, rather than on their own."""
    return find_openmp() is not None


def pause_of_openmp() -> Callable[[int], int] | None:
    """The function that ends the idle threads of the calling thread's OpenMP pool, which otherwise spin; None if there
    is none. The next parallel region of torch starts them again. Source: omp_pause_resource_all of OpenMP 5.0."""
    library = torch_library()
    function = None if library is None else getattr(library, "omp_pause_resource_all", None)
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    return function
