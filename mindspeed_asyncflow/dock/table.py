"""Rows and groups of one partition as parallel arrays, and the handle that names a row for ever.

A handle is (pair, partition, slot, generation) in one int64. A slot is used again after its row is freed, its generation
rises, and the old handle is stale from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from mindspeed_asyncflow.errors import DockError, DockFull, StaleHandle

PAIR_BITS, PARTITION_BITS, SLOT_BITS, GENERATION_BITS = 8, 10, 24, 21  # 63 bits: handles stay positive
NO_VERSION = -1
MAX_SLOTS = 1 << SLOT_BITS
_LAST_GENERATION = (1 << GENERATION_BITS) - 1


def pack_handles(pair: int, partition: int, slots: np.ndarray, generations: np.ndarray) -> np.ndarray:
    """int64 [n]"""
    prefix = (pair << PARTITION_BITS | partition) << (SLOT_BITS + GENERATION_BITS)
    return (slots << GENERATION_BITS) + generations + prefix


def unpack_handles(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pairs, partition numbers, slots, generations; int64 [n] each."""
    numbers = rows >> (SLOT_BITS + GENERATION_BITS)
    slots = (rows >> GENERATION_BITS) & (MAX_SLOTS - 1)
    return numbers >> PARTITION_BITS, numbers & ((1 << PARTITION_BITS) - 1), slots, rows & _LAST_GENERATION


