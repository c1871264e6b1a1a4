"""Swapping train state to the host, and a device that turns from training to generation and back, byte by byte."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.memory import OPTIMIZER, DeviceMemory, HostPool
from mindspeed_asyncflow.reshard.swap import HostSwap
from tests.reshard import in_place_ranks
from tests.reshard.matrix import Case
from tests.reshard.ranks import Ranks

TURNS = (
    Case("large", TrainParallel(tensor=2, data=2, expert=2), RolloutParallel(tensor=2, data=2, expert=True)),
    Case("large", TrainParallel(data=4, expert=4), RolloutParallel(tensor=4, expert=True)),
    Case(
        "large", TrainParallel(tensor=2, pipeline=2, expert=2, expert_tensor=1), RolloutParallel(tensor=2, replicas=2)
    ),
    Case("deepseek", TrainParallel(data=4, expert=4), RolloutParallel(tensor=2, replicas=2, expert=True)),
)
RANKS = 4
BLOCKS = 8
MB = 1 << 20
BUCKET_BYTES = 1 << 19


def swap(total_mb: int, repeats: int) -> dict[str, Any]:
    """Bytes/s of swapping out and in, over memcpy between warm buffers just before and after; medians."""
    memory = DeviceMemory(CpuPlatform())
    nbytes = total_mb * MB // BLOCKS
    tensors = [memory.empty(OPTIMIZER, nbytes).fill_(i) for i in range(BLOCKS)]
    mover = HostSwap(memory, HostPool(CpuPlatform()))
    pairs = [(torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)) for _ in range(BLOCKS)]
    ratios, rates, copies = [], [], []
    for turn in range(repeats + 1):
        before = _memcpy(pairs)
        out = mover.out({OPTIMIZER: tensors})
        assert memory.usage()[OPTIMIZER] == 0, "swapped storages still have bytes"
        assert memory.free_bytes >= 0.99 * BLOCKS * nbytes, "their pages are not free for other storages"
        back = mover.back()
        copy = max(before, _memcpy(pairs))
        rate = (out.copied_bytes + back.copied_bytes) / (out.seconds + back.seconds)
        if turn:  # the first allocates the host buffers
            ratios.append(rate / copy)
            rates.append(rate)
            copies.append(copy)
    assert all(bool((t == i).all()) for i, t in enumerate(tensors)), "swapped bytes came back wrong"
    return {
        "over_memcpy": statistics.median(ratios), "gb_per_s": statistics.median(rates) / 1e9,
        "memcpy_gb_per_s": statistics.median(copies) / 1e9,
    }  # fmt: skip


def _memcpy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Bytes/s of copying as many bytes as a swap, block by block between warm buffers; the better of two passes."""
    best = 0.0
    for _ in range(2):
        began = time.monotonic()
        for target, source in pairs:
            target.copy_(source)
        best = max(best, sum(t.numel() for t, _ in pairs) / (time.monotonic() - began))
    return best


def turns(times: int, count: int) -> list[dict[str, Any]]:
    """`times` turns of each of `count` cases on four gloo ranks: the worst rank and turn of each."""
    found = []
    with Ranks(RANKS, in_place_ranks.MODULES) as ranks:
        for case in TURNS[:count]:
            reports = ranks.run(
                in_place_ranks.cycle, case=case, train=torch.bfloat16, serve=torch.bfloat16, times=times,
                bucket_bytes=BUCKET_BYTES, timeout_s=180,
            )  # fmt: skip
            found.append(_worst(str(case), [turn for rank in reports for turn in rank]))
    return found


def _worst(name: str, seen: list[Any]) -> dict[str, Any]:
    """`redundant`: the larger of what the books say of train state, and what the garbage collector finds beside the
    generation weights, in bytes."""
    kinds = ("train weights", "gradients", "optimizer", "bucket")
    return {
        "name": name,
        "redundant": max(
            max(sum(there.usage_after[k] for k in kinds), generating - there.usage_after["generation weights"])
            for there, _, generating, _ in seen
        ),
        "left_in_training": max(back.usage_after["generation weights"] for _, back, _, _ in seen),
        "peak_over_identity": max(there.peak_bytes / there.identity_bytes for there, _, _, _ in seen),
        "identity_mb": max(there.identity_bytes for there, _, _, _ in seen) / MB,
        "there_s": statistics.median(there.seconds for there, _, _, _ in seen),
        "swap_exposed_s": statistics.median(there.swap_exposed_s for there, _, _, _ in seen),
        "fill_s": statistics.median(there.fill_s for there, _, _, _ in seen),
        "back_s": statistics.median(back.seconds for _, back, _, _ in seen),
    }
