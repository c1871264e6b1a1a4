"""Rows and groups of one partition as parallel arrays, and the handle that names a row for ever.

A handle is (pair, partition, slot, generation) in one int64. A slot is used again after its row is freed, its
generation rises, and the old handle is stale from then on. No verb does Python work per row or per group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from mindspeed_asyncflow.dock.slots import Pool, Ring
from mindspeed_asyncflow.errors import DockError, DockFull, StaleHandle

PAIR_BITS, PARTITION_BITS, SLOT_BITS, GENERATION_BITS = 8, 10, 24, 21  # 63 bits: handles stay positive
NO_VERSION = -1
MAX_SLOTS = 1 << SLOT_BITS
LAST_GENERATION = (1 << GENERATION_BITS) - 1
NUMBER_SHIFT = SLOT_BITS + GENERATION_BITS  # above it: pair and partition
_SMALL_GROUP = 64  # members for which a group gets room at once; larger ones grow, so that a size alone costs nothing


def pack_handles(pair: int, partition: int, slots: np.ndarray, generations: np.ndarray) -> np.ndarray:
    """int64 [n]"""
    return (slots << GENERATION_BITS) + generations + ((pair << PARTITION_BITS | partition) << NUMBER_SHIFT)


def pair_numbers(rows: np.ndarray) -> np.ndarray:
    """The pair of each handle; int64 [n]."""
    return rows >> (PARTITION_BITS + NUMBER_SHIFT)


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers of all spans [start, start + length), one after the other; int64 [sum of lengths]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + lengths, lengths) + np.arange(total)


def enlarge(array: np.ndarray, length: int, fill: int) -> int:
    """Makes `array` at least `length` long, in place (large ones move no byte); returns its length.

    By a quarter rather than double: what a put may have to wait for is the first touch of the new pages.
    Nobody may hold a view of the array meanwhile.
    """
    old = len(array)
    if length > old:
        array.resize(max(length, old + old // 4, 256), refcheck=False)
        if fill:
            array[old:] = fill
    return len(array)


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
        for name, (_, fill) in self._fields.items():
            self.capacity = enlarge(getattr(self, name), capacity, fill)

    def firsts(self, numbers: np.ndarray) -> np.ndarray:
        """bool [n]: one entry of each distinct number. Needs a scratch field `mark`."""
        order = np.arange(len(numbers))
        mark: np.ndarray = self.mark  # type: ignore[attr-defined]
        mark[numbers] = order
        return mark[numbers] == order


class RowTable(Parallel):
    """What the controller knows of each row beside the state in each task. All rows start at generation `first`."""

    generation: np.ndarray  # int64, rises when the row is freed
    alive: np.ndarray  # bool
    doomed: np.ndarray  # bool: dropped or freed while a claim or pin still holds it; goes with the last of them
    holders: np.ndarray  # int32: claims over all tasks, and pins, that hold the row
    ready: np.ndarray  # int64: one bit per written column
    group: np.ndarray  # int64: group slot
    member: np.ndarray  # int32
    version_min: np.ndarray  # int32, NO_VERSION before the first versioned write
    version_max: np.ndarray  # int32
    tokens: np.ndarray  # int64: elements in columns that count as tokens
    seq: np.ndarray  # int64: place in the order of the puts
    born: np.ndarray  # float64: s, controller clock, at the put

    def __init__(self, first: int = 1) -> None:
        super().__init__(
            generation=("int64", first), alive=("bool", 0), doomed=("bool", 0), holders=("int32", 0),
            ready=("int64", 0), group=("int64", -1), member=("int32", 0), version_min=("int32", NO_VERSION),
            version_max=("int32", NO_VERSION), tokens=("int64", 0), seq=("int64", 0), born=("float64", 0),
            mark=("int64", 0),
        )  # fmt: skip
        self.first = first
        self._slots = Pool()
        self.count = self.doomed_count = self.next_seq = 0

    def check_room(self, count: int) -> None:
        if self._slots.used_up_to + count > MAX_SLOTS and self._slots.held < count:
            raise DockFull(
                f"a partition holds at most {MAX_SLOTS} rows at a time and has {self.count}; free some first"
            )

    def take(self, count: int, forced: np.ndarray | None) -> np.ndarray:
        """Slots for new rows; exactly `forced` if given."""
        if forced is None:
            slots = self._slots.take(count)
        else:
            slots = np.asarray(forced, np.int64)
            self._slots.force(slots)
        self.ensure(self._slots.used_up_to)
        return slots

    def add(
        self, slots: np.ndarray, groups: np.ndarray, members: np.ndarray, ready: np.int64, tokens: np.ndarray,
        now: float,
    ) -> None:  # fmt: skip
        """New rows in `slots`."""
        self.alive[slots] = True
        self.ready[slots] = ready
        self.group[slots] = groups
        self.member[slots] = members
        self.tokens[slots] = tokens
        self.version_min[slots] = NO_VERSION
        self.version_max[slots] = NO_VERSION
        self.seq[slots] = np.arange(self.next_seq, self.next_seq + len(slots))
        self.born[slots] = now
        self.next_seq += len(slots)
        self.count += len(slots)

    def remove(self, slots: np.ndarray) -> None:
        self.alive[slots] = False
        generation = self.generation[slots] + 1
        self.generation[slots] = generation
        if self.doomed_count:
            self.doomed_count -= int(np.count_nonzero(self.doomed[slots]))
            self.doomed[slots] = False
        self.count -= len(slots)
        fit = generation < LAST_GENERATION  # a worn-out slot is never used again
        self._slots.give(slots if np.count_nonzero(fit) == len(slots) else slots[fit])

    def doom(self, slots: np.ndarray) -> None:
        """These rows (not doomed yet) go when the last claim on them ends."""
        self.doomed[slots] = True
        self.doomed_count += len(slots)

    def lasting(self, slots: np.ndarray) -> np.ndarray:
        """Those of `slots` that are not on their way out."""
        return slots[~self.doomed[slots]] if self.doomed_count else slots

    def next_generation(self) -> int:
        """The first generation that no handle of this table has named."""
        return int(self.generation.max(initial=0)) + 1

    def note_versions(self, slots: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        """Widens the version range of rows: the oldest and the newest policy that wrote into them."""
        old = self.version_min[slots]
        self.version_min[slots] = np.where(old == NO_VERSION, low, np.minimum(old, low))
        self.version_max[slots] = np.maximum(self.version_max[slots], high)

    def check(self, rows: np.ndarray, slots: np.ndarray, generations: np.ndarray) -> None:
        """Raises StaleHandle unless each handle names a live row."""
        good = slots < self.capacity
        if np.count_nonzero(good) == len(good):
            good = self.alive[slots] & (self.generation[slots] == generations)
        else:
            good[good] = self.alive[slots[good]] & (self.generation[slots[good]] == generations[good])
        if np.count_nonzero(good) != len(good):
            bad = rows[~good]
            raise StaleHandle(
                f"{len(bad)} of {len(rows)} row handles are stale: their rows were freed (first: {int(bad[0])})"
            )


class GroupTable(Parallel):
    """Prompt groups: explicit id and size. A group leaves with its last row.

    The row slots of group g are `pool[start[g] : start[g] + fill[g]]`, in order of arrival; `room[g]` (a power of two)
    is what its block of the pool can take. Blocks are used again by size.
    """

    id: np.ndarray  # int64
    size: np.ndarray  # int64: rows that make it whole; shrinks when a member is dropped or freed
    alive: np.ndarray  # int64: rows that are there and not on their way out
    seq: np.ndarray  # int64: place in issue order (order of the puts)
    start: np.ndarray  # int64
    fill: np.ndarray  # int64
    room: np.ndarray  # int64

    def __init__(self) -> None:
        super().__init__(
            id=("int64", 0), size=("int64", 0), alive=("int64", 0), seq=("int64", -1), start=("int64", 0),
            fill=("int64", 0), room=("int64", 0), mark=("int64", 0),
        )  # fmt: skip
        self._slots = Pool()
        self._blocks: dict[int, Ring] = {}  # room -> where blocks of that size begin that nobody uses
        self.pool = np.zeros(256, np.int64)
        self._pool_end = 0
        self.by_id: dict[int, int] = {}
        self.next_seq = 0
        self.singles = True  # no group ever had more than one row: groups and rows are the same units

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """Slots of the groups `ids`, -1 for those that are not there."""
        get = self.by_id.get
        return np.array([get(i, -1) for i in ids.tolist()], np.int64)

    def add(self, ids: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Group slots for `ids` (distinct), with room for `counts` more rows each; existing groups are kept."""
        keys = ids.tolist()
        if self.by_id.keys().isdisjoint(keys):
            return self._create(keys, ids, sizes, counts)
        groups = self.lookup(ids)
        new = groups < 0
        if np.count_nonzero(new):
            groups[new] = self._create(ids[new].tolist(), ids[new], sizes[new], counts[new])
        short = self.fill[groups] + counts > self.room[groups]
        if np.count_nonzero(short):
            self._enlarge(groups[short], counts[short])
        return groups

    def _create(self, keys: list[int], ids: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        groups = self._slots.take(len(ids))
        self.ensure(self._slots.used_up_to)
        self.by_id.update(zip(keys, groups.tolist()))
        self.id[groups] = ids
        self.size[groups] = sizes
        self.alive[groups] = 0
        self.fill[groups] = 0
        self.seq[groups] = np.arange(self.next_seq, self.next_seq + len(groups))
        self.next_seq += len(groups)
        if self.singles and int(np.maximum.reduce(sizes)) > 1:
            self.singles = False
        if self.singles:
            self.room[groups] = 1
            self.start[groups] = self._blocks_of(1, len(groups))
            return groups
        room = 1 << np.ceil(np.log2(np.minimum(sizes, np.maximum(counts, _SMALL_GROUP)))).astype(np.int64)
        self.room[groups] = room
        self.start[groups] = self._allocate(room)
        return groups

    def _allocate(self, room: np.ndarray) -> np.ndarray:
        """Begins of blocks of these sizes."""
        low, high = int(room.min()), int(room.max())
        if low == high:
            return self._blocks_of(low, len(room))
        begins = np.empty(len(room), np.int64)
        for size in set(room.tolist()):  # powers of two: few
            chosen = room == size
            begins[chosen] = self._blocks_of(size, int(np.count_nonzero(chosen)))
        return begins

    def _blocks_of(self, size: int, count: int) -> np.ndarray:
        ring = self._blocks.get(size)
        old = ring.take(count) if ring is not None and ring.held else None
        fresh = count if old is None else count - len(old)
        begins = np.arange(self._pool_end, self._pool_end + fresh * size, size)
        self._pool_end += fresh * size
        enlarge(self.pool, self._pool_end, 0)
        return begins if old is None else np.concatenate((old, begins)) if fresh else old

    def _give_blocks(self, begins: np.ndarray, room: np.ndarray) -> None:
        low, high = int(room.min()), int(room.max())
        for size in (low,) if low == high else set(room.tolist()):
            ring = self._blocks.setdefault(size, Ring())
            ring.give(begins if low == high else begins[room == size])

    def _enlarge(self, groups: np.ndarray, counts: np.ndarray) -> None:
        fill, old, room = self.fill[groups], self.start[groups], self.room[groups]
        larger = 1 << np.ceil(np.log2(fill + counts)).astype(np.int64)
        begins = self._allocate(larger)
        self.pool[spans(begins, fill)] = self.pool[spans(old, fill)]
        self.start[groups], self.room[groups] = begins, larger
        self._give_blocks(old, room)

    def attach(self, groups: np.ndarray, counts: np.ndarray, row_slots: np.ndarray) -> None:
        """The next counts[g] of `row_slots` become members of group g."""
        fill = self.fill[groups]
        begins = self.start[groups] + fill
        self.pool[begins if len(groups) == len(row_slots) else spans(begins, counts)] = row_slots
        self.fill[groups] = fill + counts
        self.alive[groups] += counts

    def members(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row slots of `groups`, group after group, with those on their way out; and the number of each group."""
        fill = self.fill[groups]
        if self.singles:
            return self.pool[self.start[groups]], fill
        return self.pool[spans(self.start[groups], fill)], fill

    def shrink(self, groups: np.ndarray) -> np.ndarray:
        """One row less for each entry of `groups`; returns the groups that a row has left, once each."""
        np.subtract.at(self.size, groups, 1)
        np.subtract.at(self.alive, groups, 1)
        return groups if self.singles else groups[self.firsts(groups)]

    def detach(self, groups: np.ndarray, alive: np.ndarray) -> np.ndarray:
        """Forgets the rows of `groups` that are no longer `alive`; returns the groups that are empty now and gone."""
        if self.singles:
            gone = groups
        else:
            groups = groups[self.firsts(groups)]
            members, fill = self.members(groups)
            stay = alive[members]
            left = np.add.reduceat(stay, np.cumsum(fill) - fill, dtype=np.int64)
            if np.count_nonzero(left):
                self.pool[spans(self.start[groups], left)] = members[stay]
            self.fill[groups] = left
            gone = groups[left == 0]
        if len(gone):
            self.fill[gone] = 0
            deque(map(self.by_id.pop, self.id[gone].tolist()), maxlen=0)
            if self.singles:
                self._blocks.setdefault(1, Ring()).give(self.start[gone])
            else:
                self._give_blocks(self.start[gone], self.room[gone])
            self._slots.give(gone)
        return gone

    def live(self) -> np.ndarray:
        """Slots of all groups."""
        return np.flatnonzero(self.fill > 0)

    def find(self, ids: Sequence[int]) -> np.ndarray:
        """Slots of the groups `ids`, at least one; raises DockError when one is not there."""
        missing = [i for i in ids if i not in self.by_id]
        if missing or not len(ids):
            raise DockError(f"groups {missing[:4]} are not in this partition (never put, or freed with their last row)")
        return np.array([self.by_id[i] for i in dict.fromkeys(ids)], np.int64)
