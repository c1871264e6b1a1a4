"""What one rank does on a stand-in NPU, for `Ranks`."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_asyncflow.platforms.memory import OPTIMIZER, DeviceMemory, HostPool
from mindspeed_asyncflow.reshard.groups import layout_group
from mindspeed_asyncflow.reshard.messages import Message
from mindspeed_asyncflow.reshard.swap import HostSwap
from mindspeed_asyncflow.reshard.transfer import _Run, agree, wait
from tests.ascend.reshard.stand_in import machine, seconds_of
from tests.reshard.in_place_ranks import BUCKET_BYTES, Device
from tests.reshard.matrix import Case
from tests.reshard.matrix_ranks import same_bits
from tests.reshard.ranks import World
from tests.reshard.slices import full_tensors

MODULES = ("tests.ascend.reshard.turns_ranks",)


def turns(world: World, case: Case, name: str, times: int) -> dict[str, Any]:
    """`times` turns to generation and back on the machine `name`, every bit compared, and what was called."""
    full_tensors(case.model)
    with machine(name) as (platform, calls):
        device = Device(world, case, torch.float32, torch.bfloat16, BUCKET_BYTES, platform=platform)
        before, books = device.state(), []
        for turn in range(times):
            there = device.both.to_generation(turn)
            device.check_generation()
            back = device.both.to_training()
            for tensor, copy in zip((device.trainer.weights, *device.trainer.optimizer), before):
                assert same_bits(tensor, copy)
            assert not device.trainer.gradients.any()
            assert there.peak_bytes <= there.identity_bytes
            books.append((there.usage_after, back.usage_after))
        return {"calls": calls.by_thread, "books": books, "group_bytes": device.both.group_bytes}


def with_a_silent_peer(world: World, wait_s: float) -> tuple[float, str]:
    """Rank 0 does not answer in time."""
    with machine("npu") as (platform, _):
        group = layout_group(platform, world.count, 1, 30.0, "silence").handle
        if world.rank == 0:
            time.sleep(3 * wait_s)
        seconds, error = seconds_of(
            lambda: agree(world.rank, None, "late", device=platform.device(), group=group, timeout_s=wait_s)
        )
        dist.barrier()
        return seconds, f"{type(error).__name__}: {error}" if error else ""


def without_room(world: World, bucket_bytes: int, environment: dict[str, str]) -> tuple[int, str]:
    """Bytes of a group for messages of `bucket_bytes`, or what was said against it."""
    with machine("npu") as (platform, calls):
        old = {key: os.environ.get(key) for key in environment}
        os.environ.update(environment)
        try:
            return layout_group(platform, world.count, bucket_bytes, 30.0, "TP2 to TP1").buffer_bytes, ""
        except Exception as error:  # boundary: the test looks at it
            return len(calls.by_thread.get("main", [])), f"{type(error).__name__}: {error}"
        finally:
            for key, value in old.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


def failed_work(world: World) -> str:
    """An operation that the device reports as failed."""

    class Broken:
        def is_completed(self) -> bool:
            return True

        def is_success(self) -> bool:
            return False

        def wait(self, timeout: Any) -> None:
            raise AssertionError("nothing is done with what has failed")

    with machine("npu") as (platform, _):
        group = layout_group(platform, world.count, 1, 30.0, "failure").handle
        return str(seconds_of(lambda: wait(Broken(), "rank 7", "bucket 2", 5.0, group))[1])


def hasty_swap(world: World, hasty: bool) -> str:
    """A swap on a stand-in NPU; a `hasty` one does not wait for its copies before it frees."""
    with machine("npu") as (platform, _):
        memory = DeviceMemory(platform)
        swap = HostSwap(memory, HostPool(platform))
        if hasty:
            move, back = swap._move_out, swap._move_back
            swap._move_out = lambda finish: move(lambda: None)  # type: ignore[method-assign]
            swap._move_back = lambda finish: back(lambda: None)  # type: ignore[method-assign]
        tensor = torch.randn(3_000_000)
        before = tensor.clone()

        def there_and_back() -> None:
            swap.out({OPTIMIZER: [tensor]})
            swap.back()
            assert same_bits(tensor, before)

        return str(seconds_of(there_and_back)[1])


def unpinned(world: World) -> str:
    """A copy on a side stream to memory that is not pinned."""
    with machine("npu") as (platform, _), platform.side_stream(platform.device()):
        target, source = torch.zeros(4), torch.ones(4)
        return str(seconds_of(lambda: target.copy_(source, non_blocking=True))[1])


def with_gaps(world: World) -> str:
    """A message whose bytes do not follow each other."""
    with machine("npu") as (platform, _):
        group = layout_group(platform, world.count, 1, 30.0, "gaps").handle
        run = _Run(None, world.rank, torch.uint8, {}, platform.device(), group, 5.0)  # type: ignore[arg-type]
        message = Message((world.rank + 1) % world.count, True, [], torch.zeros(8, dtype=torch.uint8)[::2])
        return str(seconds_of(lambda: run._start([message], "bucket 3, step 0"))[1])
