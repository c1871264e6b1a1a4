"""Runs a plan over a collective group: one packed message for each pair of ranks and step, point to point.

    for each bucket, in the plan's order, the same on all ranks
      for each step of it
        pack     boxes for one peer, row after row, cast to the type of the target   (staging)
        send / receive, all of the step at once
        copy     what stays on this rank, while messages travel                                     (no staging)
        unpack   boxes into the target                                                              (staging)

A message whose boxes follow each other in memory, with the right type, is sent from or received into that memory and
needs no staging. Staging of a step, sending and receiving together, is at most the plan's `bucket_bytes`; one buffer
serves all steps.

A rank whose own part fails (a shape, memory) keeps answering its peers, without sense, and tells so at the end: then
all ranks raise, none of them waits in vain, and the group can be used again. A peer that answers nothing ends the wait
at its deadline, and gloo closes the connections of the one that gave up, so that the others learn it at once; over
other backends they learn it at their own deadlines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_asyncflow.errors import AsyncFlowError, DeadlineExceeded, PlatformError, WeightSyncError
from mindspeed_asyncflow.platforms.memory import BUCKET, DeviceMemory
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam
from mindspeed_asyncflow.reshard.messages import Copy, Message, Packed, ResolvedStep, by_peer, copy, pack, unpack
from mindspeed_asyncflow.reshard.places import BoxView, Places, one_run
from mindspeed_asyncflow.reshard.plan import Move, Plan, RankStep

LOOK_EVERY_S = 50e-6


@dataclass(slots=True)
class TransferReport:
    """What one rank did. Bytes are elements times the itemsize of the tensor's type at the target."""

    sent_bytes: int = 0
    received_bytes: int = 0
    copied_bytes: int = 0  # from this rank to itself
    staging_bytes: int = 0  # size of the staging buffer
    direct_bytes: int = 0  # sent and received without staging
    messages: int = 0
    seconds: float = 0.0


def run(
    plan: Plan,
    rank: int,
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    *,
    source_layout: Layout,
    target_layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    target_first: int = 0,
    group: Any = None,
    memory: DeviceMemory | None = None,
    timeout_s: float = 120.0,
    other_dtypes: Mapping[str, torch.dtype] | None = None,
) -> TransferReport:
    """Fill `target` from the `source` tensors of all ranks. Collective over `group` (None: all ranks).

    `rank` is the plan's number of this process and its rank in `group`. `source` and `target` map the parameter names
    of the two layouts to local tensors; rank j of the target layout is rank `target_first` + j, and a rank without a
    part in a layout hands over an empty mapping. `dtype` is what travels and what every target tensor has, but for the
    full tensors in `other_dtypes`, which are the same on all ranks; sources of another type are cast. The plan's
    itemsize is that of the largest type. Each wait lasts at most `timeout_s` seconds.

    Raises `WeightSyncError` on every rank if any rank failed, `DeadlineExceeded` when a peer did not answer; the target
    is then half filled.
    """
    here, there = rank, rank - target_first
    mine = source_layout.ranks[here] if here < source_layout.world_size else ()
    wanted = target_layout.ranks[there] if 0 <= there < target_layout.world_size else ()
    transfer = _Run(plan, rank, dtype, other_dtypes or {}, device, group, timeout_s)
    return transfer.run((mine, source), (wanted, target), memory)


Side = tuple[Sequence[LocalParam], Mapping[str, torch.Tensor]]  # a rank's part of a layout, and the tensors


