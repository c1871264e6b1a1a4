"""Pages of released CPU storages come back under the next block of the same size."""

from __future__ import annotations

import mmap
import resource

import pytest
import torch

from mindspeed_asyncflow.platforms import cpu_pages
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.cpu_pages import PageCache
from mindspeed_asyncflow.platforms.memory import raw_bytes

BLOCK = 8 * 2**20


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_a_block_that_comes_back_is_not_cleared_by_the_kernel_again() -> None:
    platform, storage = CpuPlatform(), torch.ones(BLOCK, dtype=torch.uint8).untyped_storage()
    platform.release_storage(storage)
    before = faults()
    platform.restore_storage(storage, BLOCK)
    raw_bytes(storage).fill_(7)
    assert faults() - before < BLOCK / mmap.PAGESIZE / 4
    assert storage.nbytes() == BLOCK and set(storage[:5]) | set(storage[-5:]) == {7}


@pytest.mark.parametrize("nbytes", [BLOCK, BLOCK + 1, BLOCK + mmap.PAGESIZE - 1])
@pytest.mark.parametrize("offset", [0, 64, mmap.PAGESIZE - 64])
def test_memory_around_a_block_is_never_touched(nbytes: int, offset: int) -> None:
    around = torch.full((BLOCK + 4 * mmap.PAGESIZE,), 3, dtype=torch.uint8)
    cache, block = PageCache(), around[offset : offset + nbytes]
    block.fill_(9)
    assert cache.keep(block.data_ptr(), nbytes)
    block.fill_(1)  # the block is still mapped
    assert cache.put(block.data_ptr(), nbytes)
    assert 9 in block and set(block.unique().tolist()) <= {1, 9}
    assert set(around[:offset].unique().tolist()) | set(around[offset + nbytes :].unique().tolist()) == {3}


def test_pages_are_found_by_size_and_used_once() -> None:
    cache, block = PageCache(), torch.ones(BLOCK, dtype=torch.uint8)
    assert cache.keep(block.data_ptr(), BLOCK)
    assert BLOCK - 2 * mmap.PAGESIZE <= cache.nbytes <= BLOCK
    assert not cache.put(block.data_ptr(), BLOCK // 2)
    assert cache.put(block.data_ptr(), BLOCK)
    assert not cache.put(block.data_ptr(), BLOCK)
    assert cache.nbytes == 0
    assert not cache.keep(block.data_ptr(), 1000)  # not worth it


def test_without_the_system_call_storages_are_mapped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: None, use_errno: bool) -> None:
        raise OSError("no C library")

    monkeypatch.setattr(cpu_pages.ctypes, "CDLL", no_library)
    cache, block = PageCache(), torch.ones(BLOCK, dtype=torch.uint8)
    assert not cache.keep(block.data_ptr(), BLOCK)
    assert not cache.put(block.data_ptr(), BLOCK)
    assert bool((block == 1).all())


def test_a_kernel_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_pages, "DONT_UNMAP", 1 << 10)  # a flag that no kernel knows
    cache, block = PageCache(), torch.ones(BLOCK, dtype=torch.uint8)
    assert not cache.keep(block.data_ptr(), BLOCK)
    assert cache.nbytes == 0 and bool((block == 1).all())
