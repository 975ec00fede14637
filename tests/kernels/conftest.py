"""One cache of kernels for all tests of a process: equal regions are compiled once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("llvmlite")

if TYPE_CHECKING:
    from lit_ort.kernels.kernel_calls import KernelCache


@pytest.fixture(scope="session")
def kernels() -> KernelCache:
    from lit_ort.kernels.kernel_calls import KernelCache

    return KernelCache()