class _Run:
    def __init__(
        self, plan: Plan, rank: int, dtype: torch.dtype, other_dtypes: Mapping[str, torch.dtype], device: torch.device,
        group: Any, timeout_s: float,
    ) -> None:  # fmt: skip
        self._plan, self._rank, self._device = plan, rank, device
        self._dtype, self._other_dtypes = dtype, other_dtypes
        self._group, self._timeout_s = group, timeout_s
        self._failed: Exception | None = None  # the first failure of this rank's own part
        self._report = TransferReport()

    def run(self, source: Side, target: Side, memory: DeviceMemory | None) -> TransferReport:
        began = time.monotonic()
        buckets: list[tuple[int, list[ResolvedStep]]] = []
        staging = None
        try:
            self._check_dtypes(*target)
            places = (
                Places(*source, f"rank {self._rank}, source"),
                Places(*target, f"rank {self._rank}, target"),
            )
            mine = self._plan.for_rank(self._rank)
            buckets = [(b.number, [self._resolve(step, *places) for step in b.steps]) for b in mine]
            staging = self._staging(buckets, memory)
        except Exception as error:  # boundary: the other ranks are told, then it is raised
            self._failed = error
        try:
            self._agree("before the first bucket")
            for index, steps in buckets:
                for number, step in enumerate(steps):
                    self._do(step, staging, f"bucket {index}, step {number}")
            self._release(staging, memory)  # not when a peer is lost: a message may still be on its way into it
            self._agree("after the last bucket")
        finally:
            staging = None  # a failure keeps this frame; only messages on their way may keep the buffer
            if memory is not None:
                memory.forget(BUCKET)
        self._report.seconds = time.monotonic() - began
        return self._report

    # ---- what has to be done -----------------------------------------------------------------------------------------

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._other_dtypes.get(name, self._dtype)

    def _check_dtypes(self, params: Sequence[LocalParam], target: Mapping[str, torch.Tensor]) -> None:
        for dtype in (self._dtype, *self._other_dtypes.values()):
            if dtype.itemsize > self._plan.itemsize:
                raise WeightSyncError(
                    f"the plan counts {self._plan.itemsize} bytes an element, {dtype} has {dtype.itemsize}"
                )
        for param in params:
            for segment in param.segments:
                wanted, found = self._dtype_of(segment.name), target[param.name].dtype
                if found != wanted:
                    raise WeightSyncError(f"target {param.name!r} is {found}, but the peers send {wanted}")

    def _resolve(self, step: RankStep, source: Places, target: Places) -> ResolvedStep:
        def read(move: Move) -> list[BoxView]:
            # a box that came in an earlier step and is passed on lies in the target only
            found = source.read(move.name, move.box) or target.read(move.name, move.box)
            if found is None:
                raise WeightSyncError(f"rank {self._rank} should send {move.name!r}, {move.box}, and does not hold it")
            return found

        def write(move: Move) -> list[BoxView]:
            return target.write(move.name, move.box)

        resolved = ResolvedStep()
        for incoming, moves, place in ((False, step.sends, read), (True, step.receives, write)):
            for peer, own in by_peer(moves):
                boxes = [Packed(move.box, self._dtype_of(move.name), place(move)) for move in own]
                boxes.sort(key=lambda packed: -packed.dtype.itemsize)  # so that each begins where its type may
                resolved.messages.append(Message(peer, incoming, boxes))
        for move in step.copies:
            resolved.copies.append(Copy(move.box, read(move), write(move)))
        for message in resolved.messages:
            dtypes = {packed.dtype for packed in message.boxes}
            if len(dtypes) == 1 and all(len(packed.pieces) == 1 for packed in message.boxes):
                message.data = one_run([packed.pieces[0] for packed in message.boxes], dtypes.pop())
                message.direct = message.data is not None
        return resolved

    def _staging(
        self, buckets: Sequence[tuple[int, Sequence[ResolvedStep]]], memory: DeviceMemory | None
    ) -> torch.Tensor | None:
        """One buffer of bytes for the step that needs most; messages are given their parts of it when they start."""
        most = 0
        for index, steps in buckets:
            for step in steps:
                needed = sum(self._room(m) for m in step.messages)
                if needed > self._plan.bucket_bytes:
                    raise WeightSyncError(
                        f"rank {self._rank}, bucket {index}: {needed} bytes to pack, but a bucket has "
                        f"{self._plan.bucket_bytes}"
                    )
                most = max(most, needed)
        self._report.staging_bytes = most
        if not most:
            return None
        return memory.empty(BUCKET, most) if memory else torch.empty(most, dtype=torch.uint8, device=self._device)

    def _release(self, staging: torch.Tensor | None, memory: DeviceMemory | None) -> None:
        """Messages without sense, after a failure, have also come to their end."""
        if memory is not None and staging is not None:
            try:
                memory.release(staging)
            except PlatformError as error:  # boundary: the other ranks are told, then it is raised
                self._failed = self._failed or error

    def _room(self, message: Message) -> int:
        """Bytes of staging, so many that the next message begins where any type may. As the plan counts smaller types
        like the largest one, the rounding stays within its bucket."""
        if message.direct:
            return 0
        return -(-message.nbytes // self._plan.itemsize) * self._plan.itemsize

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _do(self, step: ResolvedStep, staging: torch.Tensor | None, where: str) -> None:
        offset = 0
        for message in step.messages:
            if not message.direct:
                assert staging is not None
                message.data = staging[offset : offset + message.nbytes]
                offset += self._room(message)
        self._own_part(lambda: pack(step.messages))
        works = self._start(step.messages, where)
        self._own_part(lambda: copy(step.copies))
        self._wait_all(works, step.messages, where)
        self._own_part(lambda: unpack(step.messages))
        for message in step.messages:
            if message.incoming:
                self._report.received_bytes += message.nbytes
            else:
                self._report.sent_bytes += message.nbytes
            self._report.direct_bytes += message.nbytes if message.direct else 0
            message.data = None
        self._report.messages += len(step.messages)
        self._report.copied_bytes += sum(c.box.size * c.targets[0].view.dtype.itemsize for c in step.copies)

    def _start(self, messages: Sequence[Message], where: str) -> list[Any]:
        if not messages:
            return []
        operations = [  # bytes: every backend carries them, whatever types it knows. At most one each way for each peer
            dist.P2POp(
                dist.irecv if m.incoming else dist.isend,
                contiguous(m.buffer, f"rank {self._rank}, {where}: {m}"),
                self._global(m.peer),
                self._group,
            )
            for m in messages
        ]
        try:
            return dist.batch_isend_irecv(operations)
        except RuntimeError as error:  # torch knows no finer type for a connection that is closed already
            raise WeightSyncError(f"rank {self._rank} lost a peer, {where}: {error}") from error

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def _wait_all(self, works: Sequence[Any], messages: Sequence[Message], where: str) -> None:
        one_each = len(works) == len(messages)  # some backends answer with one handle for the whole batch
        for i, work in enumerate(works):
            meant = [messages[i]] if one_each else messages
            self._await(work, f"{where}: {', '.join(map(str, meant))}")

    def _await(self, work: Any, what: str) -> None:
        wait(work, f"rank {self._rank}", what, self._timeout_s, self._group)

    # ---- failing together --------------------------------------------------------------------------------------------

    def _own_part(self, action: Callable[[], object]) -> None:
        if self._failed is not None:
            return
        try:
            action()
        except Exception as error:  # boundary: peers wait for messages; it is raised when all ranks have agreed
            self._failed = error

    def _agree(self, when: str) -> None:
        agree(self._rank, self._failed, when, device=self._device, group=self._group, timeout_s=self._timeout_s)


def agree(
    rank: int, failed: Exception | None, when: str, *, device: torch.device, group: Any, timeout_s: float
) -> None:
    """Raise `WeightSyncError` on all ranks of `group` if one of them comes with a failure. Collective.

    `device` is where the backend wants its tensors; the wait lasts at most `timeout_s` seconds.
    """
    none = dist.get_world_size(group)
    lowest = torch.tensor([none if failed is None else rank], dtype=torch.int32, device=device)  # failed rank
    work = dist.all_reduce(contiguous(lowest, when), op=dist.ReduceOp.MIN, group=group, async_op=True)
    try:
        wait(work, f"rank {rank}", f"all ranks of the group to say that they are well, {when}", timeout_s, group)
    except AsyncFlowError as lost:
        if failed is not None:
            raise WeightSyncError(f"rank {rank} failed {when}: {failed}; then {lost}") from failed
        raise
    first = int(lowest)
    if failed is not None:
        others = f" (rank {first} failed, too)" if first < rank else ""
        raise WeightSyncError(f"rank {rank} failed {when}: {failed}{others}") from failed
    if first < none:
        raise WeightSyncError(f"rank {first} failed {when}; its own message says why")


def contiguous(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """`tensor`, as it goes into a collective. Raises `WeightSyncError` if it has gaps: backends either refuse those or
    take what lies between, without a word."""
    if not tensor.is_contiguous():
        raise WeightSyncError(f"{what}: {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous")
    return tensor


def wait(work: Any, who: str, what: str, timeout_s: float, group: Any) -> None:
    """Wait for a message or collective of `group` at most `timeout_s` seconds. Raises `DeadlineExceeded` then,
    `WeightSyncError` when a peer is gone; both say that `who` waited for `what`."""
    began = time.monotonic()
    try:
        if dist.get_backend(group) != "gloo":  # others hold the device's stream, not this thread, and know no deadline
            _look_until_done(work, began + timeout_s)
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch knows no finer type for a peer that is gone or silent
        waited = time.monotonic() - began
        if waited >= 0.9 * timeout_s:
            raise DeadlineExceeded(f"{who} waited {waited:.0f} s for {what}") from error
        raise WeightSyncError(f"{who} lost a peer, {what}: {error}") from error


def _look_until_done(work: Any, deadline: float) -> None:
    while not work.is_completed():
        if time.monotonic() >= deadline:
            raise RuntimeError("the device has not done it")
        time.sleep(LOOK_EVERY_S)
    if not work.is_success():
        raise RuntimeError("the device reports that it failed; its log says why")
