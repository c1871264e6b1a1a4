"""How every process of a run talks to the dock.

On the server's node the client maps the arena: values are copied in once by the writer and read as views. Elsewhere
(or with `map_arena=False`) the same verbs carry the bytes in their frames.

    put_groups -> claim -> read -> write -> done -> free          release, drop, seal, forget_worker, stats, describe
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.channel import Broken, Channel
from mindspeed_asyncflow.dock.columns import ColumnSpec, Ragged, Schema, TaskSpec
from mindspeed_asyncflow.dock.node import INLINE
from mindspeed_asyncflow.dock.warehouse import Arena, check_fits, layout
from mindspeed_asyncflow.dock.wire import Message, Verb
from mindspeed_asyncflow.errors import DockError, WorkerLost
from mindspeed_asyncflow.records import PromptRow

INLINE_BYTES = 1 << 16  # smaller writes travel in their frame: one message instead of two
_ATTEMPTS = 2  # a call is repeated once, under the same identity, when its connection breaks


@dataclass(frozen=True, slots=True)
class Claim:
    """Rows that this worker holds until `done` or `release`, or until the lease runs out.

    Rows of one group are neighbours when whole groups were claimed. `claim_id` is 0 when there are no rows.
    """

    claim_id: int
    rows: np.ndarray  # int64 [n] row handles
    group_ids: np.ndarray  # int64 [n]
    members: np.ndarray  # int32 [n]
    version_min: np.ndarray  # int32 [n], oldest policy that wrote into the row; -1: none yet
    version_max: np.ndarray  # int32 [n]
    tokens: np.ndarray  # int64 [n], prompt and answer tokens written so far
    dropped: list[tuple[int, np.ndarray, str]]  # (group id, row handles, reason): dropped by this claim
    sealed: bool  # True: this task has had all rows of the sealed partition; stop asking

    def __len__(self) -> int:
        return len(self.rows)


class PairClient:
    """Thread-safe; calls block, each on a connection of its own. `wait_s` is the deadline of calls that wait.

    Make one per process: connections cannot be shared across a fork. Raises DockError (and its kinds StaleHandle,
    ClaimLost, DockFull) when the dock refuses a call, DeadlineExceeded when a wait ends, WorkerLost when the server
    is gone.
    """

    def __init__(self, address: str, secret: str | bytes = b"", wait_s: float = 30.0, map_arena: bool = True) -> None:
        self.address = address
        self.wait_s = wait_s
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._client = secrets.randbits(63)
        self._requests = itertools.count(1)
        self._idle: list[Channel] = []
        self._lock = threading.Lock()
        self._closed = False
        self._token = b""  # of the server's arena: another one means another server, which has none of our rows
        channel = self._connect()
        hello = channel.hello
        self._idle.append(channel)
        self.schema = Schema(
            [ColumnSpec(*column) for column in hello["columns"]], [TaskSpec(n, tuple(c)) for n, c in hello["tasks"]]
        )
        self._arena_bytes = hello.whole("arena_bytes")
        self._arena = Arena.attach(hello.text("arena_path"), self._token) if map_arena else None

    @property
    def mapped(self) -> bool:
        """Whether reads are views into shared memory."""
        return self._arena is not None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def __enter__(self) -> PairClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- rows come and go ------------------------------------------------------------------------------------------

    def put_groups(
        self, partition: str, groups: Sequence[Sequence[PromptRow]], timeout_s: float | None = None
    ) -> list[np.ndarray]:
        """Adds prompt groups; returns the row handles int64 [rows] of each group, in the order given.

        The columns `prompt_ids` and `truth` are stored once per group, from its first row. Waits while the arena is
        full. Further members of a group may be put later, while the group has any rows.
        """
        if not groups:
            return []
        firsts = [group[0] for group in groups]
        values = {
            "prompt_ids": Ragged.from_rows([row.prompt_ids for row in firsts], "int32"),
            "truth": Ragged.from_text(row.truth for row in firsts),
        }
        counts = [len(group) for group in groups]
        members = [row.member for group in groups for row in group]
        ids = [row.group_id for row in firsts]
        return self.put(partition, ids, [row.group_size for row in firsts], counts, members, values, timeout_s)

    def put(
        self, partition: str, group_ids: Sequence[int], sizes: Sequence[int], counts: Sequence[int],
        members: Sequence[int], values: Mapping[str, Any], timeout_s: float | None = None,
    ) -> list[np.ndarray]:  # fmt: skip
        """As `put_groups`, for any columns: shared ones have one row per group, others one per row."""
        message: dict[str, Any] = {
            "partition": partition,
            "group_ids": np.asarray(group_ids, np.int64),
            "sizes": np.asarray(sizes, np.int64),
            "counts": np.asarray(counts, np.int64),
            "members": np.asarray(members, np.int32),
        }
        reply = self._send_values(Verb.PUT, message, values, timeout_s)
        return np.split(reply.ints("rows"), np.cumsum(np.asarray(counts, np.int64))[:-1])

    def free(self, rows: np.ndarray) -> None:
        """The rows have served. Their bytes go when the last claim on them ends."""
        if len(rows):
            self._call(Verb.FREE, {"rows": _handles(rows)})

    def drop(
        self,
        rows: np.ndarray | None = None,
        *,
        group_ids: Sequence[int] | None = None,
        partition: str = "",
        reason: str,
    ) -> None:
        """Takes rows, or whole groups of `partition`, out of every task and counts them under `reason`.

        A group that loses single rows gets smaller: its other members make it whole.
        """
        message: dict[str, Any] = {"reason": reason, "partition": partition}
        if rows is not None:
            message["rows"] = _handles(rows)
        else:
            message["group_ids"] = np.asarray(group_ids or (), np.int64)
        self._call(Verb.DROP, message)

    def seal(self, partition: str) -> None:
        """No more rows come: tails are served, then every claim ends with an empty grant whose `sealed` is True."""
        self._call(Verb.SEAL, {"partition": partition})

    # -- work ------------------------------------------------------------------------------------------------------

    def claim(
        self, task: str, count: int, *, partition: str, worker: str, unit: str = "rows", policy: str = "fifo",
        group_ids: Sequence[int] | None = None, min_version: int | None = None, timeout_s: float | None = None,
        at_least: int = 1,
    ) -> Claim:  # fmt: skip
        """Takes up to `count` ready rows (or whole groups) for `task`, as soon as `at_least` are there.

        `policy`: "fifo", or with unit="groups" also "in_order" (group k of the puts only after group k-1 was granted);
        `group_ids` grants from these groups only. Rows (with unit="groups": whole groups) whose oldest version is
        below `min_version` are dropped as "stale" and reported in `dropped`; a claim that dropped something returns
        at once, with what is ready, even if that is nothing. In a sealed partition the tail may be smaller than
        `at_least`. Raises DeadlineExceeded, with nothing claimed, after `timeout_s` (default `wait_s`; 0: no wait).
        """
        message = {
            "task": task, "partition": partition, "count": count, "unit": unit, "policy": policy,
            "group_ids": None if group_ids is None else np.asarray(group_ids, np.int64), "min_version": min_version,
            "timeout_s": self._patience(timeout_s), "worker": worker, "at_least": at_least,
        }  # fmt: skip
        reply = self._call(Verb.CLAIM, message)
        parts = np.split(reply.ints("dropped_rows"), np.cumsum(np.array(reply["dropped_counts"], np.int64))[:-1])
        return Claim(
            reply.whole("claim_id"), reply.ints("rows"), reply.ints("group_ids"), reply.ints("members", "int32"),
            reply.ints("version_min", "int32"), reply.ints("version_max", "int32"), reply.ints("tokens"),
            list(zip(reply["dropped_groups"], parts, reply["dropped_reasons"])), reply.flag("sealed"),
        )  # fmt: skip

    def read(self, rows: np.ndarray, columns: Sequence[str], copy: bool = False) -> dict[str, Any]:
        """The columns of `rows`, in their order: a Ragged, or an array [n] for a scalar column.

        On the server's node ragged values are read-only views into the arena. They are valid until the rows are
        freed; rows that you hold a claim on are not freed before it ends. `copy=True` gives values of your own.
        """
        copy = copy or self._arena is None
        reply = self._call(Verb.READ, {"rows": _handles(rows), "columns": list(columns), "copy": copy})
        out: dict[str, Any] = {}
        for name in columns:
            spec, lengths = self.schema.columns[name], reply.ints(f"lengths.{name}")
            if copy:
                ragged = Ragged(reply.array(f"values.{name}", spec.dtype), np.cumsum(lengths) - lengths, lengths)
            else:
                assert self._arena is not None
                ragged = self._arena.ragged(spec, reply.ints(f"offsets.{name}"), lengths)
            out[name] = ragged if spec.kind == "ragged" else ragged.values[ragged.starts]
        return out

    def write(
        self, rows: np.ndarray, values: Mapping[str, Any], *, claim_id: int | None = None,
        versions: tuple[np.ndarray, np.ndarray] | None = None, done: bool = False, timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """Writes columns of `rows` at once: either all become ready, after their bytes are in place, or none.

        `versions`: (oldest, newest) policy version per row, int32 [n] each. `claim_id` makes the dock refuse a late
        result (ClaimLost); `done=True` also finishes these rows of the claim. A second result for a cell is refused
        unless it is equal. Waits while the arena is full.
        """
        message: dict[str, Any] = {"rows": _handles(rows), "claim_id": claim_id, "done": done}
        if versions is not None:
            message["version_min"], message["version_max"] = (np.asarray(v, np.int32) for v in versions)
        self._send_values(Verb.WRITE, message, values, timeout_s)

    def done(self, claim_id: int | None = None, *, task: str = "", rows: np.ndarray | None = None) -> None:
        """The task has finished the rows of the claim (only `rows`, if given), or `rows` that claims of `task` hold."""
        self._call(Verb.DONE, {"claim_id": claim_id, "task": task, "rows": None if rows is None else _handles(rows)})

    def release(self, claim_id: int, rows: np.ndarray | None = None) -> None:
        """Gives the rows of the claim (only `rows`, if given) back: they are offered again, before others."""
        self._call(Verb.RELEASE, {"claim_id": claim_id, "rows": None if rows is None else _handles(rows)})

    def forget_worker(self, worker: str) -> int:
        """Offers everything again that a lost worker holds; returns the number of its claims."""
        return self._call(Verb.FORGET, {"worker": worker}).whole("claims")

    def stats(self) -> dict[str, Any]:
        """Rows by state per partition and task, bytes, claims, drops by reason, waiting calls."""
        return dict(self._call(Verb.STATS, {}))

    def describe(self) -> str:
        """`stats` for a person."""
        stats = self.stats()
        lines = [
            f"dock {self.address}: {stats['used_bytes']} of {stats['arena_bytes']} bytes used "
            f"({stats['payload_bytes']} payload), "
            f"{stats['claims']} claims open, {stats['leases_expired']} leases ran out, "
            f"dropped: {stats['drops'] or 'none'}"
        ]
        for name, part in stats["partitions"].items():
            lines.append(
                f"  {name}: {part['rows']} rows in {part['groups']} groups{', sealed' if part['sealed'] else ''}"
            )
            lines += [
                f"    {task:<10} {', '.join(f'{v} {k}' for k, v in s.items())}" for task, s in part["tasks"].items()
            ]
        lines += [
            f"  waiting: {w['worker']!r} for {w['at_least']} {w['unit']} of {w['task']}" for w in stats["waiting"]
        ]
        return "\n".join(lines)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _patience(self, timeout_s: float | None) -> float:
        return self.wait_s if timeout_s is None else timeout_s

    def _send_values(self, verb: Verb, message: dict, values: Mapping[str, Any], timeout_s: float | None) -> Message:
        """A put or write: small values in the frame, large ones copied into the mapped arena before the message."""
        ragged = {name: self.schema.coerce(name, value) for name, value in values.items()}
        lengths = {name: column.lengths for name, column in ragged.items()}
        begins, total = layout(lengths, self.schema.columns)
        message |= {"columns": list(ragged), "timeout_s": self._patience(timeout_s), "offset": INLINE}
        message |= {f"lengths.{name}": column for name, column in lengths.items()}
        check_fits(total, self._arena_bytes)
        arena = self._arena
        if arena is None or total <= INLINE_BYTES:
            return self._call(verb, message | {f"values.{name}": column.values for name, column in ragged.items()})
        reserve = {"nbytes": total, "put": verb is Verb.PUT, "timeout_s": self._patience(timeout_s)}
        request = next(self._requests)

        def place_and_send(channel: Channel) -> Message:
            offset = channel.call(Verb.RESERVE, next(self._requests), reserve).whole("offset")
            for name, column in ragged.items():
                arena.store(offset + begins[name], column.values)
            return channel.call(verb, request, message | {"offset": offset})

        return self._attempt(verb, place_and_send)

    def _call(self, verb: Verb, message: Mapping[str, Any]) -> Message:
        request = next(self._requests)
        return self._attempt(verb, lambda channel: channel.call(verb, request, message))

    def _attempt(self, verb: Verb, action: Callable[[Channel], Message]) -> Message:
        for attempt in range(1, _ATTEMPTS + 1):
            channel = self._channel(fresh=attempt > 1)
            try:
                return action(channel)
            except Broken as broken:
                if attempt == _ATTEMPTS:
                    raise WorkerLost(
                        f"the dock server at {self.address} went away during {verb.name}: {broken}"
                    ) from broken
            finally:
                self._keep(channel)
        raise AssertionError("unreachable")

    def _keep(self, channel: Channel) -> None:
        with self._lock:
            if channel.usable and not self._closed:
                self._idle.append(channel)
                return
        channel.close()

    def _channel(self, fresh: bool) -> Channel:
        with self._lock:
            if self._closed:
                raise DockError("this dock client is closed")
            if self._idle and not fresh:
                return self._idle.pop()
        return self._connect()

    def _connect(self) -> Channel:
        try:
            channel = Channel(self.address, self._secret, self._client, self.wait_s)
        except Broken as broken:
            raise WorkerLost(f"no dock server at {self.address}, or the secret is wrong: {broken}") from broken
        token = channel.hello.array("arena_token", "uint8").tobytes()
        if self._token and token != self._token:
            channel.close()
            raise WorkerLost(f"the dock server at {self.address} was replaced by another one; its rows are gone")
        self._token = token
        return channel


def _handles(rows: np.ndarray | Sequence[int]) -> np.ndarray:
    return np.asarray(rows, np.int64)
