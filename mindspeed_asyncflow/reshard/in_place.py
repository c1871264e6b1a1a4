"""Allgather-swap: trainer and rollout engine take turns on the same devices. One object for each device.

    train on this device                                         generate on this device
      to_generation(version)
        1 gradients freed, optimizer copied to host and freed    exposed
        2 generation buffers allocated by their engine
        3 buffers filled by the plan, shard to shard             at the same time train weights are copied to host
        4 train weights freed                                    exposed only as far as 3 is shorter
        5 the engine drops its caches and names its fingerprint; when all ranks are so far, they serve
      to_training()
        1 generation weights and caches dropped
        2 train weights, optimizer: copied back; gradients: zeros

Device bytes from step 2 on never exceed

    identity = train shard + generation shard + one bucket        (+ the buffers of the group on an NPU, `group_bytes`)

(train shard: weights of the trainer on this device, in their own type; a bucket: what the plan packs at most). While
generating no byte of train state is on the device, while training no byte of generation weights. Every figure comes
from `DeviceMemory`, which measures storages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from mindspeed_asyncflow.errors import ConfigError, WeightSyncError
from mindspeed_asyncflow.platforms.memory import (
    GENERATION_WEIGHTS,
    GRADIENTS,
    OPTIMIZER,
    TRAIN_WEIGHTS,
    DeviceMemory,
    HostPool,
)
from mindspeed_asyncflow.reshard.boxes import matrix_shape
from mindspeed_asyncflow.reshard.dtypes import agree_on_dtypes
from mindspeed_asyncflow.reshard.groups import LayoutGroup, layout_group
from mindspeed_asyncflow.reshard.layout import Layout
from mindspeed_asyncflow.reshard.plan import make_plan
from mindspeed_asyncflow.reshard.swap import HostSwap
from mindspeed_asyncflow.reshard.topology import Topology
from mindspeed_asyncflow.reshard.transfer import TransferReport, agree, run

T = TypeVar("T")
RUNNING, PAUSED, SLEEPING, UPDATING, DIRTY = "RUNNING", "PAUSED", "SLEEPING", "UPDATING", "DIRTY"


class TrainState(Protocol):
    """What a trainer rank shows of itself; `TrainEngine` does."""

    @property
    def layout(self) -> Layout: ...

    def shards(self) -> Mapping[str, torch.Tensor]: ...

    def train_state(self) -> Mapping[str, Sequence[torch.Tensor]]: ...


class FilledEngine(Protocol):
    """A rollout engine whose weights can be filled where they lie (transport "in_place")."""

    @property
    def state(self) -> str: ...

    @property
    def version(self) -> int: ...

    def weights_wanted(self) -> Sequence[tuple[str, str, tuple[int, ...]]]: ...

    def generation_buffers(self) -> Mapping[str, torch.Tensor]: ...

    def loaded(self, version: int, fingerprint: str = "") -> Any: ...

    def load_failed(self, why: str) -> None: ...

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...

    def sleep(self, level: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """One way of one device. Seconds add up to about `seconds`; bytes are device bytes by kind, as measured."""

    version: int  # -1: to training
    seconds: float
    swap_exposed_s: float  # waiting for copies between host and device
    fill_s: float  # transfer, with the copy to host beside it
    load_s: float  # what the rollout engine did: allocate, drop caches, fingerprint; or drop weights
    swapped_bytes: int  # copied between host and device
    transfer: TransferReport | None  # None: to training
    usage_before: dict[str, int]
    usage_after: dict[str, int]
    peak_bytes: int  # from the first allocation of the way on, all kinds together
    identity_bytes: int  # train shard + generation shard + one bucket
    fingerprint: str = ""  # of the generation shard, as its engine computed it


@dataclass(frozen=True, slots=True)
class _Room:
    """What a fill reads and writes, and what it took to make room for it."""

    copied_bytes: int  # to the host so far
    identity_bytes: int
    shards: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


class InPlace:
    """The two engines of one device and the plan between their layouts.

    All ranks make one together and call every method together. `rank` of this process in `group` is its rank in both
    layouts; None makes a group of all ranks, once, for this pair of layouts and all its turns. Raises `ConfigError`
    when the layouts are not of one size, `WeightSyncError` on all ranks when the rollout engine of one wants other
    weights than its layout says, `PlatformError` when there is no room for the group.
    """

    def __init__(
        self,
        train: TrainState,
        rollout: FilledEngine,
        rollout_layout: Layout,
        *,
        rank: int,
        memory: DeviceMemory,
        pool: HostPool,
        bucket_bytes: int,
        topology: Topology | None = None,
        group: Any = None,
        timeout_s: float = 120.0,
    ) -> None:
        if train.layout.world_size != rollout_layout.world_size:
            raise ConfigError(
                f"in place, trainer ({train.layout.label}) and rollout ({rollout_layout.label}) share their devices: "
                f"{train.layout.world_size} and {rollout_layout.world_size} ranks must be the same number"
            )
        self._train, self._rollout = train, rollout
        self._source, self._target = train.layout, rollout_layout
        self._rank, self._memory, self._timeout_s = rank, memory, timeout_s
        own_group = LayoutGroup(group, 0)
        if group is None:
            pair = f"{train.layout.label} to {rollout_layout.label}"
            own_group = layout_group(memory.platform, dist.get_world_size(), bucket_bytes, timeout_s, pair)
        self._group, self.group_bytes = own_group.handle, own_group.buffer_bytes
        own = self._together(
            lambda: _check_wanted(rollout.weights_wanted(), rollout_layout, rank),
            "comparing its engine's weights with the layout",
        )
        self._dtype, self._other_dtypes = agree_on_dtypes(
            own,
            rollout_layout.tensors,
            rank=rank,
            device=memory.platform.device(),
            group=self._group,
            timeout_s=timeout_s,
        )
        largest = max(dtype.itemsize for dtype in (self._dtype, *self._other_dtypes.values()))
        self.plan = make_plan(
            train.layout, rollout_layout, itemsize=largest, bucket_bytes=bucket_bytes, topology=topology,
            across_stages=True,
        )  # fmt: skip
        self._state_swap, self._weight_swap = HostSwap(memory, pool), HostSwap(memory, pool)
        self.served: Mapping[str, torch.Tensor] = {}  # the weights that this device serves, while it generates

    @property
    def generating(self) -> bool:
        """Train state is on the host."""
        return self._state_swap.is_out or self._weight_swap.is_out

    def to_generation(self, version: int) -> ReshardReport:
        """Fill the generation weights with the trainer's and serve them as `version`. Collective.

        Raises on every rank when any rank failed, and names the first that did; no engine has answered with the new
        weights then, unless one could not resume. The train state is back on the device and the rollout engine asleep
        without weights: DIRTY if woken, until the next `to_generation`; its requests are aborted. What goes wrong on
        the way back is noted at the error. A turn that is refused, because `version` is older than the served one or
        the train state is out already, changes nothing.
        """
        clock, before = _Clock(), self._memory.usage()
        state = self._together(lambda: self._begin(version), f"beginning the turn to version {version}")
        try:
            room = self._together(lambda: self._make_room(state, clock), "making room for generation weights")
            clock.note("load")
            transfer = self._fill(room)
            clock.note("fill")
            copied, fingerprint = self._together(lambda: self._take_over(version, clock), "taking over the weights")
            self._together(self._rollout.resume, "resuming")
            self.served = room.buffers
            clock.note("load")
        except Exception as error:  # boundary: train state comes back before anybody hears of it
            self._undo(error)
            raise
        return ReshardReport(
            version=version, seconds=clock.seconds, swap_exposed_s=clock.spent["swap"], fill_s=clock.spent["fill"],
            load_s=clock.spent["load"], swapped_bytes=room.copied_bytes + copied, transfer=transfer,
            usage_before=before, usage_after=self._memory.usage(), peak_bytes=self._memory.peak,
            identity_bytes=room.identity_bytes, fingerprint=fingerprint,
        )  # fmt: skip

    def _begin(self, version: int) -> Mapping[str, Sequence[torch.Tensor]]:
        """The train state. Raises `WeightSyncError` for a turn that cannot be made."""
        if self.generating:
            raise WeightSyncError(f"version {version}: the train state is on the host already; call to_training first")
        if version < self._rollout.version:
            raise WeightSyncError(
                f"version {version} refused: version {self._rollout.version} was served and versions only rise"
            )
        return self._train.train_state()

    def _make_room(self, state: Mapping[str, Sequence[torch.Tensor]], clock: _Clock) -> _Room:
        """Gradients and optimizer leave, generation buffers come, train weights begin to be copied."""
        copied = self._state_swap.out({kind: state.get(kind, ()) for kind in (GRADIENTS, OPTIMIZER)}).copied_bytes
        clock.note("swap")
        self._memory.reset_peak()
        if self._rollout.state == RUNNING:
            self._rollout.pause()  # `loaded` must not serve yet
        elif self._rollout.state == DIRTY:
            self._rollout.sleep(2)  # it might have been RUNNING before
        buffers = self._rollout.generation_buffers()
        weights = state[TRAIN_WEIGHTS]
        identity = _storage_bytes(weights) + _storage_bytes(buffers.values()) + self.plan.bucket_bytes
        shards = self._train.shards()
        self._weight_swap.start_out({TRAIN_WEIGHTS: weights}, hold=(TRAIN_WEIGHTS,))
        return _Room(copied, identity, shards, buffers)

    def _fill(self, room: _Room) -> TransferReport:
        return run(
            self.plan, self._rank, room.shards, room.buffers, source_layout=self._source,
            target_layout=self._target, dtype=self._dtype, device=self._memory.platform.device(), group=self._group,
            memory=self._memory, timeout_s=self._timeout_s, other_dtypes=self._other_dtypes,
        )  # fmt: skip

    def _take_over(self, version: int, clock: _Clock) -> tuple[int, str]:
        """Train weights are gone, the engine has its weights and is PAUSED: (bytes copied, fingerprint)."""
        copied = self._weight_swap.wait(self._timeout_s).copied_bytes
        clock.note("swap")
        return copied, self._rollout.loaded(version).fingerprint

    def _together(self, part: Callable[[], T], what: str) -> T:
        """Do this rank's part; raises on every rank when it failed on one. Collective."""
        done: list[T] = []
        failed = None
        try:
            done.append(part())
        except Exception as error:  # boundary: the other ranks are told, then all raise
            failed = error
        device = self._memory.platform.device()
        agree(self._rank, failed, what, device=device, group=self._group, timeout_s=self._timeout_s)
        return done[0]

    def _undo(self, error: Exception) -> None:
        """Back to training. Each step is tried, however those before it ended; what went wrong is noted at `error`."""
        for step in (
            lambda: self._end_load(str(error)),
            self._drop_weights,
            lambda: self._weight_swap.undo(self._timeout_s),
            lambda: self._state_swap.undo(self._timeout_s),
        ):
            try:
                step()
            except Exception as other:  # boundary: what went wrong first is what is raised
                error.add_note(f"rank {self._rank}, on the way back to training: {other}")

    def _end_load(self, why: str) -> None:
        state = self._rollout.state
        if state == UPDATING:
            self._rollout.load_failed(why)
        elif state == RUNNING:
            self._rollout.pause("abort")
        elif state == PAUSED:
            self._rollout.abort()

    def _drop_weights(self) -> None:
        if self._rollout.state != SLEEPING:
            self._rollout.sleep(2)  # makes room for the train state

    def to_training(self) -> ReshardReport:
        """Drop generation weights and caches and bring the train state back: weights and optimizer bit for bit,
        gradients as zeros. Answers that still run are waited for. Not collective."""
        clock, before = _Clock(), self._memory.usage()
        self.served = {}
        if self._rollout.state == RUNNING:
            self._rollout.pause("wait")
        if self._rollout.state != SLEEPING:
            self._rollout.sleep(2)
        clock.note("load")
        self._memory.reset_peak()
        copied = 0
        for swap in (self._weight_swap, self._state_swap):
            if swap.is_out:
                copied += swap.back().copied_bytes
        clock.note("swap")
        after = self._memory.usage()
        return ReshardReport(
            version=-1, seconds=clock.seconds, swap_exposed_s=clock.spent["swap"], fill_s=0.0,
            load_s=clock.spent["load"], swapped_bytes=copied, transfer=None, usage_before=before, usage_after=after,
            peak_bytes=self._memory.peak,
            identity_bytes=after[TRAIN_WEIGHTS] + before[GENERATION_WEIGHTS] + self.plan.bucket_bytes,
        )  # fmt: skip


