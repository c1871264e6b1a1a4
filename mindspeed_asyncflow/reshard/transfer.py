"""Runs a plan over a collective group: one packed message for each pair of ranks and step, point to point.

    for each bucket, in the plan's order, the same on all ranks
      for each step of it
        pack     boxes for one peer, row-major, in the plan's order, cast to the type of the target   (staging)
        send / receive, all of the step at once
        copy     what stays on this rank, while messages travel                                     (no staging)
        unpack   boxes into the target                                                              (staging)

A message whose boxes follow each other in memory, with the right type, is sent from or received into that memory and
needs no staging. Staging of a step, sending and receiving together, is at most the plan's `bucket_bytes`; one buffer
serves all steps.

A rank whose own part fails (a shape, memory) keeps answering its peers, without sense, and tells so at the end: then
all ranks raise, none of them waits in vain, and the group can be used again. A peer that answers nothing ends the wait
at its deadline, and gloo closes the connections of the one that gave up, so that the others learn it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam
from mindspeed_asyncflow.reshard.messages import Copy, Message, ResolvedStep, by_peer, copy, pack, unpack
from mindspeed_asyncflow.reshard.places import Piece, Places, one_run

if TYPE_CHECKING:
    import torch

    from mindspeed_asyncflow.platforms.memory import DeviceMemory
    from mindspeed_asyncflow.reshard.plan import Move, Plan, RankStep

BUCKET = "bucket"  # kind of the staging buffer in the device accounting


@dataclass(slots=True)
class TransferReport:
    """What one rank did. Bytes are elements times the itemsize of the target's type."""

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
) -> TransferReport:
    """Fill `target` from the `source` tensors of all ranks. Collective over `group` (None: all ranks).

    `rank` is the plan's number of this process and its rank in `group`. `source` and `target` map the parameter names
    of the two layouts to local tensors; rank j of the target layout is rank `target_first` + j, and a rank without a
    part in a layout hands over an empty mapping. `dtype` is what travels and what every target tensor has; sources of
    another type are cast. Each wait lasts at most `timeout_s` seconds.

    Raises `WeightSyncError` on every rank if any rank failed, `DeadlineExceeded` when a peer did not answer; the target
    is then half filled.
    """
    here, there = rank, rank - target_first
    mine = source_layout.ranks[here] if here < source_layout.world_size else ()
    wanted = target_layout.ranks[there] if 0 <= there < target_layout.world_size else ()
    transfer = _Run(plan, rank, dtype, device, group, timeout_s)
    return transfer.run((mine, source), (wanted, target), memory)


Side = tuple[Sequence[LocalParam], Mapping[str, "torch.Tensor"]]  # a rank's part of a layout, and the tensors


