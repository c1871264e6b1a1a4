"""A pair that starts again after a crash is the pair that it was, without its claims."""

import contextlib
import errno
import itertools
import os
import random
import shutil

import numpy as np
import pytest

from mindspeed_asyncflow.dock import journal as journal_module
from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.arena import Arena
from mindspeed_asyncflow.dock.columns import ColumnSpec, Schema, TaskSpec
from mindspeed_asyncflow.dock.leases import SPREAD_CLAIM
from mindspeed_asyncflow.dock.link import Link
from mindspeed_asyncflow.dock.member import Member
from mindspeed_asyncflow.dock.memory import journal_path
from mindspeed_asyncflow.dock.node import Answer
from mindspeed_asyncflow.dock.queue import CLAIMED, READY
from mindspeed_asyncflow.dock.table import pair_numbers
from mindspeed_asyncflow.dock.wire import Verb
from mindspeed_asyncflow.errors import (
    AsyncFlowError,
    ClaimLost,
    ClaimUnknown,
    DeadlineExceeded,
    DockError,
    DockFull,
    StaleHandle,
)

COLUMNS = [
    ColumnSpec("prompt", "int32", "ragged", shared=True, tokens=True),
    ColumnSpec("x", "int16", "ragged", tokens=True),
    ColumnSpec("y", "float32"),
    ColumnSpec("note", "uint8", "ragged", renewable=True),
]
TASKS = [TaskSpec("make", ("prompt",)), TaskSpec("learn", ("prompt", "x", "y"))]
LEASE_S = 50.0
CLAIM = {
    "count": 4, "unit": "rows", "policy": "fifo", "group_ids": None, "min_version": None, "timeout_s": 0.0,
    "at_least": 1, "columns": [], "copy": False, "max_age_s": None, "seed": 0, "team": "", "rank": 0, "ranks": 1,
    "split": "same", "claim_id": 0, "worker": "w", "task": "make",
}  # fmt: skip
EMPTY = np.empty(0, np.int64)


class _NoSockets:
    def watch_link(self, link: Link, writing: bool) -> None:
        raise AssertionError("no link is opened here")

    unwatch_link = watch_link