class _Clock:
    """Seconds of each phase."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self.spent = {"swap": 0.0, "fill": 0.0, "load": 0.0}

    def note(self, phase: str) -> None:
        """The time since the last call belongs to `phase`."""
        now = time.monotonic()
        self.spent[phase] += now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        return self._last - self._began


def _storage_bytes(tensors: Any) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _check_wanted(
    wanted: Sequence[tuple[str, str, tuple[int, ...]]], layout: Layout, rank: int
) -> dict[str, torch.dtype]:
    """The type of each wanted weight. Raises `WeightSyncError` that names the first one which does not fit."""
    ours = {param.name: tuple(param.shape) for param in layout.ranks[rank]}
    theirs = {name: tuple(shape) for name, _, shape in wanted}
    where = f"rollout rank {rank} ({layout.label})"
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            raise WeightSyncError(f"{where}: its engine has no weight {name!r}, which the layout has: {ours[name]}")
        if name not in ours:
            raise WeightSyncError(f"{where}: its engine wants {name!r} {theirs[name]}, which the layout does not have")
        if matrix_shape(ours[name]) != matrix_shape(theirs[name]):
            raise WeightSyncError(
                f"{where}: {name!r} has shape {theirs[name]} in its engine, {ours[name]} in the layout"
            )
    return {name: getattr(torch, dtype) for name, dtype, _ in wanted}
