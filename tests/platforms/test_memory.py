"""Device memory is what the storages say, by kind; host buffers are another thing."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.memory import (
    BUCKET,
    GENERATION_WEIGHTS,
    GRADIENTS,
    KINDS,
    TRAIN_WEIGHTS,
    DeviceMemory,
    HostPool,
    power_of_two_pieces,
)


@pytest.fixture
def memory() -> DeviceMemory:
    return DeviceMemory(CpuPlatform())


def test_a_storage_counts_once_however_many_tensors_see_it(memory: DeviceMemory) -> None:
    flat = torch.zeros(1000)
    memory.adopt(TRAIN_WEIGHTS, [flat, flat[10:20], flat.view(10, 100)[3]])
    memory.adopt(TRAIN_WEIGHTS, [torch.nn.Parameter(flat[5:6])])
    assert memory.usage() == {**dict.fromkeys(KINDS, 0), TRAIN_WEIGHTS: 4000}


def test_figures_follow_the_storages_and_not_what_was_said(memory: DeviceMemory) -> None:
    """Resized or dropped behind the books, or still held by a view: the figure is right without a word."""
    first, second = torch.zeros(1000), torch.zeros(500)
    memory.adopt(TRAIN_WEIGHTS, [first])
    memory.adopt(GRADIENTS, [second])
    first.untyped_storage().resize_(0)
    assert memory.usage()[TRAIN_WEIGHTS] == 0
    view = second[:1]
    del second
    gc.collect()
    assert memory.usage()[GRADIENTS] == 2000
    del view
    gc.collect()
    assert memory.total() == 0


def test_release_frees_and_restore_brings_the_bytes_back_for_all_views(memory: DeviceMemory) -> None:
    weight = memory.tensor(TRAIN_WEIGHTS, (3, 5), torch.float32)
    row = weight[1]
    assert memory.release(row) == 60
    assert (memory.total(), weight.untyped_storage().nbytes()) == (0, 0)
    memory.restore(weight, 60)
    weight.copy_(torch.arange(15.0).view(3, 5))
    assert row.tolist() == [5, 6, 7, 8, 9]


def test_the_peak_holds_what_was_there_at_one_time(memory: DeviceMemory) -> None:
    first = memory.empty(TRAIN_WEIGHTS, 1000)
    memory.release(first)
    bucket = memory.empty(BUCKET, 700)
    assert memory.peak == 1000
    memory.restore(first, 1000)
    assert (memory.peak, memory.total()) == (1700, 1700)
    memory.release(bucket)
    memory.reset_peak()
    assert memory.peak == 1000
    memory.adopt(GENERATION_WEIGHTS, [torch.zeros(2, dtype=torch.uint8)])
    assert memory.peak == 1002


def test_misuse_is_refused_by_name(memory: DeviceMemory) -> None:
    weight = memory.empty(TRAIN_WEIGHTS, 100)
    with pytest.raises(PlatformError, match="'weights' is no kind of device memory; kinds are train weights"):
        memory.empty("weights", 1)
    with pytest.raises(PlatformError, match="100 bytes is counted as train weights, not gradients"):
        memory.adopt(GRADIENTS, [weight[:3]])
    with pytest.raises(PlatformError, match="100 bytes already: it was resized by others"):
        memory.restore(weight, 100)
    with pytest.raises(PlatformError, match="40 bytes is released that was never adopted"):
        memory.release(torch.zeros(10))
    mapped = torch.from_numpy(np.zeros(8))
    memory.adopt(BUCKET, [mapped])
    with pytest.raises(PlatformError, match="64 bytes cannot be released"):
        memory.release(mapped)
    memory.forget(TRAIN_WEIGHTS)
    memory.adopt(GRADIENTS, [weight])
    assert memory.usage()[GRADIENTS] == 100


@pytest.mark.slow
def test_the_census_finds_what_the_books_do_not_know(memory: DeviceMemory) -> None:
    """Also gradients that no Python name holds; host buffers and named exceptions do not count."""
    gc.collect()
    known, pool = [], HostPool(CpuPlatform())
    before = memory.census()
    known.append(memory.empty(TRAIN_WEIGHTS, 10_000))
    stray = torch.zeros(5000, dtype=torch.uint8)
    host = pool.take(30_000)
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.sum().backward()
    assert memory.census() - before == 10_000 + 5000 + 4000 + 4000
    assert memory.census(exclude=[stray[:7]]) - before == 10_000 + 4000 + 4000
    assert sum(piece.numel() for piece in host) == 30_000
    memory.release(known[0])
    del stray, weight
    gc.collect()
    assert memory.census() == before


def test_host_buffers_are_made_once_for_each_size_in_use_at_one_time() -> None:
    pool = HostPool(CpuPlatform())
    for _ in range(5):
        taken = [pool.take(size) for size in (100, 100, 300)]
        assert len({piece.data_ptr() for pieces in taken for piece in pieces}) == 3
        for pieces in taken:
            pool.give(pieces)
    assert (pool.made, pool.nbytes) == (3, 500)


@pytest.mark.parametrize("nbytes", [1, 999, (1 << 20) + 1, 271_581_184, 17_000_000_001, 1 << 36])
def test_pinned_pieces_that_are_rounded_up_to_powers_of_two_waste_little(nbytes: int) -> None:
    """A rest below a MiB may double; all in one, 17 GB would take 34."""
    pieces = power_of_two_pieces(nbytes)
    assert sum(pieces) == nbytes and min(pieces) > 0 and max(pieces) <= 1 << 30
    taken = sum(1 << (piece - 1).bit_length() for piece in pieces)
    assert taken - nbytes <= max(nbytes / 16, 1 << 20)
    assert len(pieces) <= nbytes / (1 << 30) + 6


def test_a_storage_knows_the_type_of_its_tensor(memory: DeviceMemory) -> None:
    tensor = memory.tensor(TRAIN_WEIGHTS, (3, 0, 5), torch.bfloat16)
    assert (tensor.shape, tensor.dtype, tensor.untyped_storage().nbytes()) == ((3, 0, 5), torch.bfloat16, 0)
    tensor = memory.tensor(TRAIN_WEIGHTS, (3, 5), torch.bfloat16)
    assert (tensor.shape, tensor.dtype, tensor.untyped_storage().nbytes()) == ((3, 5), torch.bfloat16, 30)
    assert tensor.is_contiguous() and memory.usage()[TRAIN_WEIGHTS] == 30
