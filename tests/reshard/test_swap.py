"""Train state leaves the device and comes back bit for bit, per storage."""

from __future__ import annotations

import mmap
import resource
import threading
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.errors import DeadlineExceeded, PlatformError
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.memory import (
    BUCKET,
    GRADIENTS,
    KINDS,
    OPTIMIZER,
    TRAIN_WEIGHTS,
    DeviceMemory,
    HostPool,
)
from mindspeed_asyncflow.reshard.swap import HostSwap

NOTHING = dict.fromkeys(KINDS, 0)


class GatedPlatform(CpuPlatform):
    """Background copies wait for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def side_stream(self, device: torch.device) -> nullcontext[Callable[[], None]]:
        assert self.gate.wait(30.0)
        return nullcontext(lambda: None)


class State:
    """Train state as megatron lays it out: parameters are views of one flat buffer, and so are their gradients."""

    def __init__(self, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)
        self.flat, self.grad = torch.randn(5000, generator=made), torch.randn(5000, generator=made)
        self.params = [torch.nn.Parameter(self.flat[:2000].view(40, 50)), torch.nn.Parameter(self.flat[2000:4990])]
        self.grads = [self.grad[:2000].view(40, 50), self.grad[2000:4990]]
        self.moments = [torch.randn(777, generator=made).bfloat16() for _ in range(3)]
        self.shard = self.moments[0][100:200]

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        return {TRAIN_WEIGHTS: [*self.params], GRADIENTS: self.grads, OPTIMIZER: [self.shard, *self.moments]}

    def copies(self) -> list[torch.Tensor]:
        return [t.detach().clone() for t in (self.flat, *self.params, *self.moments, self.shard)]


@pytest.fixture
def platform() -> GatedPlatform:
    return GatedPlatform()


@pytest.fixture
def memory(platform: GatedPlatform) -> DeviceMemory:
    return DeviceMemory(platform)


@pytest.fixture
def swap(memory: DeviceMemory, platform: GatedPlatform) -> HostSwap:
    return HostSwap(memory, HostPool(platform))


def test_everything_comes_back_bit_for_bit_and_gradients_as_zeros(memory: DeviceMemory, swap: HostSwap) -> None:
    state = State()
    for cycle in range(3):
        before = state.copies()
        out = swap.out(state.by_kind())
        assert memory.usage() == NOTHING
        assert all(t.untyped_storage().nbytes() == 0 for t in (state.flat, state.grad, *state.moments))
        assert (out.copied_bytes, out.moved_bytes) == (20_000 + 3 * 1554, 40_000 + 3 * 1554)
        back = swap.back()
        assert (back.copied_bytes, back.moved_bytes) == (out.copied_bytes, out.moved_bytes)
        assert all(torch.equal(a, b) for a, b in zip(before, state.copies(), strict=True))
        assert not state.grad.any() and not state.grads[0].any()
        state.grad.fill_(cycle + 1.0)
        state.flat.add_(1.0)  # views still share it
        assert torch.equal(state.params[1].detach(), state.flat[2000:4990])


def test_special_values_survive(swap: HostSwap) -> None:
    # a NaN with payload, infinity, minus zero, a denormal
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 1], dtype=torch.int32)
    values = bits.clone().view(torch.float32)
    swap.out({OPTIMIZER: [values]})
    swap.back()
    assert values.view(torch.int32).tolist() == bits.tolist()


def test_host_buffers_are_used_again(memory: DeviceMemory) -> None:
    pool, state = HostPool(CpuPlatform()), State()
    swap = HostSwap(memory, pool)
    for _ in range(4):
        swap.out(state.by_kind())
        swap.back()
    assert (pool.made, pool.nbytes) == (4, 20_000 + 3 * 1554)


def test_a_storage_of_many_host_pieces_comes_back_bit_for_bit(memory: DeviceMemory) -> None:
    pool = HostPool(CpuPlatform())
    swap, weights = HostSwap(memory, pool), torch.arange(3_300_007).to(torch.uint8)  # 2 MiB, 1 MiB and a rest
    before = weights.clone()
    swap.out({TRAIN_WEIGHTS: [weights]})
    assert pool.made == 3 and weights.untyped_storage().nbytes() == 0
    swap.back()
    assert torch.equal(weights, before)


def test_held_weights_can_be_read_until_wait(memory: DeviceMemory, swap: HostSwap) -> None:
    """The fill reads train weights while they are copied out; optimizer and gradients leave meanwhile."""
    state = State()
    before = state.flat.clone()
    swap.start_out(state.by_kind(), hold=(TRAIN_WEIGHTS,))
    thread = swap._thread
    assert thread is not None
    thread.join(30.0)
    assert memory.usage() == {**NOTHING, TRAIN_WEIGHTS: 20_000}
    assert torch.equal(state.flat, before)
    swap.wait()
    assert memory.usage() == NOTHING
    swap.back()
    assert torch.equal(state.flat, before)


def test_the_copies_run_beside_the_caller(memory: DeviceMemory, swap: HostSwap, platform: GatedPlatform) -> None:
    state = State()
    platform.gate.clear()
    swap.start_out(state.by_kind())
    assert memory.usage()[TRAIN_WEIGHTS] == 20_000  # the caller is here while nothing has moved yet
    with pytest.raises(DeadlineExceeded, match=r"swap-out did not end within 0\.01 s"):
        swap.wait(0.01)
    for verb in (swap.start_back, lambda: swap.start_out(state.by_kind())):
        with pytest.raises(PlatformError, match="swap"):
            verb()
    platform.gate.set()
    swap.wait()
    assert memory.usage() == NOTHING
    swap.back()


def test_no_more_is_on_the_device_than_before_at_any_time(memory: DeviceMemory, swap: HostSwap) -> None:
    state = State()
    memory.adopt(TRAIN_WEIGHTS, [state.flat])
    swap.out(state.by_kind())
    swap.back()
    assert memory.peak == memory.total() == 40_000 + 3 * 1554


@pytest.mark.parametrize("meddle", ["resized", "freed"])
def test_storages_that_others_touched_meanwhile_are_named_and_the_rest_comes_back(
    meddle: str, memory: DeviceMemory, swap: HostSwap
) -> None:
    state = State()
    before = state.copies()
    lost = torch.ones(50)
    swap.out({BUCKET: [lost], **state.by_kind()})
    if meddle == "resized":
        lost.untyped_storage().resize_(8)
    else:
        del lost
    with pytest.raises(PlatformError, match=rf"storage of 200 bytes \(bucket\) was {meddle} by others"):
        swap.back()
    assert all(torch.equal(a, b) for a, b in zip(before, state.copies(), strict=True))
    swap.out(state.by_kind())
    swap.back()


def test_a_swap_that_breaks_off_gives_everything_back(
    memory: DeviceMemory, swap: HostSwap, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State()
    before, grad = state.copies(), state.grad.clone()
    real, count = memory.release, 0

    def broken(tensor: torch.Tensor) -> int:
        nonlocal count
        count += 1
        if count == 3:
            raise PlatformError("the device went away")
        return real(tensor)

    monkeypatch.setattr(memory, "release", broken)
    with pytest.raises(PlatformError, match="the device went away"):
        swap.out({OPTIMIZER: state.by_kind()[OPTIMIZER], TRAIN_WEIGHTS: state.params, GRADIENTS: [state.grad]})
    assert swap.is_out
    swap.back()
    assert not swap.is_out
    assert all(torch.equal(a, b) for a, b in zip(before, state.copies(), strict=True))
    assert torch.equal(state.grad, grad)  # had not left yet


def test_a_return_that_finds_no_memory_can_be_tried_again(
    memory: DeviceMemory, swap: HostSwap, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State()
    before = state.copies()
    swap.out(state.by_kind())
    real, count = memory.restore, 0

    def full(tensor: torch.Tensor, nbytes: int) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise RuntimeError("out of memory")
        real(tensor, nbytes)

    monkeypatch.setattr(memory, "restore", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        swap.back()
    assert swap.is_out
    swap.back()
    assert all(torch.equal(a, b) for a, b in zip(before, state.copies(), strict=True))


def test_what_cannot_be_swapped_is_refused_before_anything_moves_or_is_counted(
    memory: DeviceMemory, swap: HostSwap
) -> None:
    weight, mapped, counted = torch.ones(10), torch.from_numpy(np.zeros(4)), torch.ones(3)
    memory.adopt(BUCKET, [counted])
    before = memory.usage()
    with pytest.raises(PlatformError, match=r"32 bytes \(optimizer\) cannot be freed"):
        swap.out({TRAIN_WEIGHTS: [weight], OPTIMIZER: [mapped]})
    with pytest.raises(PlatformError, match=r"12 bytes is counted as bucket, not optimizer"):
        swap.out({TRAIN_WEIGHTS: [weight], OPTIMIZER: [torch.ones(2), counted]})
    assert not swap.is_out and weight.tolist() == [1.0] * 10 and memory.usage() == before
    swap.out({TRAIN_WEIGHTS: [weight], OPTIMIZER: [weight[2:]]})  # a storage under two kinds belongs to the first
    with pytest.raises(PlatformError, match="still out"):
        swap.out({TRAIN_WEIGHTS: [weight]})
    swap.back()
    assert weight.tolist() == [1.0] * 10


def test_storages_without_bytes_stay_as_they_are(memory: DeviceMemory, swap: HostSwap) -> None:
    weight, nothing, gone = torch.ones(10), torch.empty(0), torch.ones(3)
    gone.untyped_storage().resize_(0)
    assert swap.out({TRAIN_WEIGHTS: [nothing, weight], OPTIMIZER: [gone]}).moved_bytes == 40
    swap.back()
    assert (weight.tolist(), gone.untyped_storage().nbytes()) == ([1.0] * 10, 0)


def test_undo_ends_a_copy_under_way_and_brings_back_what_had_left(
    memory: DeviceMemory, swap: HostSwap, platform: GatedPlatform
) -> None:
    state = State()
    before = state.copies()
    swap.undo()  # of nothing
    platform.gate.clear()
    swap.start_out(state.by_kind(), hold=(TRAIN_WEIGHTS,))
    threading.Timer(0.1, platform.gate.set).start()
    swap.undo()
    assert not swap.is_out and all(torch.equal(a, b) for a, b in zip(before, state.copies(), strict=True))


def test_storages_that_return_are_not_cleared_by_the_kernel_again(swap: HostSwap) -> None:
    """What makes a swap as fast as a copy on a CPU: page faults of the second cycle."""
    size = 32 * 2**20
    weights = [torch.ones(size // 8, dtype=torch.uint8) for _ in range(8)]
    swap.out({TRAIN_WEIGHTS: weights})
    swap.back()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    swap.out({TRAIN_WEIGHTS: weights})
    swap.back()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < size / mmap.PAGESIZE / 4
    assert all(bool((w == 1).all()) for w in weights)