class Pair:
    """One pair without sockets, on a clock of its own, whose process can be killed."""

    def __init__(self, path: str, **how) -> None:
        self.path, self.now = path, 100.0
        self._requests = itertools.count(1)
        self.sent: dict[int, tuple[Verb, bytes]] = {}  # answers by request
        arena = Arena.reopen(path) if how.get("restart") else Arena.create(path, how.pop("nbytes", 1 << 20))
        how = {"pair": 0, "restart": False, "columns": COLUMNS} | how
        self.member = Member(
            Schema(how["columns"], TASKS), arena, LEASE_S, how["pair"], 0, b"", _NoSockets(), self.now, how["restart"]
        )

    def killed(self) -> "Pair":
        """Another process goes on from what is in memory at this moment; this one lives on beside it."""
        copy = f"{self.path}+"
        shutil.copy(self.path, copy)
        shutil.copy(journal_path(self.path), journal_path(copy))
        again = Pair.__new__(Pair)
        again.now = self.now
        Pair.__init__(again, copy, restart=True)
        return again

    def call(self, verb: Verb, message: dict, request: int | None = None, connection: object = "a"):
        """The answer as a client reads it; raises what a client would raise."""
        request = next(self._requests) if request is None else request
        raw = wire.frame(verb, 0, 7, request, message)
        body = wire.decode_body(wire.decode_header(raw, 1 << 30), memoryview(raw)[wire.HEADER.size :])
        outcome = self.member.handle(verb, body, connection, (connection, request), 7, request, self.now)
        if outcome is None:
            return None
        if isinstance(outcome, AsyncFlowError):
            raise outcome
        if isinstance(outcome, Answer):
            return outcome
        self.sent[request] = (verb, outcome)
        return wire.decode_body(wire.decode_header(outcome, 1 << 30), memoryview(outcome)[wire.HEADER.size :])

    def put(self, partition="p", ids=(1,), sizes=None, counts=None, x=None, versions=None, **how) -> np.ndarray:
        counts = np.array(counts if counts is not None else [2] * len(ids), np.int64)
        sizes = counts if sizes is None else np.array(sizes, np.int64)
        rows = int(counts.sum())
        prompts = [np.arange(3 + abs(i) % 5, dtype=np.int32) + i for i in ids]
        columns, parts = ["prompt"], [np.concatenate(prompts).tobytes()]
        lengths = [len(p) for p in prompts]
        if x is not None:
            columns.append("x")
            parts.append(b"".join(row.tobytes() for row in x))
            lengths += [len(row) for row in x]
        message = {
            "partition": partition, "columns": columns, "timeout_s": 0.0, "lengths": np.array(lengths, np.int64),
            "reservation": 0, "data": np.frombuffer(b"".join(parts), np.uint8),
        }  # fmt: skip
        if how.get("anonymous"):
            message["count"] = rows
        else:
            members = np.arange(rows, dtype=np.int32)
            message |= {"group_ids": np.array(ids, np.int64), "sizes": sizes, "counts": counts, "members": members}
        if versions is not None:
            message |= {n: np.full(rows, v, np.int32) for n, v in zip(("version_min", "version_max"), versions)}
        return self.call(Verb.PUT, message, how.get("request")).ints("rows")

    def write(self, rows, seed=0, columns=("x", "y"), claim_id=None, done=False, version=None, most=9) -> None:
        rng = np.random.default_rng([seed, *rows.tolist()])
        values: list[bytes] = []
        lengths: list[int] = []
        for name in columns:
            if name in ("x", "note"):
                sizes = rng.integers(most // 2 if name == "x" else 0, most, len(rows)).tolist()
                values.append(rng.integers(0, 99, sum(sizes)).astype(np.int16 if name == "x" else np.uint8).tobytes())
                lengths += sizes
            else:
                values.append(rng.random(len(rows)).astype(np.float32).tobytes())
        message = {
            "rows": rows, "claim_id": claim_id, "done": done, "columns": list(columns), "timeout_s": 0.0,
            "lengths": np.array(lengths, np.int64), "reservation": 0,
            "data": np.frombuffer(b"".join(values), np.uint8),
        }  # fmt: skip
        if version is not None:
            message |= {n: np.full(len(rows), version, np.int32) for n in ("version_min", "version_max")}
        self.call(Verb.WRITE, message)

    def claim(self, task="make", partition="p", **how) -> tuple[int, np.ndarray]:
        reply = self.call(Verb.CLAIM, CLAIM | {"task": task, "partition": partition} | how)
        return (0, EMPTY) if reply is None else (reply["claim_id"], reply.matrix("grant", 6)[0])

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.member.tick(self.now)

    def end_all_claims(self) -> None:
        control = self.member.node.controller
        for request in list(control.waiting):
            self.member.cancel(request.key)
        for claim_id in list(control.leases.open):
            control.release(claim_id, None, None, self.now)
        self.member.node.settle(self.now)
        self.member.settle(self.now)

    def close(self) -> None:
        self.member.close()
        self.member.node.warehouse.arena.unlink()


@pytest.fixture
def start(tmp_path):
    made = []

    def make(**how) -> Pair:
        made.append(Pair(str(tmp_path / f"arena{len(made)}"), **how))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def picture(pair: Pair) -> dict:
    """Everything that outlives a process, in plain values."""
    node = pair.member.node
    control, house = node.controller, node.warehouse
    used, free = control.partition_numbers()
    seen: dict = {
        "numbers": used, "free numbers": sorted(map(tuple, free)), "drops": dict(+control.drops),
        "free bytes": house.free_bytes, "payload": house.payload_bytes,
        "tasks": {t.name: sorted(t.columns) for t in control.schema.tasks.values()},
    }  # fmt: skip
    for name, part in control.partitions.items():
        rows = part.rows
        slots = np.flatnonzero(rows.alive)
        slots = slots[np.argsort(rows.seq[slots])]
        handles = part.handles(slots).tolist()
        groups = part.groups.live()
        seen[name] = {
            "number": part.number,
            "first": rows.first,
            "sealed": part.sealed,
            "closing": part.closing,
            "generations": rows.generation[:200].tolist() + [rows.first] * (200 - len(rows.generation[:200])),
            "rows": handles,
            "group": part.groups.id[rows.group[slots]].tolist(),
            "born": rows.born[slots].tolist(),
            "doomed": rows.doomed[slots].tolist(),
            "groups": sorted(
                zip(
                    part.groups.id[groups].tolist(),
                    part.groups.size[groups].tolist(),
                    part.groups.alive[groups].tolist(),
                )
            ),
        } | {n: getattr(rows, n)[slots].tolist() for n in ("member", "ready", "version_min", "version_max", "tokens")}
        for task, queue in part.queues.items():
            states = queue.states(slots)
            seen[name][f"task {task}"] = dict(zip(handles, np.where(states == CLAIMED, READY, states).tolist()))
        for cell in house.parts.values():
            have = slots[(rows.ready[slots] & int(control.schema.bit[cell.column])) != 0]
            if len(have):
                index = rows.group[have] if cell.shared else have
                cells = house.read(part.number, cell.name, index)
                seen[name][f"cells {cell.name}"] = [row.tobytes() for row in cells]
    return seen  # fmt: skip


def agree(live: Pair, again: Pair) -> None:
    live.end_all_claims()
    expected, found = picture(live), picture(again)
    assert found.keys() == expected.keys()
    for key in expected:
        assert found[key] == expected[key], key


# -- one rule at a time ------------------------------------------------------------------------------------------------


def test_rows_with_all_that_is_known_of_them_come_back(start):
    pair = start()
    rows = pair.put(ids=[5, 6, 7], counts=[2, 3, 1], sizes=[2, 3, 4])
    pair.write(rows[:2], version=3)
    claim_id, held = pair.claim(count=3)
    pair.write(held[2:], claim_id=claim_id, done=True, version=4)
    pair.call(Verb.DROP, {"rows": rows[4:5], "reason": "bad", "partition": ""})
    pair.put(ids=[7], counts=[2], sizes=[4], x=[np.arange(3, dtype=np.int16)] * 2)  # late members
    pair.call(Verb.SEAL, {"partition": "p"})
    pair.call(Verb.TASK, {"name": "late", "columns": ["x"]})
    again = pair.killed()
    agree(pair, again)
    assert picture(again)["p"]["sealed"] and picture(again)["drops"] == {"bad": 1}
    agree(again, again.killed())


def test_ready_rows_are_offered_in_the_order_in_which_they_came_also_after_two_restarts(start):
    pair = start()
    rows = pair.put(ids=range(10, 30), counts=[1] * 20)
    pair.write(rows[10:])
    pair.write(rows[:10][::-1])
    _, first = pair.claim("learn", count=3)
    order = [*rows[10:].tolist(), *rows[:10][::-1].tolist()]
    assert first.tolist() == order[:3]
    again = pair.killed().killed()
    assert again.claim("learn", count=20)[1].tolist() == order
    groups = pair.killed().killed().claim("make", count=20, unit="groups")[1]
    assert groups.tolist() == rows.tolist()


def test_a_call_repeated_after_the_restart_is_answered_and_not_carried_out_twice(start):
    pair = start()
    pair.put(ids=[1], request=41)
    pair.put(ids=[2, 3], counts=[1, 1], anonymous=True, request=42)
    again = pair.killed().killed()
    for request in (41, 42):
        assert again.member.answers.get((7, request)) == pair.sent[request][1]
    assert again.member.answers.get((7, 43)) is None
    rows = again.put(ids=[4, 5], counts=[1, 1], anonymous=True)
    part, _ = again.member.node.controller.resolve(rows)
    assert len(set(part.groups.id[part.groups.live()].tolist())) == 5  # ids of an earlier start are not used again


def test_a_call_whose_entry_was_cut_short_has_not_happened(start):
    pair = start()
    pair.put(ids=[1])
    before = pair.member.journal.size
    expected = picture(pair)
    pair.put(ids=[2], request=9)
    end = pair.member.journal.size
    for cut in range(before, end, 7):
        copy = f"{pair.path}-{cut}"
        shutil.copy(pair.path, copy)
        with open(journal_path(pair.path), "rb") as file, open(journal_path(copy), "wb") as torn:
            torn.write(file.read()[:cut])
        again = Pair(copy, restart=True)
        assert picture(again) == expected
        assert again.member.answers.get((7, 9)) is None
        again.put(ids=[2], request=9)
        again.close()


def test_claims_of_an_earlier_start_are_lost_and_their_rows_are_offered_again(start):
    pair = start()
    rows = pair.put(ids=[1, 2])
    claim_id, held = pair.claim(count=4)
    again = pair.killed()
    for verb in (Verb.DONE, Verb.RELEASE):
        with pytest.raises(ClaimLost):
            again.call(verb, {"claim_id": claim_id, "rows": None, "task": ""})
    with pytest.raises(ClaimLost):
        again.write(held, claim_id=claim_id)
    fresh, offered = again.claim(count=4)
    assert offered.tolist() == rows.tolist() and fresh != claim_id
    with pytest.raises(ClaimLost):
        again.call(Verb.DONE, {"claim_id": claim_id, "rows": None, "task": ""})


def test_a_claim_over_several_pairs_is_lost_where_it_held_rows_and_unknown_elsewhere(start):
    pair, spread = start(), SPREAD_CLAIM | 12345
    rows = pair.put(ids=[1, 2, 3])
    pair.claim(count=2, claim_id=spread)
    pair.claim(count=2, claim_id=spread + 1)
    pair.call(Verb.DONE, {"claim_id": spread + 1, "rows": None, "task": ""})
    again = pair.killed().killed()
    with pytest.raises(ClaimLost) as lost:
        again.call(Verb.DONE, {"claim_id": spread, "rows": None, "task": ""})
    assert not isinstance(lost.value, ClaimUnknown) and "started again" in str(lost.value)
    for other in (spread + 1, spread + 2):
        with pytest.raises(ClaimUnknown):
            again.call(Verb.DONE, {"claim_id": other, "rows": None, "task": ""})
    assert len(rows) == 6


def test_handles_of_freed_rows_stay_stale_also_when_their_partition_number_is_used_again(start):
    pair = start()
    old = pair.put(ids=[1, 2])
    pair.call(Verb.FREE, {"rows": old[:1]})
    gone = pair.put("q", ids=[1, 2, 3])
    pair.call(Verb.CLOSE, {"partition": "q"})
    for again in (pair.killed(), pair.killed().killed()):
        again.put("r", ids=[7])
        again.put("s", ids=[7])
        more = again.put("s", ids=range(8, 30))
        assert not set(more.tolist()) & set(gone.tolist())
        for handle in (old[:1], gone[:1], gone[4:]):
            with pytest.raises(StaleHandle):
                again.call(Verb.READ, {"rows": handle, "columns": ["prompt"], "copy": False})


def test_partitions_that_were_opened_without_a_row_keep_their_numbers(start):
    pair = start()
    with pytest.raises(DockError):
        pair.call(Verb.DROP, {"partition": "a", "group_ids": np.array([1]), "reason": "r"})
    pair.call(Verb.SEAL, {"partition": "b"})
    pair.put("a", ids=[1])
    agree(pair, pair.killed())


def test_rows_that_were_freed_while_claimed_go_at_the_restart_with_all_that_was_written_into_them(start):
    pair = start()
    rows = pair.put(ids=[1], counts=[2], sizes=[4])
    claim_id, held = pair.claim(count=2)
    pair.call(Verb.FREE, {"rows": rows})
    pair.write(held, claim_id=claim_id)
    pair.put(ids=[1], counts=[1], sizes=[4])  # a late member: the group is still there
    pair.put("q", ids=[9])
    claim_q, held_q = pair.claim(partition="q")
    pair.call(Verb.CLOSE, {"partition": "q"})
    pair.write(held_q, claim_id=claim_q)
    for again in (pair.killed(), pair.killed().killed()):
        assert len(again.claim(count=9)[1]) == 1
        again.end_all_claims()
        assert "q" not in again.member.node.controller.partitions
        last = again
    agree(pair, last)


def test_effects_that_follow_from_a_call_come_after_it(start):
    pair = start()
    parked = CLAIM | {"partition": "p", "min_version": 5, "timeout_s": 30.0}
    assert pair.call(Verb.CLAIM, parked, request=77) is None
    rows = pair.put(ids=[1], versions=(3, 3))  # too old for the one that waits
    assert dict(pair.member.node.controller.drops) == {"stale": 2}
    assert pair.member.take_outcomes()
    with pytest.raises(StaleHandle):
        pair.call(Verb.READ, {"rows": rows, "columns": ["prompt"], "copy": False})
    agree(pair, pair.killed())


def test_what_a_claim_dropped_is_told_again_to_a_caller_that_asks_again_after_the_restart(start):
    pair = start()
    pair.put(ids=[1], versions=(1, 1))
    pair.put(ids=[2], versions=(6, 6))
    pair.call(Verb.CLAIM, CLAIM | {"partition": "p", "min_version": 5}, request=50)
    pair.call(Verb.CLAIM, CLAIM | {"partition": "p"}, request=51) if pair.put(ids=[3]) is not None else None
    again = pair.killed()
    assert again.member.answers.get((7, 50)) == pair.sent[50][1]
    assert again.member.answers.get((7, 51)) is None  # nothing is lost: the claim is made anew


def test_bytes_reserved_at_the_crash_are_handed_out_after_the_lease_and_only_once(start):
    pair = start()
    free = pair.member.node.warehouse.free_bytes
    reserve = {
        "columns": ["prompt"], "timeout_s": 0.0, "lengths": np.array([9000], np.int64), "put": True, "rows": 1,
        "groups": 1,
    }  # fmt: skip
    reply = pair.call(Verb.RESERVE, reserve)
    begin = reply.ints("pieces").reshape(-1, 4)[0, 3]
    again = pair.killed().killed()
    house = again.member.node.warehouse
    assert house.free_bytes < free - 36_000 + 64
    while house.free_bytes > 30_000:
        rows = again.put("fill", ids=[again.member.journal.size], counts=[1], x=[np.zeros(9_000, np.int16)])
        part, slots = again.member.node.controller.resolve(rows)
        offsets, lengths = house.locate(part.number, "x", slots)
        assert not (offsets[0] < begin + 36_000 and begin < offsets[0] + 2 * lengths[0])
        if house.used_bytes > 0.7 * house.capacity_bytes:
            break
    again.later(LEASE_S + 1)
    rows = again.put("late", ids=range(1, 101), counts=[1] * 100)
    part, slots = again.member.node.controller.resolve(rows)
    taken = []
    with pytest.raises(DeadlineExceeded):  # the bytes get rows now: another restart must not give them away
        for i in range(100):
            again.write(rows[i : i + 1], columns=("x",), most=9_000)
            taken.append(int(house.locate(part.number, "x", slots[i : i + 1])[0][0]))
    assert any(begin - 18_000 < offset < begin + 36_000 for offset in taken)
    third = again.killed()
    third.later(LEASE_S + 1)
    agree(again, third)


def test_the_number_in_the_dock_and_forgotten_pairs_survive(start):
    pair = start()
    addresses = ["127.0.0.2:1", "127.0.0.3:1", "127.0.0.4:1"]
    pair.call(Verb.JOIN, {"index": 2, "addresses": addresses})
    pair.call(Verb.FORGET_PAIR, {"pair": 0})
    rows = pair.put(ids=[1])
    again = pair.killed().killed()
    assert again.member.peers.index == 2 and again.member.peers.addresses == addresses
    assert list(again.member.peers.links) == [1] and again.member.peers.forgotten == [0]
    assert pair_numbers(again.put(ids=[2])).tolist() == pair_numbers(rows).tolist() == [2, 2]
    with pytest.raises(ClaimLost, match="ended"):
        again.call(Verb.DONE, {"claim_id": (2 << 48) + 1, "rows": None, "task": ""})


def test_other_columns_than_those_of_the_journal_are_refused(start):
    pair = start()
    pair.put(ids=[1])
    with pytest.raises(DockError, match="other columns"):
        Pair(pair.path, restart=True, columns=[*COLUMNS[:2], COLUMNS[3], ColumnSpec("y", "float64")])


def test_full_memory_refuses_a_call_before_anything_is_changed(start, monkeypatch):
    pair = start(nbytes=8 << 20)
    pair.put(ids=[1])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = picture(pair)
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "posix_fallocate", full)
        with pytest.raises(DockFull, match="shared memory is full"):
            pair.put(ids=range(2, 20_002), counts=[1] * 20_000)
        assert picture(pair) == before
        pair.member.journal._limit = 0
        patch.setattr(journal_module.os, "rename", full)
        pair.later(1.0)  # the fresh description finds no memory either: the pair goes on with the old one
        pair.put(ids=[2])
    agree(pair, pair.killed())


