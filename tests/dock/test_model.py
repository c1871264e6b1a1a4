"""The controller against a naive model of dicts, in random schedules of all verbs."""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from mindspeed_asyncflow.dock.columns import TaskSpec
from mindspeed_asyncflow.dock.partition import Grant
from mindspeed_asyncflow.dock.policies import Facts, shuffled
from mindspeed_asyncflow.errors import AsyncFlowError, DeadlineExceeded, StaleHandle

LEASE_S = 10.0
POLICIES = ("fifo", "oldest", "by_version", "random", "in_order")


@dataclass
class Row:
    part: str
    gid: int
    member: int
    seq: int
    columns: set[str]
    version: float = float("inf")
    state: dict[str, str] = field(default_factory=dict)
    claims: set[int] = field(default_factory=set)
    pins: int = 0
    doomed: bool = False


@dataclass
class Group:
    size: int
    seq: int
    rows: list[int] = field(default_factory=list)  # handles, without those on their way out


class Model:
    """Rules in the plainest words: everything is looked up over all rows."""

    def __init__(self) -> None:
        self.tasks = {"first": {"a"}, "second": {"a", "b"}, "third": {"c"}}
        self.rows: dict[int, Row] = {}
        self.groups: dict[tuple[str, int], Group] = {}
        self.arrival: dict[tuple[str, str], list[int]] = {}
        self.claims: dict[int, tuple[str, str, list[int]]] = {}  # id -> task, worker, rows
        self.gone: list[int] = []
        self.seq = 0

    def put(self, part: str, gid: int, size: int, handles: list[int], columns: str) -> None:
        group = self.groups.setdefault((part, gid), Group(size, self.seq))
        for member, handle in enumerate(handles):
            self.seq += 1
            self.rows[handle] = row = Row(part, gid, member, self.seq, set(columns))
            group.rows.append(handle)
            for task, needs in self.tasks.items():
                row.state[task] = "waiting"
                if needs <= row.columns:
                    self.make_ready(handle, task)

    def make_ready(self, handle: int, task: str) -> None:
        row = self.rows[handle]
        row.state[task] = "ready"
        self.arrival.setdefault((row.part, task), []).append(handle)

    def write(self, handles: list[int], columns: str, version: int | None) -> None:
        for handle in handles:
            row = self.rows[handle]
            row.columns |= set(columns)
            if version is not None:
                row.version = min(row.version, version)
        for task, needs in self.tasks.items():
            for handle in handles:
                if self.rows[handle].state.get(task) == "waiting" and needs <= self.rows[handle].columns:
                    self.make_ready(handle, task)

    def add_task(self, name: str, needs: set[str]) -> None:
        self.tasks[name] = needs
        for handle, row in self.rows.items():
            if not row.doomed:
                row.state[name] = "waiting"
                if needs <= row.columns:
                    self.make_ready(handle, name)

    def unready(self, handle: int, task: str) -> None:
        row = self.rows[handle]
        if row.state[task] == "ready":
            self.arrival[row.part, task].remove(handle)

    def grant(self, task: str, worker: str, grant: Grant) -> None:
        handles = grant.rows.tolist()
        assert len(set(handles)) == len(handles)
        for handle, group_id in zip(handles, grant.group_ids.tolist()):
            row = self.rows[handle]
            assert row.state[task] == "ready" and row.gid == group_id, "granted rows are ready: nobody has them"
            self.unready(handle, task)
            row.state[task] = "claimed"
            row.claims.add(grant.claim_id)
        if handles:
            self.claims[grant.claim_id] = (task, worker, handles)

    def end(self, claim: int, handles: list[int], state: str) -> None:
        task, _, held = self.claims[claim]
        back = []
        for handle in handles:
            row = self.rows[handle]
            row.claims.discard(claim)
            if row.doomed:
                del row.state[task]
                self.remove_if_free(handle)
            else:
                row.state[task] = state
                back.append(handle)
        if state == "ready" and back:
            line = self.arrival[self.rows[back[0]].part, task]
            line[:0] = back
        held[:] = [h for h in held if h not in set(handles)]
        if not held:
            del self.claims[claim]

    def leave(self, handles: list[int]) -> None:
        for handle in handles:
            row = self.rows[handle]
            if row.doomed:
                continue
            row.doomed = True
            for task in list(row.state):
                self.unready(handle, task)
                if row.state[task] != "claimed":
                    del row.state[task]
            group = self.groups[row.part, row.gid]
            group.rows.remove(handle)
            group.size -= 1
            self.remove_if_free(handle)

    def remove_if_free(self, handle: int) -> None:
        row = self.rows[handle]
        if row.doomed and not row.claims and not row.pins:
            del self.rows[handle]
            self.gone.append(handle)

    def again(self, handles: list[int], task: str) -> None:
        ready = [h for h in handles if self.tasks[task] <= self.rows[h].columns]
        for handle in handles:
            self.rows[handle].state[task] = "ready" if handle in ready else "waiting"
        if ready:
            self.arrival.setdefault((self.rows[ready[0]].part, task), [])[:0] = ready

    def seal(self, part: str) -> None:
        for (name, _), group in self.groups.items():
            if name == part and len(group.rows) < group.size:
                group.size = len(group.rows)

    def whole(self, group: Group, task: str) -> bool:
        return group.size > 0 and sum(self.rows[h].state[task] == "ready" for h in group.rows) == group.size

    def counts(self, part: str, task: str) -> list[int]:
        count = Counter(r.state[task] for r in self.rows.values() if r.part == part and task in r.state)
        return [count[s] for s in ("waiting", "ready", "claimed", "done")]

    # what a policy must grant, over all units

    def key(self, policy: str, handle: int, seed: int) -> float:
        row = self.rows[handle]
        return {"oldest": row.seq, "by_version": row.version, "random": _mixed(seed, row.gid, row.member)}[policy]

    def group_key(self, policy: str, group: Group, seed: int) -> float:
        version = min(self.rows[h].version for h in group.rows)
        gid = self.rows[group.rows[0]].gid
        return {"oldest": group.seq, "by_version": version, "random": _mixed(seed, gid, -1)}[policy]

    def check_rows(self, part: str, task: str, policy: str, seed: int, count: int, granted: list[int]) -> None:
        line = self.arrival.get((part, task), [])
        if policy == "fifo":
            assert granted == line[:count]
        else:
            keys = sorted(self.key(policy, h, seed) for h in line)[:count]
            assert [self.key(policy, h, seed) for h in granted] == keys

    def check_groups(self, part: str, task: str, policy: str, seed: int, count: int, granted: list[int]) -> None:
        live = [(g.seq, gid, g) for (name, gid), g in self.groups.items() if name == part and g.rows]
        whole = [(gid, g) for _, gid, g in sorted(live, key=lambda x: x[0]) if self.whole(g, task)]
        ids = list(dict.fromkeys(self.rows[h].gid for h in granted))
        assert set(ids) <= {gid for gid, _ in whole}
        assert len(granted) == sum(g.size for gid, g in whole if gid in ids), "whole groups only"
        if policy == "in_order":
            expected = []
            for _, gid, group in sorted(live, key=lambda x: x[0]):
                if any(self.rows[h].state[task] in ("waiting", "ready") for h in group.rows):
                    if len(expected) == count or not self.whole(group, task):
                        break
                    expected.append(gid)
            assert ids == expected
            return
        assert len(ids) == min(count, len(whole))
        single = all(g.size == 1 for _, g in whole)
        if policy != "fifo" and not single:
            keys = sorted(self.group_key(policy, g, seed) for _, g in whole)[:count]
            assert [self.group_key(policy, self.groups[part, gid], seed) for gid in ids] == keys


