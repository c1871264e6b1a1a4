"""One controller/warehouse pair: the verbs of the dock over decoded messages. No sockets and no clock.

A verb answers with a dict, raises, or parks (returns None): claims wait in the controller for rows, puts and writes
wait here for bytes. Parked answers appear in `take_outcomes`. Writes may use the whole arena; puts leave a part of it
free, so that prompts never take the room that the answers to them need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock import report
from mindspeed_asyncflow.dock.columns import Schema
from mindspeed_asyncflow.dock.controller import Controller
from mindspeed_asyncflow.dock.partition import ClaimRequest, Grant, Partition
from mindspeed_asyncflow.dock.warehouse import Arena, Warehouse, check_fits, layout
from mindspeed_asyncflow.dock.wire import Message, Verb, WireError
from mindspeed_asyncflow.errors import AsyncFlowError, DeadlineExceeded, DockError

PUT_SHARE = 0.75  # of the arena: what puts may fill; the rest is for results
INLINE = -1  # `offset` of a message that carries its values


class _NoRoom(Exception):
    """Internal: the message must wait until bytes are free. Raised before anything was changed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@dataclass(slots=True)
class _Parked:
    verb: Verb
    message: Message
    nbytes: int
    started: float
    deadline: float


class DockNode:
    def __init__(self, schema: Schema, arena: Arena, lease_s: float) -> None:
        self.schema = schema
        self.controller = Controller(schema, lease_s)
        self.warehouse = Warehouse(list(schema.columns.values()), arena)
        self._reserved: dict[int, tuple[int, object]] = {}  # extent offset -> bytes, connection
        self._parked: dict[object, _Parked] = {}  # who waits for bytes, oldest first
        self._outcomes: list[tuple[object, dict | AsyncFlowError]] = []
        self.back_pressure_s = 0.0  # time that finished waits for bytes took
        self._verbs = {
            Verb.RESERVE: self._reserve, Verb.PUT: self._put, Verb.CLAIM: self._claim, Verb.READ: self._read,
            Verb.WRITE: self._write, Verb.DONE: self._done, Verb.RELEASE: self._release, Verb.DROP: self._drop,
            Verb.FREE: self._free, Verb.SEAL: self._seal, Verb.FORGET: self._forget, Verb.STATS: self._stats,
        }  # fmt: skip

    def handle(self, verb: Verb, message: Message, connection: object, key: object, now: float) -> dict | None:
        """The answer, or None when the call is parked under `key`. `connection` owns what the call reserves."""
        message["connection"] = connection
        message["key"] = key
        try:
            return self._verbs[verb](message, now)
        except _NoRoom as full:
            deadline = now + message.real("timeout_s")
            if deadline <= now:
                raise self._full(full.nbytes, 0.0) from None
            self._parked[key] = _Parked(verb, message, full.nbytes, now, deadline)
            return None
        except AsyncFlowError:
            self._forget_extent(message)
            raise
        finally:
            self._settle(now)

    def take_outcomes(self) -> list[tuple[object, dict | AsyncFlowError]]:
        """Answers to parked calls since the last look."""
        found = self._outcomes
        self._outcomes = []
        return found

    def tick(self, now: float) -> None:
        self.controller.tick(now)
        for key in [k for k, p in self._parked.items() if p.deadline <= now]:
            parked = self._parked.pop(key)
            self.back_pressure_s += now - parked.started
            self._outcomes.append((key, self._full(parked.nbytes, now - parked.started)))
        self._settle(now)

    def next_deadline(self) -> float | None:
        times = [p.deadline for p in self._parked.values()]
        control = self.controller.next_deadline()
        return min(times + ([] if control is None else [control]), default=None)

    def cancel(self, key: object) -> None:
        """The asker of a parked call is gone."""
        self._parked.pop(key, None)
        self.controller.cancel(key)

    def connection_lost(self, connection: object, now: float) -> None:
        for offset in [o for o, (_, owner) in self._reserved.items() if owner is connection]:
            self.cancel_extent(offset)
        self._settle(now)

    def cancel_extent(self, offset: int) -> None:
        """Gives back what was reserved and is not going to be used."""
        if offset in self._reserved:
            self.warehouse.cancel(offset, self._reserved.pop(offset)[0])

    def _forget_extent(self, message: Message) -> None:
        offset = message.get("offset")
        if isinstance(offset, int) and self._reserved.get(offset, (0, None))[1] is message["connection"]:
            self.cancel_extent(offset)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Frees the bytes of departed rows, then lets waiting puts and writes try again, then collects answers."""
        control = self.controller
        while True:
            departed, control.departed = control.departed, []
            for part, slots, groups in departed:
                for spec in self.schema.columns.values():
                    self.warehouse.release(part.number, spec.name, groups if spec.shared else slots)
            if not self._retry_parked(now):
                break
        outcomes, control.outcomes = control.outcomes, []
        self._outcomes += [(key, _grant_message(o) if isinstance(o, Grant) else o) for key, o in outcomes]

    def _retry_parked(self, now: float) -> bool:
        """Serves parked calls in their order, each kind (put, other) up to its first that does not fit."""
        served, blocked = False, set()
        for key, parked in list(self._parked.items()):
            kind = self._is_put(parked.verb, parked.message)
            if kind in blocked:
                continue
            result: dict | AsyncFlowError | None
            try:
                result = self._verbs[parked.verb](parked.message, now)
            except _NoRoom:
                blocked.add(kind)
                continue
            except AsyncFlowError as error:
                result = error
            assert result is not None  # only claims park twice, and they never wait for bytes
            del self._parked[key]
            self.back_pressure_s += now - parked.started
            self._outcomes.append((key, result))
            served = True
        return served

    @staticmethod
    def _is_put(verb: Verb, message: Message) -> bool:
        return verb is Verb.PUT or (verb is Verb.RESERVE and message.flag("put"))

    def _room(self, nbytes: int, put: bool) -> int:
        """Offset of a new extent. Raises DockFull when it can never be had, _NoRoom when not now."""
        capacity = self.warehouse.capacity_bytes
        most = int(capacity * PUT_SHARE) if put else capacity
        check_fits(nbytes, most)
        if put and self.warehouse.used_bytes + nbytes > most:
            raise _NoRoom(nbytes)
        offset = self.warehouse.reserve(nbytes)
        if offset is None:
            raise _NoRoom(nbytes)
        return offset

    def _full(self, nbytes: int, waited_s: float) -> DeadlineExceeded:
        rows = sum(part.rows.count for part in self.controller.partitions.values())
        return DeadlineExceeded(
            f"waited {waited_s:.1f} s for {nbytes} free bytes in the dock: {self.warehouse.used_bytes} of "
            f"{self.warehouse.capacity_bytes} are in use by {rows} rows that nobody freed; look why they are not "
            "consumed, or raise dock.arena_mb"
        )

    def _reserve(self, message: Message, now: float) -> dict:
        nbytes = message.whole("nbytes")
        if nbytes <= 0:
            raise WireError("a reservation needs a positive size")
        offset = self._room(nbytes, message.flag("put"))
        self._reserved[offset] = (nbytes, message["connection"])
        return {"offset": offset}

    def _lengths(self, message: Message, rows: int, shared_rows: int) -> dict[str, np.ndarray]:
        """Lengths per column of a put or write, checked against the schema and the number of rows."""
        found = {}
        for name in message.names("columns"):
            spec = self.schema.column(name)
            lengths = message.ints(f"lengths.{name}")
            expected = shared_rows if spec.shared else rows
            if len(lengths) != expected:
                raise DockError(f"column {name!r} came with {len(lengths)} rows, expected {expected}")
            if bool((lengths < 0).any()) or int(lengths.max(initial=0)) > self.warehouse.capacity_bytes:
                raise DockError(f"column {name!r} has a row of impossible length")
            if spec.kind == "scalar" and not bool((lengths == 1).all()):
                raise DockError(f"column {name!r} holds one value per row")
            found[name] = lengths
        return found

    def _fill(self, message: Message, lengths: dict[str, np.ndarray], put: bool) -> tuple[int, int, dict[str, int]]:
        """The extent with the values of a put or write in place: its offset, size, and where each column begins."""
        begins, total = layout(lengths, self.schema.columns)
        offset = message.whole("offset")
        if offset != INLINE:
            reserved, owner = self._reserved.get(offset, (-1, None))
            if owner is not message["connection"] or reserved != total:
                raise DockError("the bytes of this call were not reserved by its connection, or in another size")
            del self._reserved[offset]
        else:
            values = {name: message.array(f"values.{name}", self.schema.columns[name].dtype) for name in lengths}
            for name, array in values.items():
                if len(array) != lengths[name].sum():
                    raise DockError(f"column {name!r} came with {len(array)} values for {int(lengths[name].sum())}")
            offset = self._room(total, put)
            for name, array in values.items():
                self.warehouse.arena.store(offset + begins[name], array)
        return offset, total, {name: offset + begin for name, begin in begins.items()}

    def _tokens(self, lengths: dict[str, np.ndarray], counts: np.ndarray | None, rows: int) -> np.ndarray:
        total = np.zeros(rows, np.int64)
        for name, column in lengths.items():
            spec = self.schema.columns[name]
            if spec.tokens:
                total += np.repeat(column, counts) if spec.shared and counts is not None else column
        return total

    # -- verbs -----------------------------------------------------------------------------------------------------

    def _put(self, message: Message, now: float) -> dict:
        ids, sizes = message.ints("group_ids").tolist(), message.ints("sizes").tolist()
        counts, members = message.ints("counts"), message.ints("members", "int32")
        if not (len(ids) == len(sizes) == len(counts)) or not ids or counts.sum() != len(members):
            raise WireError("a put needs one size and count per group and one member number per row")
        part = self.controller.check_put(message.text("partition"), ids, sizes, counts.tolist())
        lengths = self._lengths(message, len(members), len(ids))
        late = np.array([i in part.groups.by_id for i in ids])  # their shared columns are there already
        offset, total, begins = self._fill(message, lengths, True)
        shared = {n: c for n, c in lengths.items() if self.schema.columns[n].shared}
        if late.any() and not self._same_shared(part, np.array(ids), late, begins, shared):
            self.warehouse.cancel(offset, total)
            raise DockError("members were put into a group whose shared columns have other values")
        ready = self.schema.mask(lengths)
        tokens = self._tokens(lengths, counts, len(members))
        slots, groups = self.controller.put(part, ids, sizes, counts, members, ready, tokens, now)
        for name, column in lengths.items():
            index, keep = (groups, ~late) if name in shared else (slots, np.ones(len(slots), bool))
            self.warehouse.place(part.number, name, index, begins[name], column, keep)
        return {"rows": part.handles(slots)}

    def _same_shared(
        self, part: Partition, ids: np.ndarray, late: np.ndarray, begins: dict[str, int], shared: dict[str, np.ndarray]
    ) -> bool:
        groups = part.groups.find(ids[late].tolist())
        return all(self._equal(part, name, groups, begins[name], lengths, late) for name, lengths in shared.items())

    def _equal(
        self, part: Partition, name: str, index: np.ndarray, begin: int, lengths: np.ndarray, which: np.ndarray
    ) -> bool:
        """Whether the cells `index` hold, to the bit, those of the new values at byte `begin` that `which` selects."""
        spec = self.schema.columns[name]
        old = self.warehouse.read(part.number, name, index)
        offsets = begin + (np.cumsum(lengths) - lengths) * spec.itemsize
        new = self.warehouse.arena.ragged(spec, offsets[which], lengths[which])
        same = np.array_equal(old.lengths, new.lengths)
        return same and old.packed().values.tobytes() == new.packed().values.tobytes()

    def _write(self, message: Message, now: float) -> dict:
        claim_id = message.optional_whole("claim_id")
        if claim_id is not None:
            self.controller.leases.get(claim_id, now)  # says "expired" rather than "stale" for a late result
        part, slots = self.controller.resolve(message.ints("rows"))
        if claim_id is not None:
            self.controller.held(claim_id, part, slots, now)
        lengths = self._lengths(message, len(slots), len(slots))
        if any(self.schema.columns[name].shared for name in lengths):
            raise DockError("shared columns are written by the put of their group")
        versions = None
        if message.get("version_min") is not None:
            versions = (message.ints("version_min", "int32"), message.ints("version_max", "int32"))
            if not len(versions[0]) == len(versions[1]) == len(slots) or not bool((versions[0] <= versions[1]).all()):
                raise DockError("versions are (oldest, newest) per row, oldest <= newest")
        offset, total, begins = self._fill(message, lengths, False)
        fresh = {}
        for name, column in lengths.items():
            again = (part.rows.ready[slots] & self.schema.bit[name]) != 0
            if again.any() and not self._equal(part, name, slots[again], begins[name], column, again):
                self.warehouse.cancel(offset, total)
                raise DockError(
                    f"column {name!r} of {int(again.sum())} rows has a result already, and another one came"
                )
            fresh[name] = ~again
        for name, column in lengths.items():
            self.warehouse.place(part.number, name, slots, begins[name], column, fresh[name])
        counted = {name: column * fresh[name] for name, column in lengths.items()}
        tokens = self._tokens(counted, None, len(slots))
        self.controller.commit(part, slots, self.schema.mask(lengths), tokens, versions, now)
        if claim_id is not None and message.flag("done"):
            self.controller.done(claim_id, part, slots, now)
        return {}

    def _read(self, message: Message, now: float) -> dict:
        """Where the cells are (`copy` false: offsets in bytes), or their packed values."""
        part, slots = self.controller.resolve(message.ints("rows"), repeats=True)
        out: dict[str, Any] = {}
        for name in message.names("columns"):
            spec = self.schema.column(name)
            missing = (part.rows.ready[slots] & self.schema.bit[name]) == 0
            if missing.any():
                raise DockError(f"column {name!r} of {int(missing.sum())} of {len(slots)} rows is not written yet")
            index = part.rows.group[slots] if spec.shared else slots
            if message.flag("copy"):
                ragged = self.warehouse.read(part.number, name, index).packed()
                out[f"values.{name}"], out[f"lengths.{name}"] = ragged.values, ragged.lengths
            else:
                out[f"offsets.{name}"], out[f"lengths.{name}"] = self.warehouse.locate(part.number, name, index)
        return out

    def _claim(self, message: Message, now: float) -> dict | None:
        group_ids = message.optional_ints("group_ids")
        request = ClaimRequest(
            task=message.text("task"), partition=message.text("partition"), count=message.whole("count"),
            worker=message.text("worker"), deadline=now + message.real("timeout_s"), key=message["key"],
            unit=message.text("unit"), policy=message.text("policy"),
            group_ids=None if group_ids is None else group_ids.tolist(),
            min_version=message.optional_whole("min_version"), at_least=message.whole("at_least"),
        )  # fmt: skip
        grant = self.controller.claim(request, now)
        return None if grant is None else _grant_message(grant)

    def _done(self, message: Message, now: float) -> dict:
        rows, claim_id = message.optional_ints("rows"), message.optional_whole("claim_id")
        part, slots = (None, None) if rows is None else self.controller.resolve(rows)
        if claim_id is not None:
            self.controller.done(claim_id, part, slots, now)
        elif part is not None and slots is not None:
            self.controller.done_rows(part, message.text("task"), slots, now)
        else:
            raise DockError("done needs a claim, or a task and rows")
        return {}

    def _release(self, message: Message, now: float) -> dict:
        rows = message.optional_ints("rows")
        part, slots = (None, None) if rows is None else self.controller.resolve(rows)
        self.controller.release(message.whole("claim_id"), part, slots, now)
        return {}

    def _drop(self, message: Message, now: float) -> dict:
        if (rows := message.optional_ints("rows")) is not None:
            part, slots = self.controller.resolve(rows)
        else:
            part = self.controller.open(message.text("partition"))
            slots = part.members(part.groups.find(message.ints("group_ids").tolist()))
        self.controller.drop(part, slots, message.text("reason"), now)
        return {}

    def _free(self, message: Message, now: float) -> dict:
        self.controller.free(*self.controller.resolve(message.ints("rows")), now)
        return {}

    def _seal(self, message: Message, now: float) -> dict:
        self.controller.seal(message.text("partition"), now)
        return {}

    def _forget(self, message: Message, now: float) -> dict:
        return {"claims": self.controller.forget_worker(message.text("worker"), now)}

    def _stats(self, message: Message, now: float) -> dict:
        house = self.warehouse
        return report.stats(self.controller) | {
            "arena_bytes": house.capacity_bytes,
            "used_bytes": house.used_bytes,
            "free_bytes": house.free_bytes,
            "payload_bytes": house.payload_bytes,
            "waiting_for_bytes": [{"verb": p.verb.name, "nbytes": p.nbytes} for p in self._parked.values()],
            "back_pressure_s": self.back_pressure_s,
        }


def _grant_message(grant: Grant) -> dict:
    return {
        "claim_id": grant.claim_id, "rows": grant.rows, "group_ids": grant.group_ids, "members": grant.members,
        "version_min": grant.version_min, "version_max": grant.version_max, "tokens": grant.tokens,
        "dropped_groups": [g for g, _, _ in grant.dropped], "dropped_reasons": [r for _, _, r in grant.dropped],
        "dropped_counts": [len(r) for _, r, _ in grant.dropped],
        "dropped_rows": np.concatenate([r for _, r, _ in grant.dropped]) if grant.dropped else np.empty(0, np.int64),
        "sealed": grant.sealed,
    }  # fmt: skip