# -- all verbs, in any order -------------------------------------------------------------------------------------------


class Schedule:
    """Random calls, most of them sensible."""

    def __init__(self, pair: Pair, rng: random.Random) -> None:
        self.pair, self.rng = pair, rng
        self.claims: list[tuple[int, np.ndarray]] = []
        self.rows: list[int] = []
        self.stale: list[int] = []
        self.next_id = 1

    def step(self) -> None:
        verbs = [self.put] * 5 + [self.late] * 2 + [self.write] * 4 + [self.claim] * 6 + [self.done] * 3
        verbs += [self.release, self.free, self.free, self.drop, self.reserve, self.time, self.finish, self.reset]
        verbs += [self.rare] if self.rng.random() < 0.3 else []
        with contextlib.suppress(AsyncFlowError):  # refused: then it has changed nothing
            self.rng.choice(verbs)()

    def some(self, most: int = 6) -> np.ndarray:
        part = self.rng.choice(self.name())
        live = self.pair.member.node.controller.partitions.get(part)
        if live is None or not live.rows.count:
            return np.array(self.rng.sample(self.rows, min(len(self.rows), 1)) or [0], np.int64)
        slots = np.flatnonzero(live.rows.alive)
        chosen = self.rng.sample(slots.tolist(), min(len(slots), self.rng.randint(1, most)))
        return live.handles(np.array(chosen, np.int64))

    def name(self) -> list[str]:
        return ["p", "q", "r"]

    def put(self) -> None:
        n = self.rng.randint(1, 4)
        ids = list(range(self.next_id, self.next_id + n))
        self.next_id += n
        counts = [self.rng.randint(1, 3) for _ in ids]
        sizes = [c + self.rng.choice([0, 0, 1, 2]) for c in counts]
        x = [np.full(self.rng.randint(0, 40), 3, np.int16) for _ in range(sum(counts))]
        versions = (self.rng.randint(0, 3),) * 2 if self.rng.random() < 0.4 else None
        rows = self.pair.put(
            self.rng.choice(self.name()), ids, sizes, counts, x if self.rng.random() < 0.5 else None, versions,
            anonymous=self.rng.random() < 0.2 and len(set(counts)) == 1 and counts[0] == 1,
        )  # fmt: skip
        self.rows += rows.tolist()

    def late(self) -> None:
        part = self.pair.member.node.controller.partitions.get(self.rng.choice(self.name()))
        if part is not None and len(part.groups.live()):
            group = self.rng.choice(part.groups.live().tolist())
            gid = int(part.groups.id[group])
            if gid > 0:
                self.pair.put(part.name, [gid], [int(part.groups.size[group])], [1])

    def write(self) -> None:
        claims = [c for c in self.claims if len(c[1])]
        version = self.rng.choice([None, 1, 2, 3])
        columns = self.rng.choice([("x", "y"), ("x",), ("y",)])
        if claims and self.rng.random() < 0.6:
            claim_id, rows = self.rng.choice(claims)
            done = self.rng.random() < 0.5
            if self.rng.random() < 0.5:  # notes for whoever claims the rows next, each time others
                self.pair.write(rows, self.rng.randrange(99), ("note",), claim_id, done, most=60)
            else:
                self.pair.write(rows, 1, columns, claim_id, done, version=version)
        else:
            self.pair.write(self.some(), 1, columns, version=version)

    def claim(self) -> None:
        how: dict = {"count": self.rng.randint(1, 6), "unit": self.rng.choice(["rows", "groups"])}
        if self.rng.random() < 0.2:
            how["min_version"] = 2
        if self.rng.random() < 0.1:
            how["max_age_s"] = 40.0
        if self.rng.random() < 0.2:
            how["claim_id"] = SPREAD_CLAIM | self.rng.randint(1, 5)
        if self.rng.random() < 0.2:
            how["timeout_s"] = 5.0
        if self.rng.random() < 0.2:
            how["policy"] = self.rng.choice(["oldest", "random", "by_version"])
        task = self.rng.choice(list(self.pair.member.node.schema.tasks))
        self.claims.append(self.pair.claim(task, self.rng.choice(self.name()), **how))

    def done(self) -> None:
        if self.claims:
            claim_id, rows = self.claims.pop(self.rng.randrange(len(self.claims)))
            part = rows[: self.rng.randint(1, len(rows))] if len(rows) and self.rng.random() < 0.5 else None
            self.pair.call(Verb.DONE, {"claim_id": claim_id, "rows": part, "task": ""})

    def release(self) -> None:
        if self.claims:
            claim_id, _ = self.claims.pop(self.rng.randrange(len(self.claims)))
            self.pair.call(Verb.RELEASE, {"claim_id": claim_id, "rows": None})

    def free(self) -> None:
        rows = self.some(20)
        self.pair.call(Verb.FREE, {"rows": rows})
        self.stale += rows.tolist()

    def drop(self) -> None:
        self.pair.call(Verb.DROP, {"rows": self.some(), "reason": self.rng.choice("ab"), "partition": ""})

    def finish(self) -> None:
        self.pair.call(Verb.FINISH, {"rows": self.some(), "task": "make"})

    def reset(self) -> None:
        control = self.pair.member.node.controller
        part, slots = control.resolve(self.some())
        control.reset(part, "make", slots, self.pair.now)
        self.pair.member.settle(self.pair.now)

    def reserve(self) -> None:
        self.pair.call(Verb.RESERVE, {
            "columns": ["prompt"], "timeout_s": 0.0, "lengths": np.array([self.rng.randint(1, 4000)], np.int64),
            "put": True, "rows": 1, "groups": 1,
        }, connection=self.rng.randrange(3))  # fmt: skip
        if self.rng.random() < 0.6:
            self.pair.member.connection_lost(self.rng.randrange(3), self.pair.now)
            self.pair.member.settle(self.pair.now)

    def time(self) -> None:
        self.pair.later(self.rng.choice([0.5, 3.0, 20.0]))

    def rare(self) -> None:
        what = self.rng.randrange(4)
        if what == 0:
            self.pair.call(Verb.SEAL, {"partition": self.rng.choice(self.name())})
        elif what == 1:
            self.pair.call(Verb.CLOSE, {"partition": self.rng.choice(self.name())})
        elif what == 2:
            self.pair.call(Verb.TASK, {"name": f"t{self.rng.randrange(2)}", "columns": ["x"]})
        else:
            self.pair.member.journal._limit = 0  # a fresh description at the next tick
            self.pair.later(0.1)


