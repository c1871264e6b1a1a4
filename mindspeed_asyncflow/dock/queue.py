"""The rows of one partition as one task sees them: waiting -> ready -> claimed -> done.

`offer` is the only way into `ready` and `take` the only way out of it towards a claim. Both keep the orders in use up
to date, so that no question looks at the rows alive. What only groups need is kept once somebody claims groups, and
never while every group is a single row: then groups are rows.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from mindspeed_asyncflow.dock.lines import ArrivalLine, KeyLine
from mindspeed_asyncflow.dock.policies import Facts, Policy
from mindspeed_asyncflow.dock.table import NO_VERSION, GroupTable, Parallel, RowTable

GONE, WAITING, READY, CLAIMED, DONE = range(5)
STATE_NAMES = ("gone", "waiting", "ready", "claimed", "done")
_ORDERS = 4  # orders by key that a queue keeps; the longest unused one goes
_NEWEST = np.iinfo(np.int64).max
_Order = tuple[Policy, int, bool]  # seed, groups


class _RowStates(Parallel):
    state: np.ndarray  # int8
    claim: np.ndarray  # int64: the claim that holds the row, 0 when none


class _GroupSide(Parallel):
    """Whole groups of one task, and groups of which a row is still to be granted."""

    ready: np.ndarray  # int64: rows of the group in state READY
    open: np.ndarray  # int64: rows in state WAITING or READY
    whole: np.ndarray  # bool: all of them are READY

    def __init__(self) -> None:
        super().__init__(ready=("int64", 0), open=("int64", 0), whole=("bool", 0), mark=("int64", 0))
        self.line = ArrivalLine()
        self.count = 0  # whole groups


class TaskQueue:
    def __init__(self, rows: RowTable, groups: GroupTable) -> None:
        self._rows, self._groups = rows, groups
        self._r = _RowStates(state=("int8", GONE), claim=("int64", 0))
        self._line = ArrivalLine()
        self._side: _GroupSide | None = None
        self._orders: OrderedDict[_Order, KeyLine] = OrderedDict()
        self.counts = [0] * 5  # rows by state; GONE is not kept

    @property
    def ready_rows(self) -> int:
        return self.counts[READY]

    @property
    def whole_groups(self) -> int:
        """For people: looks at all rows when nobody has claimed groups of this task yet."""
        if self._groups.singles or self._side is not None:
            return self.ready_units(not self._groups.singles)
        groups = self._rows.group[self._line.all()]
        ready = np.bincount(groups, minlength=self._groups.capacity)
        return int(np.count_nonzero((ready == self._groups.size) & (ready > 0)))

    @property
    def has_orders(self) -> bool:
        """Whether some policy in use looks at more than the arrival."""
        return bool(self._orders)

    def ready_units(self, groups: bool) -> int:
        return self._groups_kept().count if groups else self.counts[READY]

    def states(self, slots: np.ndarray) -> np.ndarray:
        return self._r.state[slots]

    def holder(self, slots: np.ndarray) -> np.ndarray:
        return self._r.claim[slots]

    def arrival(self) -> np.ndarray:
        """All ready rows in the order of their arrival."""
        return self._line.all()

    def arrange(self, slots: np.ndarray) -> None:
        """The ready rows have come in the order of `slots`: for a restart."""
        self._line.remove(slots)
        self._line.add(slots)

    # -- rows change state -----------------------------------------------------------------------------------------

    def enter(self, slots: np.ndarray, state: int = WAITING) -> None:
        """New rows, WAITING or READY."""
        if self._r.capacity < self._rows.capacity:
            self._r.ensure(self._rows.capacity)
            self._line.ensure(self._rows.capacity)
        if state == READY and not self._orders and self._side is None:  # nothing but the arrival is looked at
            self._r.state[slots] = READY
            self.counts[READY] += len(slots)
            self._line.add(slots)
            return
        self._r.state[slots] = WAITING
        self.counts[WAITING] += len(slots)
        if self._orders:
            for line in self._orders.values():
                line.ensure(max(self._rows.capacity, self._groups.capacity))
        if self._side is not None:
            self._side.ensure(self._groups.capacity)
            self._side.line.ensure(self._groups.capacity)
            self._count_groups(slots, 0, 1)
        if state == READY:
            self.offer(slots)

    def offer(self, slots: np.ndarray, was: int = WAITING) -> None:
        """Rows in state `was` become ready; those that are offered again come before the others."""
        if not len(slots):
            return
        front = was != WAITING
        self._move(slots, was, READY)
        if front:
            self._r.claim[slots] = 0
        self._line.add(slots, front)
        if self._orders:
            self._add_to_orders(slots, groups=False)
        if self._side is not None:
            self._count_groups(slots, 1, int(front), front)

    def take(self, slots: np.ndarray, claim: int) -> None:
        """Ready rows are claimed."""
        self._leave_ready(slots)
        self._move(slots, READY, CLAIMED)
        self._r.claim[slots] = claim
        if self._side is not None:
            self._count_groups(slots, -1, -1)

    def pass_on(self, slots: np.ndarray, claim: int) -> None:
        """Claimed rows belong to another claim now."""
        self._r.claim[slots] = claim

    def finish(self, slots: np.ndarray) -> None:
        """Claimed rows are done."""
        self._move(slots, CLAIMED, DONE)
        self._r.claim[slots] = 0

    def settle(self, slots: np.ndarray) -> None:
        """Rows in any state but CLAIMED are done."""
        self._withdraw(slots, DONE)

    def leave(self, slots: np.ndarray) -> None:
        """Rows leave the task whatever their state is."""
        self._withdraw(slots, GONE)

    def _withdraw(self, slots: np.ndarray, new: int) -> None:
        """From each state that is found among the rows."""
        state = self._r.state[slots]
        left = len(slots)
        for old in range(5):
            if not left:
                return
            chosen = state == old
            count = int(np.count_nonzero(chosen))
            if count:
                left -= count
                self._withdraw_from(old, slots if count == len(slots) else slots[chosen], new)

    def _withdraw_from(self, old: int, slots: np.ndarray, new: int) -> None:
        if old == READY:
            self._leave_ready(slots)
        elif old == CLAIMED:
            self._r.claim[slots] = 0
        self._move(slots, old, new)
        if self._side is not None and old in (WAITING, READY):
            self._count_groups(slots, -1 if old == READY else 0, -1)

    def await_again(self, slots: np.ndarray) -> None:
        """Done rows wait again for columns."""
        self._move(slots, DONE, WAITING)
        if self._side is not None:
            self._count_groups(slots, 0, 1)

    def _leave_ready(self, slots: np.ndarray) -> None:
        self._line.remove(slots)
        for (_, _, groups), line in self._orders.items():
            if not groups:
                line.remove(slots)

    def _move(self, slots: np.ndarray, old: int, new: int) -> None:
        self._r.state[slots] = new
        self.counts[old] -= len(slots)
        self.counts[new] += len(slots)

    # -- groups ----------------------------------------------------------------------------------------------------

    def _groups_kept(self) -> _GroupSide:
        """What groups need; counted over all rows at the first use."""
        if self._side is None:
            side = self._side = _GroupSide()
            side.ensure(self._groups.capacity)
            side.line.ensure(self._groups.capacity)
            slots = np.flatnonzero(self._r.state)
            state, groups = self._r.state[slots], self._rows.group[slots]
            size = side.capacity
            side.ready[:] = np.bincount(groups[state == READY], minlength=size)
            side.open[:] = np.bincount(groups[state <= READY], minlength=size)
            order = self._rows.group[self._line.all()]  # a group came with the last of its rows
            last = order[::-1][np.sort(np.unique(order[::-1], return_index=True)[1])][::-1]
            self.refresh(last, ordered=True)
        return self._side

    def _count_groups(self, slots: np.ndarray, ready: int, opened: int, front: bool = False) -> None:
        side = self._side
        if side is None or not len(slots):
            return
        groups = self._rows.group[slots]
        if opened:
            before = side.open[groups] if self._orders else None
            np.add.at(side.open, groups, opened)
            if before is not None:
                self._track_issue(groups, before, side.open[groups])
        if ready:
            np.add.at(side.ready, groups, ready)
            self.refresh(groups, front)

    def refresh(self, groups: np.ndarray, front: bool = False, ordered: bool = False) -> None:
        """Looks again whether `groups` are whole: after a change of their rows or of their size."""
        side = self._side
        if side is None or not len(groups):
            return
        size = self._groups.size[groups]
        now = (side.ready[groups] == size) & (size > 0)
        before = side.whole[groups]
        side.whole[groups] = now
        new, lost = groups[now & ~before], groups[before & ~now]
        if len(lost):
            lost = lost[side.firsts(lost)]
            side.count -= len(lost)
            side.line.remove(lost)
            for (policy, _, unit), line in self._orders.items():
                if unit and policy.order == "key":
                    line.remove(lost)
        if len(new):
            if not ordered:
                new = new[side.firsts(new)]
                new = new[np.argsort(self._groups.seq[new])]
            side.count += len(new)
            side.line.add(new, front)
        if self._orders:
            self._add_to_orders(new, groups=True)
            stay = groups[now & before]  # a member less, or other versions: another key
            if len(stay):
                self._add_to_orders(stay[side.firsts(stay)], groups=True)

    # -- orders ----------------------------------------------------------------------------------------------------

    def rekey(self, slots: np.ndarray) -> None:
        """What is known of these rows has changed: those that are ready move to their new places."""
        ready = slots[self._r.state[slots] == READY]
        if self._orders and len(ready):
            self._add_to_orders(ready, groups=False)
            self.refresh(self._rows.group[ready])

    def _add_to_orders(self, units: np.ndarray, groups: bool) -> None:
        if len(units):
            for (policy, seed, unit), line in self._orders.items():
                if unit == groups and policy.order == "key":
                    line.add(units, policy.key(self.facts(units, groups), seed))

    def _track_issue(self, groups: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Groups of which a row is to be granted again, or none any more, enter or leave the orders of issue."""
        side = self._side
        for (policy, seed, _), line in self._orders.items():
            if policy.order == "issue" and side is not None:
                fresh, gone = groups[(before == 0) & (after > 0)], groups[(before > 0) & (after == 0)]
                if len(fresh):
                    fresh = fresh[side.firsts(fresh)]
                    line.add(fresh, policy.key(self.facts(fresh, True), seed))
                if len(gone):
                    line.remove(gone[side.firsts(gone)])

    def _order(self, policy: Policy, seed: int, groups: bool) -> KeyLine:
        """The order of a policy, built from all units at its first use."""
        name = (policy, seed if policy.seeded else 0, groups)
        line = self._orders.get(name)
        if line is None:
            line = self._orders[name] = KeyLine()
            line.ensure(max(self._rows.capacity, self._groups.capacity))
            if policy.order == "issue":
                units = np.flatnonzero(self._groups_kept().open)
            else:
                units = self._groups_kept().line.all() if groups else self._line.all()
            if len(units):
                line.add(units, policy.key(self.facts(units, groups), name[1]))
            if len(self._orders) > _ORDERS:
                self._orders.popitem(last=False)
        elif len(self._orders) > 1:
            self._orders.move_to_end(name)
        return line

    def facts(self, units: np.ndarray, groups: bool) -> Facts:
        """What keys may depend on, of rows or of groups without the rows on their way out."""
        rows, table = self._rows, self._groups
        if not groups:
            version = rows.version_min[units].astype(np.int64)
            version[version == NO_VERSION] = _NEWEST
            return Facts(rows.seq[units], version, rows.tokens[units], table.id[rows.group[units]],
                         rows.member[units].astype(np.int64))  # fmt: skip
        slots, fill = table.members(units)
        begins = np.cumsum(fill) - fill
        version = rows.version_min[slots].astype(np.int64)
        version[(version == NO_VERSION) | rows.doomed[slots]] = _NEWEST
        tokens = np.where(rows.doomed[slots], 0, rows.tokens[slots])
        return Facts(table.seq[units], np.minimum.reduceat(version, begins), np.add.reduceat(tokens, begins),
                     table.id[units], np.full(len(units), -1))  # fmt: skip

    # -- who is next -----------------------------------------------------------------------------------------------

    def next(self, policy: Policy, seed: int, groups: bool, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The first `count` units in the order of `policy`; and, of orders of issue, whether each is whole."""
        if policy.order == "issue":
            units = self._order(policy, seed, True).first(count)
            return units, self._groups_kept().whole[units]
        if policy.order == "key":
            return self._order(policy, seed, groups).first(count), None
        return (self._groups_kept().line if groups else self._line).first(count), None

    def whole(self, groups: np.ndarray) -> np.ndarray:
        return self._groups_kept().whole[groups]
