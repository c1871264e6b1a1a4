"""Pages of released CPU storages come back under the next blocks, of whatever size."""

from __future__ import annotations

import mmap
import random
import resource
import subprocess
import sys

import pytest
import torch

from mindspeed_asyncflow.platforms import cpu_pages
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.cpu_pages import PagePool
from mindspeed_asyncflow.platforms.memory import raw_bytes

MIB = 2**20
BLOCK = 8 * MIB


def mapped(nbytes: int, value: int) -> torch.Tensor:
    """uint8 [nbytes] in a mapping of its own, where malloc has never put anything."""
    place = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(place, dtype=torch.uint8).fill_(value)


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
    around = mapped(BLOCK + 4 * mmap.PAGESIZE, 3)
    pool, block = PagePool(), around[offset : offset + nbytes]
    block.fill_(9)
    assert pool.keep(block.data_ptr(), nbytes)
    block.fill_(1)  # the block is still mapped
    assert pool.put(block.data_ptr(), nbytes) > nbytes - 2 * mmap.PAGESIZE
    assert 9 in block and set(block.unique().tolist()) <= {1, 9}
    assert set(around[:offset].unique().tolist()) | set(around[offset + nbytes :].unique().tolist()) == {3}


def test_pages_are_used_once_and_small_blocks_are_not_worth_it() -> None:
    pool, block = PagePool(), mapped(BLOCK, 1)
    assert pool.keep(block.data_ptr(), BLOCK)
    held = pool.nbytes
    assert BLOCK - 2 * mmap.PAGESIZE <= held <= BLOCK
    assert pool.put(block.data_ptr(), BLOCK) == held
    assert (pool.put(block.data_ptr(), BLOCK), pool.nbytes) == (0, 0)
    assert not pool.keep(block.data_ptr(), 1000)


@pytest.mark.parametrize(("before", "after"), [([8], [3, 3, 1]), ([2, 3, 4], [8]), ([5, 5], [4, 4])])
def test_a_block_of_any_size_gets_the_pages_of_others(before: list[int], after: list[int]) -> None:
    """Sizes in MiB. One piece is cut for several blocks, several follow each other under one; pages stay pages that
    have been written (no page fault), and what lies beside a block is as it was."""
    pool = PagePool()
    given = [mapped(size * MIB, 9) for size in before]
    around = [mapped(size * MIB + 8 * mmap.PAGESIZE, 3) for size in after]
    for block in given:
        assert pool.keep(block.data_ptr(), block.numel())
    held = pool.nbytes
    first, laid = faults(), 0
    edge = 3 * mmap.PAGESIZE + 64
    for ring in around:
        laid += pool.put(ring[edge:-edge].data_ptr(), ring.numel() - 2 * edge)
        ring[edge:-edge].add_(0)  # touches every page
    assert laid >= sum(ring.numel() - 2 * edge for ring in around) - 2 * mmap.PAGESIZE * len(around)
    assert faults() - first < laid / mmap.PAGESIZE / 4
    assert pool.nbytes == held - laid
    for ring in around:
        assert set(ring[:edge].unique().tolist()) | set(ring[-edge:].unique().tolist()) == {3}
        assert pool.keep(ring[edge:-edge].data_ptr(), ring.numel() - 2 * edge)  # as many mappings as it has pieces
    assert pool.nbytes == held


def test_a_block_where_pieces_of_others_had_been_is_kept_whole() -> None:
    """malloc uses a place again, and so a block may lie in several mappings that the pool did not make for it."""
    first, block = PagePool(), mapped(BLOCK, 1)
    given = [mapped(3 * MIB, 9) for _ in range(4)]
    for piece in given:
        assert first.keep(piece.data_ptr(), 3 * MIB)
    assert first.put(block.data_ptr(), BLOCK) == BLOCK - mmap.PAGESIZE
    other = PagePool()
    assert other.keep(block.data_ptr(), BLOCK)
    assert (other.nbytes, other.pieces) == (BLOCK - mmap.PAGESIZE, 3)


