"""How a process talks to one pair of the dock.

On the server's node the client maps the arena: values are copied in once by the writer and read as views. Elsewhere
(or with `map_arena=False`) the same verbs carry the bytes behind their frames.

    put -> claim -> read -> write -> done -> free          release, drop, seal, close_partition, stats, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock import arguments
from mindspeed_asyncflow.dock.calls import Calls
from mindspeed_asyncflow.dock.describe import as_text
from mindspeed_asyncflow.dock.table import pair_numbers
from mindspeed_asyncflow.dock.wire import Message, Verb
from mindspeed_asyncflow.errors import DockError


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
    values: dict[str, Any] | None = None  # the columns that the claim asked for, as `read` gives them
    ready: int = 0  # units that were ready for the task after the grant

    def __len__(self) -> int:
        return len(self.rows)


class PairClient(Calls):
    """Thread-safe; calls block, each on a connection of its own. `wait_s` is the deadline of calls that wait.

    Make one per process: connections cannot be shared across a fork. A connection that breaks is made again, and the
    call repeated under its identity, until `restart_s` have passed. Raises DockError (and its kinds StaleHandle,
    ClaimLost, DockFull) when the dock refuses a call, DeadlineExceeded when a wait ends, WorkerLost when the server
    is gone. `free_bytes` and `live_rows` are what the pair said in its last answer to a put.
    """

    # -- rows come and go ------------------------------------------------------------------------------------------

    def put(
        self, partition: str, group_ids: Sequence[int] | np.ndarray | None = None,
        sizes: Sequence[int] | np.ndarray | None = None, counts: Sequence[int] | np.ndarray | None = None,
        members: Sequence[int] | np.ndarray | None = None, values: Mapping[str, Any] | None = None,
        timeout_s: float | None = None, versions: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> list[np.ndarray]:  # fmt: skip
        """Adds rows; returns the row handles int64 [rows] of each group. Shared columns have one row per group.

        Without `group_ids` each row is a group of its own, whose negative id the pair chooses, and all handles come
        back in one array [rows]. Defaults: one row per group, `sizes` are the counts, `members` count from 0 in each
        group. `versions`: (oldest, newest) policy version per row, int32 [n] each.
        """
        packed = self.pack(values or {})
        message: dict[str, Any] = {"partition": arguments.text("partition", partition)}
        if group_ids is None:
            rows = next((len(p.lengths) for parts in packed.values() for p in parts), 0)
            if not rows:
                raise DockError("a put brings at least one row")
            _add_versions(message, versions, rows)
            reply = self.send_values(Verb.PUT, message | {"count": rows}, packed, (rows, rows), timeout_s)
            self._note_room(reply)
            return [reply.ints("rows")]
        ids = arguments.numbers("group_ids", group_ids)
        many = np.ones(len(ids), np.int64) if counts is None else arguments.numbers("counts", counts)
        ends = np.cumsum(many)
        total = int(ends[-1]) if len(ends) else 0
        if not total or len(many) != len(ids):
            raise DockError(f"a put has at least one row and a count per group; got {len(ids)} ids, {len(many)} counts")
        _add_versions(message, versions, total)
        if members is None:
            members = np.arange(total) - np.repeat(ends - many, many)
        message |= {
            "group_ids": ids, "sizes": many if sizes is None else arguments.numbers("sizes", sizes), "counts": many,
            "members": arguments.numbers("members", members, "int32"),
        }  # fmt: skip
        reply = self.send_values(Verb.PUT, message, packed, (total, len(ids)), timeout_s)
        self._note_room(reply)
        handles = reply.ints("rows")
        return [handles[end - n : end] for end, n in zip(ends.tolist(), many.tolist())]

    def _note_room(self, reply: Message) -> None:
        self.free_bytes, self.live_rows = reply.whole("free_bytes"), reply.whole("live_rows")

    def free(self, rows: np.ndarray) -> None:
        """The rows have served. Their bytes go when the last claim on them ends."""
        if len(rows):
            self.call(Verb.FREE, {"rows": _handles(rows)})

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
        self.call(Verb.DROP, message)

    def seal(self, partition: str) -> None:
        """No more rows come: tails are served, then every claim ends with an empty grant whose `sealed` is True."""
        self.call(Verb.SEAL, {"partition": arguments.text("partition", partition)})

    def close_partition(self, name: str) -> None:
        """Frees all rows of a partition (held ones when their claims end); its name may be used anew afterwards."""
        self.call(Verb.CLOSE, {"partition": arguments.text("name", name)})

    def add_task(self, name: str, columns: Sequence[str]) -> None:
        """A new task; all live rows enter it. Nothing happens when it is there already with the same columns."""
        columns = arguments.names("columns", columns)
        if not columns:
            raise DockError(f"task {name!r} must read a column, or it would be offered rows without anything")
        self.call(Verb.TASK, {"name": arguments.text("name", name), "columns": columns})

    # -- work ------------------------------------------------------------------------------------------------------

    def claim(
        self, task: str, count: int, *, partition: str, worker: str, unit: str = "rows", policy: str = "fifo",
        group_ids: Sequence[int] | None = None, min_version: int | None = None, timeout_s: float | None = None,
        at_least: int = 1, columns: Sequence[str] = (), max_age_s: float | None = None, seed: int = 0,
        team: str = "", rank: int = 0, ranks: int = 1, split: str = "same", claim_id: int = 0,
    ) -> Claim:  # fmt: skip
        """Takes up to `count` ready rows (or whole groups) for `task`, as soon as `at_least` are there.

        `policy` names one of `dock.policies`; `seed` is for "random". `group_ids` grants from these groups only. Rows
        (with unit="groups": whole groups) whose oldest version is below `min_version`, or that were put more than
        `max_age_s` ago, are dropped as "stale" and reported in `dropped`; a claim that dropped something returns at
        once, with what is ready, even if that is nothing. In a sealed partition the tail may be smaller than
        `at_least`. `columns` (of those that the task reads) come with the grant, in `values`, as `read` gives them.
        The `ranks` members of a `team` get the same rows, or shares of them: see `split` in `dock.teams`. `claim_id`
        is chosen by who gathers one claim from several pairs.
        Raises DeadlineExceeded, with nothing claimed, after `timeout_s` (default `wait_s`; 0: no wait).
        """
        count = arguments.whole("count", count, 1)
        groups = None if group_ids is None else arguments.numbers("group_ids", group_ids)
        if groups is not None and not len(groups):
            raise DockError("group_ids must name groups, at least one; leave it out for any")
        if (ranks != 1 or rank) and not team:
            raise DockError(f"rank {rank!r} and ranks {ranks!r} are those of a team: name it with team=")
        reply = self.call(Verb.CLAIM, {
            "task": task, "partition": arguments.text("partition", partition), "count": count, "unit": unit,
            "policy": policy, "group_ids": groups,
            "min_version": None if min_version is None else arguments.whole("min_version", min_version),
            "timeout_s": self.patience(timeout_s), "worker": arguments.text("worker", worker),
            "at_least": arguments.whole("at_least", at_least, 1, count),
            "columns": arguments.names("columns", columns), "copy": not self.mapped,
            "max_age_s": None if max_age_s is None else arguments.seconds("max_age_s", max_age_s),
            "seed": arguments.whole("seed", seed), "team": team, "rank": arguments.whole("rank", rank, 0),
            "ranks": arguments.whole("ranks", ranks, 1, 1 << 16), "split": split, "claim_id": claim_id,
        })  # fmt: skip
        claim = read_grant(reply)
        if not columns or not len(claim):
            return claim
        values = self.take_values(reply, columns)
        if values is None and int(pair_numbers(claim.rows[:1])[0]) != self.pair:
            return claim  # rows of another pair, which this one has asked for them: see `DockClient.claim`
        if values is None:  # the answer to a repeated call comes without them
            values = self.read(claim.rows, columns)
        return _with_values(claim, values)

    def read(self, rows: np.ndarray, columns: Sequence[str], copy: bool = False) -> dict[str, Any]:
        """The columns of `rows`, in their order: an array [n, *shape] for a scalar column, a Ragged, or a list.

        On the server's node ragged values, and blocks of a shape, are read-only views into the arena. They are valid
        until the rows are freed; rows that you hold a claim on are not freed before it ends. `copy=True` gives values
        of your own, checked to be those of these rows.
        """
        handles = _handles(rows)
        message = {"rows": handles, "columns": list(columns), "copy": not self.mapped}
        reply = self.call(Verb.READ, message)
        values = self.take_values(reply, columns, copy)
        assert values is not None
        if copy and self.mapped:  # the bytes may have changed hands while they were copied
            self.call(Verb.CHECK, {"rows": handles})
        return values

    def write(
        self, rows: np.ndarray, values: Mapping[str, Any], *, claim_id: int | None = None,
        versions: tuple[np.ndarray, np.ndarray] | None = None, done: bool = False, timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """Writes columns of `rows` at once: either all become ready, after their bytes are in place, or none.

        `versions`: (oldest, newest) policy version per row, int32 [n] each. `claim_id` makes the dock refuse a late
        result (ClaimLost); `done=True` also finishes these rows of the claim. A second result for a cell is refused
        unless it is equal. Waits while the arena is full.
        """
        handles = _handles(rows)
        if done and claim_id is None:
            raise DockError("done=True finishes rows of a claim: give its claim_id")
        claim_id = None if claim_id is None else arguments.whole("claim_id", claim_id)
        message: dict[str, Any] = {"rows": handles, "claim_id": claim_id, "done": done}
        _add_versions(message, versions, len(handles))
        self.send_values(Verb.WRITE, message, self.pack(values), (len(handles), len(handles)), timeout_s)

    def done(self, claim_id: int | None = None, *, task: str = "", rows: np.ndarray | None = None) -> None:
        """The task has finished the rows of the claim (only `rows`, if given), or `rows` that claims of `task` hold."""
        claim_id = None if claim_id is None else arguments.whole("claim_id", claim_id)
        self.call(Verb.DONE, {"claim_id": claim_id, "task": task, "rows": None if rows is None else _handles(rows)})

    def finish(self, task: str, rows: np.ndarray) -> None:
        """Marks rows done for `task` without a claim, unless they are claimed."""
        if len(rows):
            self.call(Verb.FINISH, {"task": task, "rows": _handles(rows)})

    def release(self, claim_id: int, rows: np.ndarray | None = None) -> None:
        """Gives the rows of the claim (only `rows`, if given) back: they are offered again, before others."""
        claim_id = arguments.whole("claim_id", claim_id)
        self.call(Verb.RELEASE, {"claim_id": claim_id, "rows": None if rows is None else _handles(rows)})

    def renew(self, claim_id: int) -> None:
        """The lease of the claim begins again."""
        self.call(Verb.RENEW, {"claim_id": arguments.whole("claim_id", claim_id)})

    def forget_worker(self, worker: str) -> int:
        """Offers everything again that a lost worker holds; returns the number of its claims."""
        return self.call(Verb.FORGET, {"worker": arguments.text("worker", worker)}).whole("claims")

    def stats(self) -> dict[str, Any]:
        """Rows by state per partition and task, bytes, claims, drops by reason, waiting calls."""
        return dict(self.call(Verb.STATS, {}))

    # -- a pair among others ---------------------------------------------------------------------------------------

    def join(self, index: int, addresses: Sequence[str]) -> None:
        """From now on this is pair `index` of the dock of `addresses`. It must be empty, or know this already."""
        self.call(Verb.JOIN, {"index": index, "addresses": list(addresses)})

    def find(self, partition: str, group_ids: Sequence[int]) -> list[int]:
        """Those of the groups that live on this pair."""
        ids = np.asarray(group_ids, np.int64)
        return self.call(Verb.FIND, {"partition": partition, "group_ids": ids}).ints("found").tolist()

    def groups_of(self, pair: int) -> dict[str, np.ndarray]:
        """Group ids by partition that another pair held when this one last heard of it."""
        reply = self.call(Verb.LOST, {"pair": pair})
        return {name: reply.ints(f"ids{i}") for i, name in enumerate(reply.names("partitions"))}

    def forget_pair(self, pair: int) -> None:
        """This pair waits for that other one no more."""
        self.call(Verb.FORGET_PAIR, {"pair": pair})

    def freeze(self, timeout_s: float) -> None:
        """Only calls of this client are carried out until `thaw`, or until `timeout_s` have passed."""
        self.call(Verb.FREEZE, {"for_s": timeout_s})

    def thaw(self) -> None:
        self.call(Verb.THAW, {})

    def export(self, partition: str) -> Message:
        """Groups and rows of a partition and what the tasks have done with them; see `dock/snapshot.py`."""
        return self.call(Verb.EXPORT, {"partition": partition})

    def describe(self) -> str:
        """`stats` for a person."""
        return as_text(self.address, self.stats())

    def __enter__(self) -> PairClient:
        return self


def read_grant(reply: Message) -> Claim:
    """The claim that an answer describes, without values."""
    rows = reply.matrix("grant", 6)
    dropped = []
    if "dropped_rows" in reply:
        parts = np.split(reply.ints("dropped_rows"), np.cumsum(np.array(reply["dropped_counts"], np.int64))[:-1])
        dropped = list(zip(reply["dropped_groups"], parts, reply["dropped_reasons"]))
    small = rows[2:5].astype(np.int32)
    return Claim(
        reply.whole("claim_id"), rows[0], rows[1], small[0], small[1], small[2], rows[5], dropped,
        reply.flag("sealed"), None, reply.whole("ready"),
    )  # fmt: skip


def _with_values(claim: Claim, values: dict[str, Any]) -> Claim:
    return Claim(
        claim.claim_id, claim.rows, claim.group_ids, claim.members, claim.version_min, claim.version_max, claim.tokens,
        claim.dropped, claim.sealed, values, claim.ready,
    )  # fmt: skip


def _handles(rows: np.ndarray | Sequence[int]) -> np.ndarray:
    return arguments.numbers("rows", rows)


def _add_versions(message: dict[str, Any], versions: tuple[np.ndarray, np.ndarray] | None, rows: int) -> None:
    if versions is not None:
        message["version_min"], message["version_max"] = arguments.versions(versions, rows)
