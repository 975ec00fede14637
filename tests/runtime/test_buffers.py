from __future__ import annotations

import errno
import mmap
import os
import random
import threading

import psutil
import pytest
import torch

from lit_ort.runtime import buffers
from lit_ort.runtime.buffers import BufferPool


def test_memory_is_reused_once_it_is_free() -> None:
    pool = BufferPool(small_bytes=0)
    first = pool.empty(10, 16)
    address = first.data_ptr()
    assert pool.empty(10, 16).data_ptr() != address
    del first
    view = pool.empty(9, 16)[3:]
    assert view.data_ptr() - 3 * 64 == address
    assert pool.empty(10, 16).data_ptr() != address
    del view
    assert pool.empty(10, 16).data_ptr() == address


def test_adjacent_free_blocks_merge_for_a_larger_tensor() -> None:
    pool = BufferPool(small_bytes=0)
    parts = [pool.empty(16) for _ in range(4)]
    end = pool.empty(16)
    address, reserved = parts[0].data_ptr(), pool.reserved_bytes
    for order in (2, 0, 1, 3):
        parts[order] = torch.empty(0)
    assert pool.empty(64).data_ptr() == address
    assert pool.reserved_bytes == reserved
    del end


def test_the_smallest_sufficient_block_is_used() -> None:
    pool = BufferPool(small_bytes=0)
    large, barrier, small, end = pool.empty(64), pool.empty(16), pool.empty(32), pool.empty(16)
    address = small.data_ptr()
    del large, small
    assert pool.empty(20).data_ptr() == address
    del barrier, end


def test_other_dtypes_and_empty_tensors() -> None:
    pool = BufferPool(small_bytes=0)
    mask = pool.empty(3, 5, dtype=torch.uint8)
    assert (mask.shape, mask.dtype) == ((3, 5), torch.uint8)
    assert pool.empty(2, dtype=torch.int64).fill_(-1).tolist() == [-1, -1]
    assert pool.empty(0, 4).shape == (0, 4)
    assert pool.empty().shape == ()


def test_a_request_larger_than_a_segment_gets_a_separate_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "SEGMENT_BYTES", 4096)
    pool = BufferPool(small_bytes=0)
    tensors = [pool.empty(n) for n in (500, 5000, 600)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [1.0], [2.0]]


def test_limited_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `ulimit -v`."""
    mmap_without_limit = mmap.mmap

    def limited(fileno: int, length: int, **settings: int) -> mmap.mmap:
        if length > 10_000:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mmap_without_limit(fileno, length, **settings)

    monkeypatch.setattr(buffers.mmap, "mmap", limited)
    pool = BufferPool(small_bytes=0)
    assert pool.empty(1000).fill_(1).sum() == 1000
    with pytest.raises(MemoryError, match=r"20032 bytes for one value can't be allocated: Cannot allocate memory\."):
        pool.empty(5001)


def test_a_tensor_outlives_its_pool() -> None:
    tensor = BufferPool(small_bytes=0).empty(1000).fill_(3)
    BufferPool(small_bytes=0).empty(1000).fill_(4)
    assert tensor.sum() == 3000


def test_tensors_never_overlap() -> None:
    draws = random.Random(1)
    pool, live = BufferPool(small_bytes=0), []
    for number in range(2000):
        if len(live) > 20:
            value, tensor = live.pop(draws.randrange(len(live)))
            assert bool((tensor == value).all())
        live.append((number, pool.empty(draws.randrange(1, 3000)).fill_(number)))
    assert pool.reserved_bytes < 2 * sum(tensor.nbytes for _, tensor in live)


def test_several_threads() -> None:
    pool, wrong = BufferPool(small_bytes=0), []

    def work(value: int) -> None:
        for _ in range(300):
            tensor = pool.empty(100).fill_(value)
            if not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="the system has no madvise")
def test_trim_frees_unused_memory_only() -> None:
    pool, process = BufferPool(small_bytes=0), psutil.Process()
    live = pool.empty(1000).fill_(3.0)
    large = pool.empty(50_000_000).fill_(1.0)
    before = process.memory_info().rss
    pool.trim()
    assert process.memory_info().rss > before - 50e6
    del large
    pool.trim()
    assert process.memory_info().rss < before - 150e6
    assert bool((live == 3.0).all())
    assert float(pool.empty(50_000_000).fill_(2.0).sum()) == 1e8