def test_turns_between_sizes_that_fit_badly_do_not_cut_pages_ever_smaller() -> None:
    """400 random releases and restores: what blocks hold and what waits is what there was, but for ends below 256 KiB;
    the number of pieces stays what the smallest piece allows."""
    pool, rng = PagePool(), random.Random(4)
    sizes = [rng.randrange(300_000, 3_000_000) for _ in range(24)]
    blocks = [mapped(size, 1) for size in sizes]
    out: list[int] = []
    for turn in range(400):
        inside = [i for i in range(len(blocks)) if i not in out]
        if out and (not inside or rng.random() < 0.5):
            i = out.pop(rng.randrange(len(out)))
            pool.put(blocks[i].data_ptr(), sizes[i])
            blocks[i].fill_(i)
        else:
            i = inside[rng.randrange(len(inside))]
            assert turn < 24 or set(blocks[i][:: mmap.PAGESIZE].unique().tolist()) <= {1, i}
            pool.keep(blocks[i].data_ptr(), sizes[i])
            out.append(i)
        assert pool.nbytes <= sum(sizes[i] for i in out) + 24 * 256 * 1024
        assert pool.pieces <= pool.nbytes / (256 * 1024)
    assert pool.nbytes > 0.8 * sum(sizes[i] for i in out)


TURNS = """
import os, torch
from mindspeed_asyncflow.platforms.cpu import CpuPlatform, resident_bytes
from mindspeed_asyncflow.platforms.memory import GENERATION_WEIGHTS, GRADIENTS, OPTIMIZER, DeviceMemory, HostPool
from mindspeed_asyncflow.reshard.swap import HostSwap

MIB = 1 << 20
memory = DeviceMemory(CpuPlatform())
swap = HostSwap(memory, HostPool(memory.platform))
state = {OPTIMIZER: [memory.empty(OPTIMIZER, 20 * MIB).fill_(i) for i in range(3)],
         GRADIENTS: [memory.empty(GRADIENTS, 60 * MIB).fill_(1)]}
before, total = resident_bytes()[0], memory.total()
waiting = memory.free_bytes
for turn in range(5):
    swap.out(state)
    assert abs(memory.total() + memory.free_bytes - total) < MIB, (memory.total(), memory.free_bytes)
    buffers = [memory.empty(GENERATION_WEIGHTS, 7 * MIB + 12345 * i).fill_(5) for i in range(11)]
    assert abs(memory.total() + memory.free_bytes - total) < 4 * MIB, (memory.total(), memory.free_bytes)
    grown = resident_bytes()[0] - before
    assert grown < (60 + 8) * MIB, f"turn {turn}: resident set grew by {grown / MIB:.0f} MiB, host copies are 60"
    for buffer in buffers:
        memory.release(buffer)
    del buffer, buffers
    swap.back()
    assert memory.total() == total and memory.free_bytes < 4 * MIB, memory.free_bytes
    grown = resident_bytes()[0] - before
    assert grown < (60 + 8) * MIB, f"turn {turn}, back: resident set grew by {grown / MIB:.0f} MiB"
assert all(bool((t == i).all()) for i, t in enumerate(state[OPTIMIZER])) and not state[GRADIENTS][0].any()
print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [False, True], ids=["plain", "as in a trainer"])
def test_generation_buffers_lie_in_the_pages_of_the_train_state(trainer: bool) -> None:
    """The resident set of a process grows by the host copies (60 MiB) and not by the generation buffers (77 MiB)."""
    start = "from mindspeed_asyncflow.platforms.cpu import CpuPlatform; CpuPlatform().prepare_trainer(1)\n"
    done = subprocess.run(
        [sys.executable, "-c", (start if trainer else "") + TURNS], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_without_the_system_call_storages_are_mapped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: None, use_errno: bool) -> None:
        raise OSError("no C library")

    monkeypatch.setattr(cpu_pages.ctypes, "CDLL", no_library)
    pool, block = PagePool(), torch.ones(BLOCK, dtype=torch.uint8)
    assert not pool.keep(block.data_ptr(), BLOCK)
    assert not pool.put(block.data_ptr(), BLOCK)
    assert bool((block == 1).all())


def test_a_kernel_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_pages, "DONT_UNMAP", 1 << 10)  # a flag that no kernel knows
    pool, block = PagePool(), torch.ones(BLOCK, dtype=torch.uint8)
    assert not pool.keep(block.data_ptr(), BLOCK)
    assert pool.nbytes == 0 and bool((block == 1).all())