def _mixed(seed: int, gid: int, member: int) -> int:
    one = np.array([0])
    return int(shuffled(Facts(one, one, one, np.array([gid]), np.array([member])), seed)[0])


class Schedule:
    """One random run over two partitions; every verb is done to both the controller and the model."""

    def __init__(self, bench, seed: int, largest: int) -> None:
        self.rng, self.bench, self.model, self.largest = random.Random(seed), bench, Model(), largest
        self.gid = self.departed = self.put_rows = 0
        self.sealed: set[str] = set()
        self.parked: dict[int, tuple[str, str]] = {}
        self.short: dict[tuple[str, int], int] = {}  # groups that lack a member
        self.pins: list[list[int]] = []

    def some(self, part: str, most: int, *states: tuple[str, str]) -> list[int]:
        live = [h for h, r in self.model.rows.items() if r.part == part and not r.doomed
                and all(r.state.get(t) == s for t, s in states)]  # fmt: skip
        return self.rng.sample(live, min(len(live), self.rng.randint(1, most)))

    def slots(self, handles: list[int]):
        return self.bench.control.resolve(np.array(handles))

    def step(self) -> None:
        part, rng = self.rng.choice("pq"), self.rng
        closing = part in self.bench.control.partitions and self.bench.control.partitions[part].closing
        verbs = ["claim"] * 6 + ["end"] * 5 + ["park", "write", "write", "write", "leave", "pin", "reset", "finish"]
        if part not in self.sealed and not closing:
            verbs += ["put"] * 6 + ["late"]
        verb = rng.choice(verbs)
        if rng.random() < 0.02:
            verb = rng.choice(["expire", "forget", "seal", "close", "task"])
        free = ("put", "task", "expire", "forget", "end", "pin")  # make sense whatever the partition is
        if verb not in free and (part not in self.bench.control.partitions or closing):
            return
        getattr(self, verb)(part)
        self.look()

    def look(self) -> None:
        """Answers to parked claims, and what left."""
        for key, outcome in self.bench.outcomes().items():
            task, worker = self.parked.pop(key)
            if isinstance(outcome, Grant):
                self.model.grant(task, worker, outcome)
        departed, self.bench.control.departed = self.bench.control.departed, []
        self.departed += sum(len(slots) for _, slots, _ in departed)
        for name in "pq":
            if name not in self.bench.control.partitions:
                self.sealed.discard(name)

    def put(self, part: str) -> None:
        n, size = self.rng.randint(1, 12), self.rng.randint(1, self.largest)
        count = max(1, size - (self.rng.random() < 0.2))
        columns = self.rng.choice(["", "a", "ab", "abc"])
        ids = list(range(self.gid, self.gid + n))
        self.gid += n
        rows = self.bench.put(ids, size=size, columns=columns, partition=part, count=count)
        for gid, handles in zip(ids, rows.tolist()):
            self.model.put(part, gid, size, handles, columns)
            if count < size:
                self.short[part, gid] = size
        self.put_rows += rows.size

    def late(self, part: str) -> None:
        mine = [
            (p, g)
            for p, g in self.short
            if p == part
            and (p, g) in self.model.groups
            and self.model.groups[p, g].rows
            and len(self.model.groups[p, g].rows) < self.model.groups[p, g].size
        ]
        if mine:
            gid = self.rng.choice(mine)[1]
            size = self.short.pop((part, gid))
            rows = self.bench.put([gid], size=size, columns="a", partition=part, count=1)
            self.model.put(part, gid, size, rows[0].tolist(), "a")
            self.put_rows += 1

    def write(self, part: str) -> None:
        handles = self.some(part, 40)
        if handles:
            columns = self.rng.choice(["a", "b", "c", "ab"])
            version = self.rng.choice([None, self.rng.randint(0, 5)])
            self.bench.write(np.array(handles), columns, version)
            self.model.write(handles, columns, version)

    def claim(self, part: str) -> None:
        task, policy, worker = self.rng.choice(list(self.model.tasks)), self.rng.choice(POLICIES), self.rng.choice("xy")
        unit = "groups" if policy == "in_order" else self.rng.choice(["rows", "groups"])
        count, seed = self.rng.randint(1, 12), self.rng.randint(0, 1)
        try:
            grant = self.bench.claim(task, count, partition=part, unit=unit, policy=policy, seed=seed, worker=worker)
            granted = grant.rows.tolist()
        except DeadlineExceeded:
            grant, granted = None, []
        check = self.model.check_rows if unit == "rows" else self.model.check_groups
        check(part, task, policy, seed, count, granted)
        if grant is not None:
            self.model.grant(task, worker, grant)

    def park(self, part: str) -> None:
        task = self.rng.choice(list(self.model.tasks))
        least = self.rng.randint(1, 6)
        how = {"partition": part, "worker": "z", "unit": self.rng.choice(["rows", "groups"]), "at_least": least}
        key, grant = self.bench.ask(task, 6, wait_s=15.0, **how)
        if grant is None:
            self.parked[key] = (task, "z")
        else:
            self.model.grant(task, "z", grant)

    def end(self, part: str) -> None:
        if self.model.claims:
            claim = self.rng.choice(list(self.model.claims))
            held = self.model.claims[claim][2]
            rows = self.rng.choice([None, self.rng.sample(held, self.rng.randint(1, len(held)))])
            where = (None, None) if rows is None else self.slots(rows)
            if self.rng.random() < 0.6:
                self.bench.control.done(claim, *where, self.bench.now)
                self.model.end(claim, list(held) if rows is None else rows, "done")
            else:
                self.bench.control.release(claim, *where, self.bench.now)
                self.model.end(claim, list(held) if rows is None else rows, "ready")

    def leave(self, part: str) -> None:
        handles = self.some(part, 20)
        if handles:
            self.rng.choice([self.bench.free, self.bench.drop])(np.array(handles))
            self.model.leave(handles)

    def pin(self, part: str) -> None:
        if self.pins and self.rng.random() < 0.5:
            handles = self.pins.pop()
            self.bench.control.unpin(*self.slots(handles), self.bench.now)
            for handle in handles:
                self.model.rows[handle].pins -= 1
                self.model.remove_if_free(handle)
        elif handles := self.some(part, 5):
            self.bench.control.pin(*self.slots(handles))
            for handle in handles:
                self.model.rows[handle].pins += 1
            self.pins.append(handles)

    def reset(self, part: str) -> None:
        task = self.rng.choice(list(self.model.tasks))
        if handles := self.some(part, 10, (task, "done")):
            where, slots = self.slots(handles)
            self.bench.control.reset(where, task, slots, self.bench.now)
            self.model.again(handles, task)

    def finish(self, part: str) -> None:
        task = self.rng.choice(list(self.model.tasks))
        if handles := self.some(part, 3, (task, self.rng.choice(["waiting", "ready", "done"]))):
            where, slots = self.slots(handles)
            self.bench.control.finish(where, task, slots, self.bench.now)
            for handle in handles:
                self.model.unready(handle, task)
                self.model.rows[handle].state[task] = "done"

    def expire(self, part: str) -> None:
        self.bench.later(LEASE_S + 1)
        for claim in sorted(self.model.claims):
            self.model.end(claim, list(self.model.claims[claim][2]), "ready")

    def forget(self, part: str) -> None:
        self.bench.control.forget_worker("x", self.bench.now)
        for claim in sorted(c for c, (_, worker, _) in self.model.claims.items() if worker == "x"):
            self.model.end(claim, list(self.model.claims[claim][2]), "ready")

    def seal(self, part: str) -> None:
        self.bench.control.seal(part, self.bench.now)
        self.model.seal(part)
        self.sealed.add(part)

    def close(self, part: str) -> None:
        self.bench.control.close(part, self.bench.now)
        self.model.leave([h for h, r in self.model.rows.items() if r.part == part])

    def task(self, part: str) -> None:
        if len(self.model.tasks) < 5:
            name, needs = f"more {len(self.model.tasks)}", set(self.rng.choice(["b", "bc"]))
            self.bench.control.add_task(TaskSpec(name, tuple(needs)), self.bench.now)
            self.model.add_task(name, needs)

    def compare(self) -> None:
        control, model = self.bench.control, self.model
        for name, part in control.partitions.items():
            assert part.rows.count == sum(r.part == name for r in model.rows.values())
            for task, queue in part.queues.items():
                assert self.bench.counts(task, name) == model.counts(name, task)
                whole = sum(model.whole(g, task) for (p, _), g in model.groups.items() if p == name)
                assert queue.whole_groups == whole
        assert self.departed == len(model.gone) == self.put_rows - len(model.rows), "each row leaves once"
        for handle in self.rng.sample(model.gone, min(20, len(model.gone))):
            with pytest.raises(StaleHandle):
                control.resolve(np.array([handle]))
        for handle in self.rng.sample(list(model.rows), min(20, len(model.rows))):
            control.resolve(np.array([handle]))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "largest"), [(0, 1), (1, 4), (2, 4), (3, 9), (4, 3), (5, 2)])
def test_random_schedules_agree_with_the_naive_model(new_bench, seed, largest):
    """More than 10,000 rows over all runs, every verb: counts, policies, whole groups and handles are exact."""
    run = Schedule(new_bench(LEASE_S), seed, largest)
    while run.put_rows < 2000:
        for _ in range(25):
            run.step()
        run.compare()
    assert not [o for o in run.bench.outcomes().values() if isinstance(o, AsyncFlowError)]