class _Run:
    def __init__(
        self, plan: Plan, rank: int, dtype: torch.dtype, device: torch.device, group: Any, timeout_s: float
    ) -> None:
        self._plan, self._rank, self._dtype, self._device = plan, rank, dtype, device
        self._group, self._timeout_s = group, timeout_s
        self._failed: Exception | None = None  # the first failure of this rank's own part
        self._report = TransferReport()

    def run(self, source: Side, target: Side, memory: DeviceMemory | None) -> TransferReport:
        began = time.monotonic()
        buckets: list[tuple[int, list[ResolvedStep]]] = []
        staging = None
        try:
            self._check_dtypes(target[1])
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
            self._agree("after the last bucket")
            if memory is not None and staging is not None:
                memory.release(staging)  # not after a failure: a message may still be on its way into it
        finally:
            if memory is not None:
                memory.forget(BUCKET)
        self._report.seconds = time.monotonic() - began
        return self._report

    # ---- what has to be done -----------------------------------------------------------------------------------------

    def _check_dtypes(self, target: Mapping[str, torch.Tensor]) -> None:
        if self._dtype.itemsize != self._plan.itemsize:
            raise WeightSyncError(
                f"the plan counts {self._plan.itemsize} bytes an element, {self._dtype} has {self._dtype.itemsize}"
            )
        for name, tensor in target.items():
            if tensor.dtype != self._dtype:
                raise WeightSyncError(f"target {name!r} is {tensor.dtype}, but the peers expect {self._dtype}")

    def _resolve(self, step: RankStep, source: Places, target: Places) -> ResolvedStep:
        def read(move: Move) -> list[Piece]:
            # a box that came in an earlier step and is passed on lies in the target only
            found = source.read(move.name, move.box) or target.read(move.name, move.box)
            if found is None:
                raise WeightSyncError(f"rank {self._rank} should send {move.name!r}, {move.box}, and does not hold it")
            return found

        resolved = ResolvedStep()
        for peer, moves in by_peer(step.sends):
            resolved.messages.append(Message(peer, False, [(m.box, read(m)) for m in moves]))
        for peer, moves in by_peer(step.receives):
            resolved.messages.append(Message(peer, True, [(m.box, target.write(m.name, m.box)) for m in moves]))
        for move in step.copies:
            resolved.copies.append(Copy(move.box, read(move), target.write(move.name, move.box)))
        for message in resolved.messages:
            if all(len(pieces) == 1 for _, pieces in message.boxes):
                message.tensor = one_run([pieces[0] for _, pieces in message.boxes], self._dtype)
                message.direct = message.tensor is not None
        return resolved

    def _staging(
        self, buckets: Sequence[tuple[int, Sequence[ResolvedStep]]], memory: DeviceMemory | None
    ) -> torch.Tensor | None:
        """One buffer of bytes for the step that needs most; messages are given their parts of it when they start."""
        import torch

        most = 0
        for index, steps in buckets:
            for step in steps:
                payload = sum(m.elements * self._dtype.itemsize for m in step.messages if not m.direct)
                if payload > self._plan.bucket_bytes:
                    raise WeightSyncError(
                        f"rank {self._rank}, bucket {index}: {payload} bytes to pack, but a bucket has "
                        f"{self._plan.bucket_bytes}"
                    )
                most = max(most, payload)
        self._report.staging_bytes = most
        if not most:
            return None
        return memory.empty(BUCKET, most) if memory else torch.empty(most, dtype=torch.uint8, device=self._device)

    def _nbytes(self, message: Message) -> int:
        return message.elements * self._dtype.itemsize

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _do(self, step: ResolvedStep, staging: torch.Tensor | None, where: str) -> None:
        offset = 0
        for message in step.messages:
            if not message.direct:
                assert staging is not None
                nbytes = self._nbytes(message)
                message.tensor = staging[offset : offset + nbytes].view(self._dtype)
                offset += nbytes
        self._own_part(lambda: pack(step.messages))
        works = self._start(step.messages, where)
        self._own_part(lambda: copy(step.copies))
        self._wait_all(works, step.messages, where)
        self._own_part(lambda: unpack(step.messages))
        for message in step.messages:
            nbytes = self._nbytes(message)
            if message.incoming:
                self._report.received_bytes += nbytes
            else:
                self._report.sent_bytes += nbytes
            self._report.direct_bytes += nbytes if message.direct else 0
            message.tensor = None
        self._report.messages += len(step.messages)
        self._report.copied_bytes += sum(c.box.size for c in step.copies) * self._dtype.itemsize

    def _start(self, messages: Sequence[Message], where: str) -> list[Any]:
        import torch.distributed as dist

        if not messages:
            return []
        operations = [
            # bytes: every backend carries them, whatever types it knows
            dist.P2POp(dist.irecv if m.incoming else dist.isend, m.raw(), self._global(m.peer), self._group)
            for m in messages
        ]
        try:
            return dist.batch_isend_irecv(operations)
        except RuntimeError as error:  # torch knows no finer type for a connection that is closed already
            raise WeightSyncError(f"rank {self._rank} lost a peer, {where}: {error}") from error

    def _global(self, rank: int) -> int:
        import torch.distributed as dist

        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def _wait_all(self, works: Sequence[Any], messages: Sequence[Message], where: str) -> None:
        one_each = len(works) == len(messages)  # some backends answer with one handle for the whole batch
        for i, work in enumerate(works):
            meant = [messages[i]] if one_each else messages
            self._await(work, f"{where}: {', '.join(m.said(self._nbytes(m)) for m in meant)}")

    def _await(self, work: Any, what: str) -> None:
        _wait(work, f"rank {self._rank}", what, self._timeout_s)

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
    import torch
    import torch.distributed as dist

    none = dist.get_world_size(group)
    lowest = torch.tensor([none if failed is None else rank], dtype=torch.int32, device=device)  # failed rank
    work = dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group, async_op=True)
    _wait(work, f"rank {rank}", f"all ranks of the group to say that they are well, {when}", timeout_s)
    if failed is not None:
        raise WeightSyncError(f"rank {rank} failed {when}: {failed}") from failed
    if int(lowest) < none:
        raise WeightSyncError(f"rank {int(lowest)} failed {when}; its own message says why")


def _wait(work: Any, who: str, what: str, timeout_s: float) -> None:
    began = time.monotonic()
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch knows no finer type for a peer that is gone or silent
        waited = time.monotonic() - began
        if waited >= 0.9 * timeout_s:
            raise DeadlineExceeded(f"{who} waited {waited:.0f} s for {what}") from error
        raise WeightSyncError(f"{who} lost a peer, {what}: {error}") from error