class Parallel:
    """Arrays of one length that grow together; new entries hold the declared fill value."""

    def __init__(self, **fields: tuple[str, int]) -> None:
        self._fields = fields
        self.capacity = 0
        for name, (dtype, _) in fields.items():
            setattr(self, name, np.empty(0, dtype))

    def ensure(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        capacity = max(capacity, 2 * self.capacity, 256)
        for name, (dtype, fill) in self._fields.items():
            tail = np.full(capacity - self.capacity, fill, dtype)
            setattr(self, name, np.concatenate((getattr(self, name), tail)))
        self.capacity = capacity


class _Slots:
    """Numbers 0, 1, 2, ... handed out and taken back; the longest unused one comes first."""

    def __init__(self) -> None:
        self._free: deque[int] = deque()
        self.used_up_to = 0

    def take(self, count: int) -> np.ndarray:
        recycled = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        fresh = count - len(recycled)
        self.used_up_to += fresh
        return np.array(recycled + list(range(self.used_up_to - fresh, self.used_up_to)), np.int64)

    @property
    def idle(self) -> int:
        return len(self._free)

    def give(self, slots: np.ndarray) -> None:
        self._free.extend(slots.tolist())


class RowTable(Parallel):
    """What the controller knows of each row beside the state in each task."""

    generation: np.ndarray  # int64, rises when the row is freed
    alive: np.ndarray  # bool
    doomed: np.ndarray  # bool: dropped or freed while a claim still holds it; goes with that claim
    holders: np.ndarray  # int16: claims, over all tasks, that hold the row
    ready: np.ndarray  # int64: one bit per written column
    group: np.ndarray  # int64: group slot
    member: np.ndarray  # int32
    version_min: np.ndarray  # int32, NO_VERSION before the first versioned write
    version_max: np.ndarray  # int32
    tokens: np.ndarray  # int64: elements in columns that count as tokens

    def __init__(self) -> None:
        super().__init__(
            generation=("int64", 1), alive=("bool", 0), doomed=("bool", 0), holders=("int16", 0), ready=("int64", 0),
            group=("int64", -1), member=("int32", 0), version_min=("int32", NO_VERSION),
            version_max=("int32", NO_VERSION), tokens=("int64", 0),
        )  # fmt: skip
        self._slots = _Slots()
        self.count = 0

    def check_room(self, count: int) -> None:
        if self._slots.used_up_to + count > MAX_SLOTS and self._slots.idle < count:
            raise DockFull(
                f"a partition holds at most {MAX_SLOTS} rows at a time and has {self.count}; free some first"
            )

    def add(self, groups: np.ndarray, members: np.ndarray, ready: np.int64, tokens: np.ndarray) -> np.ndarray:
        """New rows; returns their slots."""
        slots = self._slots.take(len(groups))
        self.ensure(self._slots.used_up_to)
        self.alive[slots] = True
        self.ready[slots] = ready
        self.group[slots] = groups
        self.member[slots] = members
        self.tokens[slots] = tokens
        self.version_min[slots] = NO_VERSION
        self.version_max[slots] = NO_VERSION
        self.count += len(slots)
        return slots

    def remove(self, slots: np.ndarray) -> None:
        self.alive[slots] = False
        self.doomed[slots] = False
        self.generation[slots] += 1
        self.count -= len(slots)
        self._slots.give(slots[self.generation[slots] < _LAST_GENERATION])  # a worn-out slot is never used again

    def note_versions(self, slots: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        """Widens the version range of rows: the oldest and the newest policy that wrote into them."""
        old = self.version_min[slots]
        self.version_min[slots] = np.where(old == NO_VERSION, low, np.minimum(old, low))
        self.version_max[slots] = np.maximum(self.version_max[slots], high)

    def check(self, rows: np.ndarray, slots: np.ndarray, generations: np.ndarray) -> None:
        """Raises StaleHandle unless each handle names a live row."""
        good = slots < self.capacity
        good[good] = self.alive[slots[good]] & (self.generation[slots[good]] == generations[good])
        if not good.all():
            bad = rows[~good]
            raise StaleHandle(
                f"{len(bad)} of {len(rows)} row handles are stale: their rows were freed (first: {int(bad[0])})"
            )


class GroupTable(Parallel):
    """Prompt groups: explicit id and size. A group leaves with its last row."""

    id: np.ndarray  # int64
    size: np.ndarray  # int32: rows that make it whole; shrinks when a member is dropped or freed
    alive: np.ndarray  # int32: rows that are there and not on their way out
    seq: np.ndarray  # int64: place in issue order (order of the puts)

    def __init__(self) -> None:
        super().__init__(id=("int64", 0), size=("int32", 0), alive=("int32", 0), seq=("int64", -1))
        self._slots = _Slots()
        self.rows: dict[int, np.ndarray] = {}  # group slot -> row slots, in order of arrival
        self.by_id: dict[int, int] = {}
        self.by_seq: dict[int, int] = {}
        self.next_seq = 0

    def add(self, ids: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """Group slots for `ids`; those that exist already are kept."""
        new = [(i, size) for i, size in zip(ids, sizes) if i not in self.by_id]
        fresh = self._slots.take(len(new))
        self.ensure(self._slots.used_up_to)
        for (group, size), slot in zip(new, fresh.tolist()):
            self.by_id[group] = slot
            self.by_seq[self.next_seq] = slot
            self.id[slot], self.size[slot], self.seq[slot] = group, size, self.next_seq
            self.rows[slot], self.alive[slot] = np.empty(0, np.int64), 0
            self.next_seq += 1
        return np.fromiter((self.by_id[i] for i in ids), np.int64, len(ids))

    def attach(self, group: int, row_slots: np.ndarray) -> None:
        self.rows[group] = np.concatenate((self.rows[group], row_slots))
        self.alive[group] += len(row_slots)

    def shrink(self, groups: np.ndarray) -> np.ndarray:
        """One row less for each entry of `groups`; returns the groups that a row has left, once each."""
        unique, counts = np.unique(groups, return_counts=True)
        self.size[unique] -= counts.astype(np.int32)
        self.alive[unique] -= counts.astype(np.int32)
        return unique

    def detach(self, groups: np.ndarray, alive: np.ndarray) -> np.ndarray:
        """Forgets the rows of `groups` that are no longer `alive`; returns the groups that are empty now and gone."""
        unique = np.unique(groups)
        gone = []
        for group in unique.tolist():
            left = self.rows[group][alive[self.rows[group]]]
            self.rows[group] = left
            if not len(left):
                gone.append(group)
                del self.rows[group], self.by_id[int(self.id[group])], self.by_seq[int(self.seq[group])]
        slots = np.array(gone, np.int64)
        self._slots.give(slots)
        return slots

    def find(self, ids: Sequence[int]) -> np.ndarray:
        """Slots of the groups `ids`, at least one; raises DockError when one is not there."""
        missing = [i for i in ids if i not in self.by_id]
        if missing or not ids:
            raise DockError(f"groups {missing[:4]} are not in this partition (never put, or freed with their last row)")
        return np.array([self.by_id[i] for i in dict.fromkeys(ids)], np.int64)
