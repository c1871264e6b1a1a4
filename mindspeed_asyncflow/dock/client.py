"""How every process of a run talks to the dock: one client over all controller/warehouse pairs.

On a pair's own node the client maps the arena: values are copied in once by the writer and read as views. Rows of
other nodes travel in frames. A consumer asks its own pair, which serves it from the others when it has nothing.

    put_groups -> claim -> read -> write -> done -> free          release, drop, seal, forget_worker, stats, describe
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock import describe, snapshot
from mindspeed_asyncflow.dock.columns import Ragged
from mindspeed_asyncflow.dock.fleet import Fleet
from mindspeed_asyncflow.dock.gather import check_groups, join_claims, merge_columns, row_count, take, unit_count
from mindspeed_asyncflow.dock.homes import named_home
from mindspeed_asyncflow.dock.leases import SPREAD_CLAIM
from mindspeed_asyncflow.dock.pair import Claim, PairClient
from mindspeed_asyncflow.dock.table import spans
from mindspeed_asyncflow.errors import ClaimLost, ClaimUnknown, DeadlineExceeded, DockError, WorkerLost
from mindspeed_asyncflow.records import PromptRow

__all__ = ["Claim", "DockClient"]


class DockClient(Fleet):
    """Thread-safe; calls block. `wait_s` is the deadline of calls that wait.

    `addresses`: of one pair (it names the others), or of all pairs, which are joined into one dock if they are not
    yet. `home`: the pair that this client asks first; without it, one whose arena it can map. `restart_s`: how long a
    pair that went away may take to come back. Make one client per process: connections do not survive a fork.

    Raises DockError (and its kinds StaleHandle, ClaimLost, DockFull) when the dock refuses a call, DeadlineExceeded
    when a wait ends, WorkerLost, which names the pair, when one is gone.
    """

    def __enter__(self) -> DockClient:
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
        self, partition: str, group_ids: Sequence[int] | np.ndarray | None = None,
        sizes: Sequence[int] | np.ndarray | None = None, counts: Sequence[int] | np.ndarray | None = None,
        members: Sequence[int] | np.ndarray | None = None,
        values: Mapping[str, Any] | None = None, timeout_s: float | None = None,
        versions: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> list[np.ndarray]:  # fmt: skip
        """As `put_groups`, for any columns: shared ones have one value per group, others one per row.

        Without `group_ids` every row is a group of its own. Whole groups go to the pair with most room; members of a
        group that come in several puts meet at the pair that the id names. When the chosen pair is full, the others
        are tried before waiting.
        """
        values = values or {}
        if len(self.addresses) == 1:
            return self._pair(0).put(partition, group_ids, sizes, counts, members, values, timeout_s, versions)
        given = None if group_ids is None else check_groups(group_ids, sizes, counts, members)
        count = np.ones(row_count(values), np.int64) if given is None else given[2]
        homes = self._homes(partition, given, count, values)
        ends = np.cumsum(count)
        found: list[np.ndarray] = [np.empty(0, np.int64)] * len(count)
        for home in np.unique(homes).tolist():
            groups = np.flatnonzero(homes == home)
            rows = spans(ends[groups] - count[groups], count[groups])
            part = {
                name: take(column, groups if self.schema.column(name).shared else rows)
                for name, column in values.items()
            }
            some = (None,) * 4 if given is None else (*(a[groups] for a in given[:3]), given[3][rows])
            span = None if versions is None else (versions[0][rows], versions[1][rows])
            whole = given is None or bool((given[1][groups] == given[2][groups]).all())
            handles = self._put_at(home, whole, timeout_s, partial(_put, partition, some, part, span))
            if given is None:
                handles = list(handles[0].reshape(-1, 1))
            for group, handle in zip(groups.tolist(), handles):
                found[group] = handle
        return found if given is not None else [np.concatenate(found)]

    def free(self, rows: np.ndarray) -> None:
        """The rows have served. Their bytes go when the last claim on them ends."""
        for pair, index in self._by_pair(rows):
            pair.free(rows[index])

    def drop(
        self, rows: np.ndarray | None = None, *, group_ids: Sequence[int] | None = None, partition: str = "",
        reason: str,
    ) -> None:  # fmt: skip
        """Takes rows, or whole groups of `partition`, out of every task and counts them under `reason`.

        A group that loses single rows gets smaller: its other members make it whole.
        """
        if rows is not None:
            for pair, index in self._by_pair(rows):
                pair.drop(rows[index], reason=reason)
            return
        if len(self.addresses) == 1:
            self._pair(0).drop(group_ids=group_ids, partition=partition, reason=reason)
            return
        left = list(dict.fromkeys(group_ids or ()))
        owners = [(pair, pair.find(partition, left)) for pair in self.pairs()]
        missing = set(left).difference(*(found for _, found in owners))
        if missing or not left:
            raise DockError(f"groups {sorted(missing)[:4]} are not in partition {partition!r}")
        for pair, found in owners:
            if found:
                pair.drop(group_ids=found, partition=partition, reason=reason)

    def seal(self, partition: str) -> None:
        """No more rows come: tails are served, then every claim ends with an empty grant whose `sealed` is True."""
        for pair in self.pairs():
            pair.seal(partition)

    def close_partition(self, partition: str) -> None:
        """Frees all rows of `partition` (claimed ones when their claims end) and forgets its name."""
        for pair in self.pairs():
            pair.close_partition(partition)

    def add_task(self, name: str, columns: Sequence[str]) -> None:
        """A further task, which sees all rows that are there. Equal columns again change nothing."""
        for pair in self.pairs():
            pair.add_task(name, columns)

    # -- work ------------------------------------------------------------------------------------------------------

    def claim(
        self, task: str, count: int, *, partition: str, worker: str, at_least: int = 1,
        timeout_s: float | None = None, **how: Any,
    ) -> Claim:  # fmt: skip
        """Takes up to `count` ready rows (or whole groups) for `task`, as soon as `at_least` are there.

        `unit`: "rows" or "groups". `policy`: "fifo", "oldest", "by_version", "random" (with `seed`), or with
        unit="groups" also "in_order" (group k of the puts of a pair only after group k-1 was granted); `group_ids`
        grants from these groups only. `columns`: their values come with the grant, in `Claim.values`.

        Rows (with unit="groups": whole groups) whose oldest version is below `min_version`, or that were put more
        than `max_age_s` ago, are dropped as "stale" and reported in `dropped`; a claim that dropped something returns
        at once, with what is ready, even if that is nothing. In a sealed partition the tail may be smaller than
        `at_least`. `team`, `rank`, `ranks`, `split`: consumers that claim together, see `dock/teams.py`.

        Raises DeadlineExceeded, with nothing claimed, after `timeout_s` (default `wait_s`; 0: no wait).
        """
        ask = {"partition": partition, "worker": worker} | how
        if len(self.addresses) == 1 or how.get("team"):
            pair = self._pair(named_home(partition, f"team {how['team']}", self._alive()) if how.get("team") else 0)
            claim = pair.claim(task, count, at_least=at_least, timeout_s=timeout_s, **ask)
        elif at_least == 1 and "group_ids" not in ask:
            claim = self._at_home(lambda pair: pair.claim(task, count, timeout_s=timeout_s, **ask))
        else:
            patience_s = self.wait_s if timeout_s is None else timeout_s
            claim = self._gather(task, count, at_least, patience_s, ask)
        columns = how.get("columns")
        if columns and claim.values is None and len(claim.rows):  # it came from another pair
            claim = replace(claim, values=self.read(claim.rows, columns))
        return claim

    def read(self, rows: np.ndarray, columns: Sequence[str], copy: bool = False) -> dict[str, Any]:
        """The columns of `rows`, in their order: a Ragged, an array [n, ...], or a list (text, bytes, nested).

        On the pair's node ragged values are read-only views into the arena. They are valid until the rows are
        freed; rows that you hold a claim on are not freed before it ends. `copy=True` gives values of your own.
        """
        parts = [(pair.read(rows[index], columns, copy), index) for pair, index in self._by_pair(rows)]
        if not parts:
            raise DockError("a read names rows, at least one")
        return parts[0][0] if len(parts) == 1 else merge_columns(parts, columns)

    def write(
        self, rows: np.ndarray, values: Mapping[str, Any], *, claim_id: int | None = None,
        versions: tuple[np.ndarray, np.ndarray] | None = None, done: bool = False, timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """Writes columns of `rows` at once: of each row either all become ready, after their bytes are in place, or
        none.

        `versions`: (oldest, newest) policy version per row, int32 [n] each. `claim_id` makes the dock refuse a late
        result (ClaimLost); `done=True` also finishes these rows of the claim. A second result for a cell is refused
        unless it is equal. Waits while the arena is full.
        """
        if not len(rows):
            raise DockError("a write names rows, at least one")
        for pair, index in self._by_pair(rows):
            whole = len(index) == len(rows)
            part = values if whole else {name: take(column, index) for name, column in values.items()}
            span = versions if whole or versions is None else (versions[0][index], versions[1][index])
            pair.write(rows[index], part, claim_id=claim_id, versions=span, done=done, timeout_s=timeout_s)

    def done(self, claim_id: int | None = None, *, task: str = "", rows: np.ndarray | None = None) -> None:
        """The task has finished the rows of the claim (only `rows`, if given), or `rows` that claims of `task` hold."""
        if rows is not None:
            for pair, index in self._by_pair(rows):
                pair.done(claim_id, task=task, rows=rows[index])
        elif claim_id is not None:
            self._end(claim_id, lambda pair: pair.done(claim_id))
        else:
            raise DockError("done needs a claim, or a task and rows")

    def release(self, claim_id: int, rows: np.ndarray | None = None) -> None:
        """Gives the rows of the claim (only `rows`, if given) back: they are offered again, before others."""
        if rows is not None:
            for pair, index in self._by_pair(rows):
                pair.release(claim_id, rows[index])
        else:
            self._end(claim_id, lambda pair: pair.release(claim_id))

    def finish(self, task: str, rows: np.ndarray) -> None:
        """Marks rows that nobody holds as done for `task`, without a claim."""
        for pair, index in self._by_pair(rows):
            pair.finish(task, rows[index])

    def forget_worker(self, worker: str) -> int:
        """Offers everything again that a lost worker holds; returns the number of its claims."""
        return sum(pair.forget_worker(worker) for pair in self.pairs())

    def stats(self) -> dict[str, Any]:
        """Rows by state per partition and task, bytes, claims, drops by reason, waiting calls; pairs added up."""
        return describe.add_up([pair.stats() for pair in self.pairs()])

    def describe(self) -> str:
        """`stats` for a person, pair by pair."""
        return "\n".join(describe.as_text(pair.address, pair.stats()) for pair in self.pairs())

    def snapshot(self, folder: str | os.PathLike[str], timeout_s: float = 600.0) -> dict[str, Any]:
        """Writes a consistent cut of the whole dock to the new `folder`; see `dock/snapshot.py`."""
        return snapshot.save(self, folder, timeout_s)

    def restore(self, folder: str | os.PathLike[str], timeout_s: float = 600.0) -> dict[str, Any]:
        """Puts a snapshot back, into any number of pairs that have none of its partitions."""
        return snapshot.load(self, folder, timeout_s)

    # -- lost pairs ------------------------------------------------------------------------------------------------

    def lost_groups(self, pair: int) -> dict[str, np.ndarray]:
        """Group ids by partition that pair number `pair` held when it was last heard of: what must be issued again.

        The next pair in the ring knows them. Raises WorkerLost when that one is gone too.
        """
        neighbour = (pair + 1) % len(self.addresses)
        if neighbour == pair:
            raise DockError("a dock of one pair has nobody who remembers its groups")
        return self._pair(neighbour).groups_of(pair)

    def forget_pair(self, pair: int) -> None:
        """Nobody waits for pair number `pair` any more: streams end without its rows, puts go elsewhere."""
        with self._lock:
            gone = self._pairs.pop(pair, None)
            self._gone.add(pair)
        if gone is not None:
            gone.close()
        for other in self.pairs():
            other.forget_pair(pair)

    # -- claims over several pairs ---------------------------------------------------------------------------------

    def _at_home(self, claim: Callable[[PairClient], Claim]) -> Claim:
        """Asks the home pair, or the next one when it is lost: a claim that got no answer holds nothing for long."""
        for _ in range(len(self.addresses)):
            try:
                return claim(self._pair(self._home))
            except WorkerLost as lost:
                last = lost
                alive = [n for n in self._alive() if n != self._home]
                if not alive:
                    raise
                self._home = min(alive, key=lambda n: (n - self._home) % len(self.addresses))
        raise last

    def _gather(self, task: str, count: int, at_least: int, patience_s: float, ask: dict[str, Any]) -> Claim:
        """Grants of several pairs under one claim id, until `at_least` units are there; else all are given back."""
        deadline = time.monotonic() + patience_s
        claim_id = SPREAD_CLAIM | secrets.randbits(61)
        parts: list[Claim] = []
        wanted = ask.get("group_ids")
        have = 0
        try:
            while True:
                left = max(0.0, deadline - time.monotonic())
                more = ask | {"task": task, "count": count - have, "timeout_s": left, "claim_id": claim_id}
                got = self._at_home(partial(_claim, more))
                parts.append(got)
                have = sum(unit_count(part, ask.get("unit", "rows")) for part in parts)
                if have >= at_least or got.sealed or got.dropped:
                    return join_claims(parts, claim_id if have else 0, wanted)
                if wanted is not None:
                    taken = set(got.group_ids.tolist())
                    ask["group_ids"] = [g for g in ask["group_ids"] if g not in taken]
        except DeadlineExceeded as late:
            if have:
                self.release(claim_id)
            raise DeadlineExceeded(f"{late}; {have} of at least {at_least} were there and are given back") from None
        except BaseException:
            if have:
                self.release(claim_id)
            raise

    def _end(self, claim_id: int, end: Callable[[PairClient], None]) -> None:
        """Ends a claim at every pair that knows it."""
        if not claim_id & SPREAD_CLAIM:
            end(self._pair(claim_id >> 48))
            return
        lost: ClaimLost | None = None
        known = 0
        for pair in self.pairs():
            try:
                end(pair)
                known += 1
            except ClaimUnknown as error:  # it never had rows of this claim
                lost = lost if known or lost is not None else error
            except ClaimLost as error:
                lost, known = error, 0
        if lost is not None and not (known and isinstance(lost, ClaimUnknown)):
            raise lost


def _put(
    partition: str, groups: tuple[Any, Any, Any, Any], values: Mapping[str, Any],
    versions: tuple[np.ndarray, np.ndarray] | None, pair: PairClient, timeout_s: float | None,
) -> list[np.ndarray]:  # fmt: skip
    return pair.put(partition, *groups, values, timeout_s, versions)


def _claim(ask: Mapping[str, Any], pair: PairClient) -> Claim:
    return pair.claim(**ask)
