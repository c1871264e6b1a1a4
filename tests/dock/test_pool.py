"""Recycled buffers: one in use is never given out again, one that nobody sees any more is."""

import gc

import numpy as np

from mindspeed_asyncflow.dock.pool import BufferPool


def test_a_buffer_comes_back_when_its_last_view_is_gone_and_not_before():
    pool = BufferPool()
    first = pool.take(100_000)
    view = first[8:16].view(np.int64).reshape(1, -1)
    address = first.ctypes.data
    del first
    assert pool.idle_bytes == 0
    other = pool.take(100_000)
    assert other.ctypes.data != address and pool.made == 2
    del view
    gc.collect()
    assert pool.idle_bytes > 0
    assert pool.take(100_000).ctypes.data == address and pool.made == 2


def test_a_pool_keeps_a_bounded_number_of_bytes_and_wastes_little():
    pool = BufferPool(most_bytes=1 << 20)
    held = [pool.take(400_000) for _ in range(8)]
    held.clear()
    assert 0 < pool.idle_bytes <= 1 << 20
    for size in (1, 70_000, 1 << 20, 9_000_001):
        taken = pool.take(size)
        assert len(taken) == size and taken.base.nbytes <= max(size * 1.13, 1 << 16)
