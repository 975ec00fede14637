"""Caches of what was made for the latest sizes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from lit_ort.runtime.latest import Latest


@pytest.fixture
def switches_often() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_the_oldest_entry_leaves() -> None:
    latest = Latest[int, int](4)
    for number in (*range(6), 3):
        latest[number] = number
    assert list(latest) == [2, 3, 4, 5]


@pytest.mark.usefixtures("switches_often")
def test_threads_add_entries() -> None:
    latest = Latest[tuple[int, int], int](4)
    errors: list[Exception] = []

    def add(thread: int) -> None:
        try:
            for number in range(20_000):
                latest[thread, number % 97] = number
        except (KeyError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
