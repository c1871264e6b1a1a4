"""How every process of a run talks to the dock: one client over all controller/warehouse pairs.

On a pair's own node the client maps the arena: values are copied in once by the writer and read as views. Rows of
other nodes travel in frames. A consumer asks its own pair, which serves it from the others when it has nothing.

    put_groups -> claim -> read -> write -> done -> free          release, drop, seal, forget_worker, stats, describe
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock import arguments, describe, snapshot
from mindspeed_asyncflow.dock.columns import Ragged
from mindspeed_asyncflow.dock.completed import answer_columns
from mindspeed_asyncflow.dock.fleet import anew
from mindspeed_asyncflow.dock.gather import check_groups, check_lengths, cuttable, merge_columns, row_count, take
from mindspeed_asyncflow.dock.pair import Claim, PairClient
from mindspeed_asyncflow.dock.spread import SpreadClaims
from mindspeed_asyncflow.dock.table import spans
from mindspeed_asyncflow.errors import AsyncFlowError, DockError
from mindspeed_asyncflow.records import PromptRow

__all__ = ["Claim", "DockClient"]


class DockClient(SpreadClaims):
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

        The columns `prompt_ids`, `truth` and `fields` are stored once per group, from its first row. Rows that have an
        answer come with its columns, and replicas are not asked for one (`grpo_tasks(service=True)`). Waits while the
        arena is full. Further members of a group may be put later, while the group has any rows.
        """
        found: dict[int, np.ndarray] = {}
        for outside in (False, True):
            chosen = [(i, g) for i, g in enumerate(groups) if (g[0].answer is not None) == outside]
            if chosen:
                handles = self._put_rows(partition, [g for _, g in chosen], outside, timeout_s)
                found |= zip((i for i, _ in chosen), handles)
        return [found[i] for i in range(len(groups))]

    def _put_rows(
        self, partition: str, groups: Sequence[Sequence[PromptRow]], answered: bool, timeout_s: float | None
    ) -> list[np.ndarray]:
        firsts = [group[0] for group in groups]
        values: dict[str, Any] = {
            "prompt_ids": Ragged.from_rows([row.prompt_ids for row in firsts], "int32"),
            "truth": Ragged.from_text(row.truth for row in firsts),
            "fields": Ragged.from_text(row.fields for row in firsts),
        }
        versions = None
        if answered:
            answers = [row.answer for group in groups for row in group if row.answer is not None]
            values |= answer_columns(answers)
            oldest, newest = ([getattr(a, name) for a in answers] for name in ("version_min", "version_max"))
            versions = np.array(oldest, np.int32), np.array(newest, np.int32)
        elif "rollout" in self.schema.tasks and "asked" in self.schema.tasks["rollout"].columns:
            values["asked"] = np.ones(len(groups), np.uint8)
        counts = [len(group) for group in groups]
        members = [row.member for group in groups for row in group]
        ids, sizes = [row.group_id for row in firsts], [row.group_size for row in firsts]
        return self.put(partition, ids, sizes, counts, members, values, timeout_s, versions)

    @anew
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
        are tried before waiting. A put over several pairs is one commit per pair: when a pair refuses its part, the
        rows that others took are freed again, also those that a consumer has had meanwhile.
        """
        values = values or {}
        if len(self.addresses) == 1:
            return self._pair(0).put(partition, group_ids, sizes, counts, members, values, timeout_s, versions)
        values = cuttable(self.schema, values)
        given = None if group_ids is None else check_groups(group_ids, sizes, counts, members)
        count = np.ones(row_count(values), np.int64) if given is None else given[2]
        if not len(count):
            raise DockError("a put brings at least one row")
        check_lengths(self.schema, values, int(count.sum()), len(count))
        versions = None if versions is None else arguments.versions(versions, int(count.sum()))
        deadline = time.monotonic() + (self.wait_s if timeout_s is None else arguments.seconds("timeout_s", timeout_s))
        homes = self._homes(partition, given, count, values)
        found: list[np.ndarray] = [np.empty(0, np.int64)] * len(count)
        try:
            for home in np.unique(homes).tolist():
                self._put_part(partition, (given, count, values, versions), np.flatnonzero(homes == home), home,
                               deadline, found)  # fmt: skip
        except AsyncFlowError:
            with contextlib.suppress(AsyncFlowError):
                self.free(np.concatenate(found))
            raise
        return found if given is not None else [np.concatenate(found)]

    def _put_part(
        self, partition: str, what: tuple[Any, np.ndarray, dict[str, Any], Any], groups: np.ndarray, home: int,
        deadline: float, found: list[np.ndarray],
    ) -> None:  # fmt: skip
        """Puts some of the groups of a put at their home; their handles go into `found`."""
        given, count, values, versions = what
        ends = np.cumsum(count)
        rows = spans(ends[groups] - count[groups], count[groups])
        part = {n: take(column, groups if self.schema.column(n).shared else rows) for n, column in values.items()}
        some = (None,) * 4 if given is None else (*(a[groups] for a in given[:3]), given[3][rows])
        span = None if versions is None else (np.asarray(versions[0])[rows], np.asarray(versions[1])[rows])
        whole = given is None or bool((given[1][groups] == given[2][groups]).all())
        handles = self._put_at(home, whole, deadline, partial(_put, partition, some, part, span))
        if given is None:
            handles = list(handles[0].reshape(-1, 1))
        for group, handle in zip(groups.tolist(), handles):
            found[group] = handle

    @anew
    def free(self, rows: np.ndarray) -> None:
        """The rows have served. Their bytes go when the last claim on them ends."""
        for pair, index in self._by_pair(rows):
            pair.free(np.asarray(rows)[index])

    @anew
    def drop(
        self, rows: np.ndarray | None = None, *, group_ids: Sequence[int] | None = None, partition: str = "",
        reason: str,
    ) -> None:  # fmt: skip
        """Takes rows, or whole groups of `partition`, out of every task and counts them under `reason`.

        A group that loses single rows gets smaller: its other members make it whole.
        """
        if rows is not None:
            for pair, index in self._by_pair(rows):
                pair.drop(np.asarray(rows)[index], reason=reason)
            return
        if len(self.addresses) == 1:
            self._pair(0).drop(group_ids=group_ids, partition=partition, reason=reason)
            return
        left = list(dict.fromkeys(np.asarray(() if group_ids is None else group_ids, np.int64).tolist()))
        owners = [(pair, pair.find(partition, left)) for pair in self.pairs()]
        missing = set(left).difference(*(found for _, found in owners))
        if missing or not left:
            raise DockError(f"groups {sorted(missing)[:4]} are not in partition {partition!r}")
        for pair, found in owners:
            if found:
                pair.drop(group_ids=found, partition=partition, reason=reason)

    @anew
    def seal(self, partition: str) -> None:
        """No more rows come: tails are served, then every claim ends with an empty grant whose `sealed` is True."""
        self._everywhere(lambda pair: pair.seal(partition))

    @anew
    def close_partition(self, partition: str) -> None:
        """Frees all rows of `partition` (claimed ones when their claims end) and forgets its name."""
        closed, failed = self._ask_all(lambda pair: pair.close_partition(partition))
        failed = [error for error in failed if not (closed and isinstance(error, DockError))]  # it had no row of it
        if failed:
            raise failed[0]

    @anew
    def add_task(self, name: str, columns: Sequence[str]) -> None:
        """A further task, which sees all rows that are there. Equal columns again change nothing."""
        self._everywhere(lambda pair: pair.add_task(name, columns))

    # -- work ------------------------------------------------------------------------------------------------------

    @anew
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

        The rows of a claim come from one pair, so there may be fewer than all pairs have together. Only `at_least`
        above 1, or `group_ids`, gather rows of several: consumers that gather at the same time may each hold a part
        of what the other needs, until one gives up.

        Raises DeadlineExceeded, with nothing claimed, after `timeout_s` (default `wait_s`; 0: no wait).
        """
        ask = {"partition": partition, "worker": worker} | how
        patience_s = self.wait_s if timeout_s is None else timeout_s
        if len(self.addresses) == 1:
            claim = self._pair(0).claim(task, count, at_least=at_least, timeout_s=patience_s, **ask)
        elif how.get("team"):
            ask |= {"task": task, "count": count, "at_least": at_least, "timeout_s": patience_s}
            claim = self._for_team(ask, partition, how["team"])
        elif at_least == 1 and ask.get("group_ids") is None:
            claim = self._some(ask | {"task": task, "count": count}, patience_s)
        else:
            claim = self._gather(task, count, at_least, patience_s, ask)
        columns = how.get("columns")
        if columns and claim.values is None and len(claim.rows):  # it came from another pair
            claim = replace(claim, values=self.read(claim.rows, columns))
        return claim

    @anew
    def read(self, rows: np.ndarray, columns: Sequence[str], copy: bool = False) -> dict[str, Any]:
        """The columns of `rows`, in their order: a Ragged, an array [n, ...], or a list (text, bytes, nested).

        On the pair's node ragged values are read-only views into the arena. They are valid until the rows are
        freed; rows that you hold a claim on are not freed before it ends. `copy=True` gives values of your own.
        """
        parts = [(pair.read(np.asarray(rows)[index], columns, copy), index) for pair, index in self._by_pair(rows)]
        if not parts:
            raise DockError("a read names rows, at least one")
        return parts[0][0] if len(parts) == 1 else merge_columns(parts, columns)

    @anew
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
        values = cuttable(self.schema, values)
        check_lengths(self.schema, values, len(rows), len(rows))
        for pair, index in self._by_pair(rows):
            whole = len(index) == len(rows)
            part = values if whole else {name: take(column, index) for name, column in values.items()}
            span = (
                versions
                if whole or versions is None
                else (np.asarray(versions[0])[index], np.asarray(versions[1])[index])
            )
            pair.write(np.asarray(rows)[index], part, claim_id=claim_id, versions=span, done=done, timeout_s=timeout_s)

    @anew
    def done(self, claim_id: int | None = None, *, task: str = "", rows: np.ndarray | None = None) -> None:
        """The task has finished the rows of the claim (only `rows`, if given), or `rows` that claims of `task` hold."""
        if rows is not None:
            for pair, index in self._by_pair(rows):
                pair.done(claim_id, task=task, rows=np.asarray(rows)[index])
        elif claim_id is not None:
            self._at_holders(claim_id, lambda pair: pair.done(claim_id))
        else:
            raise DockError("done needs a claim, or a task and rows")

    @anew
    def release(self, claim_id: int, rows: np.ndarray | None = None) -> None:
        """Gives the rows of the claim (only `rows`, if given) back: they are offered again, before others."""
        if rows is not None:
            for pair, index in self._by_pair(rows):
                pair.release(claim_id, np.asarray(rows)[index])
        else:
            self._at_holders(claim_id, lambda pair: pair.release(claim_id))

    @anew
    def renew(self, claim_id: int) -> None:
        """The lease of the claim begins again, as with every call that names it. Raises ClaimLost when it has ended."""
        self._at_holders(claim_id, lambda pair: pair.renew(claim_id))

    @anew
    def finish(self, task: str, rows: np.ndarray) -> None:
        """Marks rows that nobody holds as done for `task`, without a claim."""
        for pair, index in self._by_pair(rows):
            pair.finish(task, np.asarray(rows)[index])

    @anew
    def forget_worker(self, worker: str) -> int:
        """Offers everything again that a lost worker holds; returns the number of its claims."""
        return sum(self._everywhere(lambda pair: pair.forget_worker(worker)))

    def stats(self) -> dict[str, Any]:
        """Rows by state per partition and task, bytes, claims, drops by reason, waiting calls; pairs added up.

        Without those that do not answer: their errors are in `lost`.
        """
        found, failed = self._ask_all(lambda pair: pair.stats())
        if not found:
            raise failed[0]
        return describe.add_up(found) | {"pairs": len(self.addresses), "lost": [str(error) for error in failed]}

    def describe(self) -> str:
        """`stats` for a person, pair by pair."""
        found, failed = self._ask_all(lambda pair: describe.as_text(pair.address, pair.stats()))
        return "\n".join([*found, *map(str, failed)])

    def snapshot(
        self, folder: str | os.PathLike[str], timeout_s: float = 600.0, only: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Writes a consistent cut of the whole dock, or `only` of some partitions, to the new `folder`; see
        `dock/snapshot.py`."""
        return snapshot.save(self, folder, timeout_s, only)

    def restore(self, folder: str | os.PathLike[str], timeout_s: float = 600.0) -> dict[str, Any]:
        """Puts a snapshot back, into any number of pairs that have none of its partitions."""
        return snapshot.load(self, folder, timeout_s)

    @anew
    def missing(self, partition: str, group_ids: Sequence[int]) -> list[int]:
        """Those of the groups that no pair has."""
        left = list(group_ids)
        for pair in self.pairs():
            found = set(pair.find(partition, left))
            left = [group for group in left if group not in found]
        return left

    # -- lost pairs ------------------------------------------------------------------------------------------------

    def lost_groups(self, pair: int) -> dict[str, np.ndarray]:
        """Group ids by partition that pair number `pair` held when it was last heard of: what must be issued again.

        The next pair in the ring knows them. Raises WorkerLost when that one is gone too.
        """
        ring = [(pair + n) % len(self.addresses) for n in range(1, len(self.addresses))]
        for neighbour in [number for number in ring if number not in self._gone]:
            return self._pair(neighbour).groups_of(pair)
        raise DockError("a dock of one pair has nobody who remembers its groups")

    def forget_pair(self, pair: int) -> None:
        """Nobody waits for pair number `pair` any more: streams end without its rows, puts go elsewhere."""
        if not 0 <= pair < len(self.addresses):
            raise DockError(f"this dock has no pair {pair}")
        self._drop_pair(pair)
        self._everywhere(lambda other: other.forget_pair(pair))


def _put(
    partition: str, groups: tuple[Any, Any, Any, Any], values: Mapping[str, Any],
    versions: tuple[np.ndarray, np.ndarray] | None, pair: PairClient, timeout_s: float | None,
) -> list[np.ndarray]:  # fmt: skip
    return pair.put(partition, *groups, values, timeout_s, versions)
