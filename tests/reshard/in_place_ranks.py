"""What one rank does to turn a device from training to generation and back, with every byte looked at."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError
from mindspeed_asyncflow.platforms.base import Platform
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.memory import (
    GENERATION_WEIGHTS,
    GRADIENTS,
    OPTIMIZER,
    TRAIN_WEIGHTS,
    DeviceMemory,
    HostPool,
)
from mindspeed_asyncflow.reshard.in_place import InPlace, ReshardReport
from mindspeed_asyncflow.reshard.layout import Layout
from tests.reshard.matrix import Case, rollout_side, train_side
from tests.reshard.matrix_ranks import same_bits
from tests.reshard.ranks import World
from tests.reshard.slices import cut, full_tensors, rollout_shards
from tests.reshard.stand_ins import StandInRollout, StandInTrainer

MODULES = ("tests.reshard.in_place_ranks",)
BUCKET_BYTES = 2048


class Device:
    """Both engines of one rank."""

    def __init__(
        self, world: World, case: Case, train: torch.dtype, serve: torch.dtype, bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 20.0, platform: Platform | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.case, self.serve = world.rank, case, serve
        source, target = _layouts(case)
        platform = platform or CpuPlatform()
        self.memory, self.pool = DeviceMemory(platform), HostPool(platform)
        held = cut(case.model, source, self.rank)
        self.trainer = StandInTrainer(self.memory, source, held, train)
        self.rollout = StandInRollout(self.memory, target, self.rank, serve)
        self.both = InPlace(
            self.trainer, self.rollout, target, rank=self.rank, memory=self.memory, pool=self.pool,
            bucket_bytes=bucket_bytes, group=world.group(case.ranks), timeout_s=timeout_s,
        )  # fmt: skip
        self.train_type = train

    def state(self) -> list[torch.Tensor]:
        """Copies of what must come back bit for bit."""
        return [t.clone() for t in (self.trainer.weights, *self.trainer.optimizer)]

    def check_generation(self) -> None:
        expected = rollout_shards(self.case, self.rank)
        assert self.rollout.buffers.keys() == expected.keys()
        for name, tensor in expected.items():
            serve = torch.float32 if ".mlp.gate." in name else self.serve
            assert same_bits(self.rollout.buffers[name], tensor.to(self.train_type).to(serve)), name


def _layouts(case: Case) -> tuple[Layout, Layout]:
    source, target = train_side(case.model, case.train), rollout_side(case.model, case.rollout)
    assert source is not None and target is not None
    return source, target


def census(memory: DeviceMemory, exclude: list[torch.Tensor], expected: int) -> int:
    """Bytes of all live tensors; looks again for a while when it is not `expected`, because gloo's threads let go of
    the number that ranks agreed with a moment after the agreement, on a busy machine seconds after."""
    until = time.monotonic() + 10.0
    while (found := memory.census(exclude=exclude)) != expected and time.monotonic() < until:
        time.sleep(0.02)
    return found


def cycle(
    world: World, case: Case, train: torch.dtype, serve: torch.dtype, times: int, bucket_bytes: int = BUCKET_BYTES
) -> list[tuple[ReshardReport, ReshardReport, int, int]]:
    """Reports of every turn and what the garbage collector finds on the device, while generating and while training;
    raises when a bit is wrong."""
    if world.rank >= case.ranks:
        world.group(case.ranks)
        return []
    full_tensors(case.model)
    world.group(case.ranks)
    empty = DeviceMemory(CpuPlatform()).census()  # nothing of the device
    device = Device(world, case, train, serve, bucket_bytes)
    before = device.state()
    found = []
    for turn in range(times):
        there = device.both.to_generation(turn)
        generating = census(device.memory, before, empty + there.usage_after[GENERATION_WEIGHTS]) - empty
        device.check_generation()
        back = device.both.to_training()
        training = census(device.memory, before, empty + sum(back.usage_after.values())) - empty
        for tensor, copy in zip((device.trainer.weights, *device.trainer.optimizer), before):
            assert same_bits(tensor, copy)
        assert not device.trainer.gradients.any()
        device.trainer.gradients.fill_(1.0)  # the next step's
        found.append((there, back, generating, training))
    assert device.pool.made == 1 + len(device.trainer.optimizer)  # buffers of the first turn serve all
    return found


MOMENTS = ("state", "optimizer copy", "buffers", "shards", "weight copy", "fill", "end of copy", "loaded", "resume")


@contextmanager
def broken(device: Device, when: str) -> Iterator[None]:
    """This rank's own part fails at one moment of a turn."""
    from mindspeed_asyncflow.reshard import transfer

    calls = 0

    def failing(real: Callable[..., Any], at: int = 1) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(f"{when} broke")
            return real(*args, **options)

        return call

    trainer, rollout, pool = device.trainer, device.rollout, device.pool
    swap = device.both._weight_swap
    owner, name, at = {
        "state": (trainer, "train_state", 1), "optimizer copy": (pool, "take", 2), "shards": (trainer, "shards", 1),
        "buffers": (rollout, "generation_buffers", 1), "weight copy": (swap, "start_out", 1),
        "fill": (transfer, "unpack", 3), "end of copy": (pool, "take", 4), "loaded": (rollout, "loaded", 1),
        "resume": (rollout, "resume", 1),
    }[when]  # fmt: skip
    real = getattr(owner, name)
    setattr(owner, name, failing(real, at))
    try:
        yield
    finally:
        setattr(owner, name, real)