@pytest.mark.parametrize("seed", range(12))
def test_after_any_schedule_a_restarted_pair_is_the_pair_that_was_killed(start, seed):
    rng = random.Random(seed)
    pair = start(nbytes=256 << 10)
    schedule = Schedule(pair, rng)
    for _ in range(4):
        for _ in range(rng.randint(20, 90)):
            schedule.step()
        live, again = schedule.pair, schedule.pair.killed()
        open_claims = list(live.member.node.controller.leases.open)
        agree(live, again)
        for claim_id in open_claims:
            with pytest.raises(ClaimLost):
                again.call(Verb.DONE, {"claim_id": claim_id, "rows": None, "task": ""})
        alive = {h for p in again.member.node.controller.partitions.values()
                 for h in p.handles(np.flatnonzero(p.rows.alive)).tolist()}  # fmt: skip
        for handle in rng.sample(schedule.stale, min(5, len(schedule.stale))):
            if handle not in alive:
                with pytest.raises(StaleHandle):
                    again.call(Verb.CHECK, {"rows": np.array([handle])})
        for request, (verb, frame) in list(live.sent.items())[-20:]:
            if verb in (Verb.PUT, Verb.FREE, Verb.DROP, Verb.SEAL):
                kept = again.member.answers.get((7, request))
                assert kept == frame or (kept is None and verb is not Verb.PUT), verb
        again._requests = live._requests
        schedule.pair = again
        schedule.claims = []
    assert os.path.exists(pair.path)