def fail(world: World, case: Case, spoil: int, when: str) -> dict[str, Any]:
    """One turn in which rank `spoil` fails, from engines that serve, and one that succeeds."""
    full_tensors(case.model)
    gc.collect()
    empty = DeviceMemory(CpuPlatform()).census()  # nothing of the device
    device = Device(world, case, torch.float32, torch.bfloat16)
    device.rollout.generation_buffers()
    device.rollout.state = "RUNNING"
    before, gradients = device.state(), device.trainer.gradients.clone()
    began, said = time.monotonic(), ""
    with broken(device, when) if world.rank == spoil else nullcontext():
        try:
            device.both.to_generation(1)
        except WeightSyncError as error:
            said = str(error)
    seconds, served = time.monotonic() - began, device.rollout.served
    state, usage = device.rollout.state, device.memory.usage()
    counted = sum(usage.values())
    uncounted = census(device.memory, [*before, gradients], empty + counted) - empty - counted
    assert not device.both.generating
    for tensor, copy in zip((device.trainer.weights, *device.trainer.optimizer), before):
        assert same_bits(tensor, copy)
    assert not device.trainer.gradients.any() or same_bits(device.trainer.gradients, gradients)
    device.both.to_generation(2)
    device.check_generation()
    full = {kind: usage[kind] > 0 for kind in (TRAIN_WEIGHTS, GRADIENTS, OPTIMIZER)}
    return {
        "said": said, "seconds": seconds, "state": state, "served before": served, "uncounted": uncounted,
        "on the device": full, "served": device.rollout.version,
    } | usage  # fmt: skip


def die(world: World, case: Case, spoil: int, folder: str) -> None:
    """Rank `spoil` dies when its weights are there; the others write to `folder` what they are left with."""
    device = Device(world, case, torch.float32, torch.bfloat16, timeout_s=3.0)
    if world.rank == spoil:
        device.rollout.loaded = lambda version: os._exit(3)  # type: ignore[method-assign]
    before = device.state()
    try:
        device.both.to_generation(1)
    except (WeightSyncError, DeadlineExceeded) as error:  # who is not connected with the dead one waits
        same = all(same_bits(a, b) for a, b in zip((device.trainer.weights, *device.trainer.optimizer), before))
        usage = device.memory.usage()
        Path(folder, str(world.rank)).write_text(
            f"{device.rollout.state}, served {device.rollout.served}, bits {same}, "
            f"{usage[GENERATION_WEIGHTS] + usage['bucket']} bytes left: {error}"
        )


def refused(world: World, case: Case) -> list[Any]:
    """An older version than the served one on one rank: nothing moves on any."""
    device = Device(world, case, torch.float32, torch.bfloat16)
    device.rollout.version = 3 if world.rank == 1 else 0
    before = device.memory.usage()
    try:
        device.both.to_generation(2)
        said = ""
    except WeightSyncError as error:
        said = str(error)
    return [said, device.memory.usage() == before, device.pool.made, device.rollout.state]


def from_serving(world: World, case: Case) -> tuple[str, int, str]:
    """An engine that serves the weights of its model folder is filled as it is, and refused a second time."""
    device = Device(world, case, torch.float32, torch.bfloat16)
    device.rollout.generation_buffers()
    device.rollout.state = "RUNNING"
    device.both.to_generation(5)
    device.check_generation()
    try:
        device.both.to_generation(6)
    except WeightSyncError as error:
        return device.rollout.state, device.rollout.version, str(error)
    return device.rollout.state, device.rollout.version, ""
