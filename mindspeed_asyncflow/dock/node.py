"""One controller/warehouse pair: the verbs of the dock over decoded messages. No sockets and no clock.

A verb answers with a dict or an `Answer`, raises, or parks (returns None): claims wait in the controller for rows,
puts and writes wait here for bytes and rows. Parked answers appear in `take_outcomes`. Writes may use the whole arena;
puts leave a part of it free, so that prompts never take the room that the answers to them need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mindspeed_asyncflow.dock import report
from mindspeed_asyncflow.dock.arena import Arena
from mindspeed_asyncflow.dock.columns import Schema
from mindspeed_asyncflow.dock.controller import Controller
from mindspeed_asyncflow.dock.effects import anonymous_groups, cell_fields, named_groups, put_effect, write_effect
from mindspeed_asyncflow.dock.joining import late_refusal, read_groups
from mindspeed_asyncflow.dock.leases import PAIR_SHIFT
from mindspeed_asyncflow.dock.messages import grant_message, read_ask, read_versions
from mindspeed_asyncflow.dock.partition import ClaimRequest, Grant, Partition
from mindspeed_asyncflow.dock.renewal import second_results
from mindspeed_asyncflow.dock.store import NoRoom, Outgoing, Store
from mindspeed_asyncflow.dock.verbs import ControlVerbs
from mindspeed_asyncflow.dock.warehouse import Placed, Warehouse
from mindspeed_asyncflow.dock.wire import Message, Verb, WireError
from mindspeed_asyncflow.errors import AsyncFlowError, DeadlineExceeded, DockError

MOST_ROWS = 1 << 22  # of one call
_NO_ROWS = np.empty(0, np.int64)
_PUTS = (Verb.PUT, Verb.RESERVE)


@dataclass(slots=True)
class Answer:
    """An answer with values: `body` may be given again to a caller that repeats its call, the rest may not."""

    body: dict
    part: Partition
    slots: np.ndarray  # int64: rows whose bytes are sent
    extra: dict = field(default_factory=dict)
    stream: Outgoing | None = None


@dataclass(slots=True)
class _Parked:
    verb: Verb
    message: Message
    what: str
    started: float
    deadline: float


class DockNode(ControlVerbs):
    """`journal` is told of every effect of a call (see `rebuild`), `on_gone` of groups that leave (group slots);
    `before` raises when a call must not be carried out."""

    def __init__(
        self, schema: Schema, arena: Arena, lease_s: float, pair: int = 0, max_rows: int = 0, first_claim: int = 1
    ) -> None:
        self.schema, self.pair = schema, pair
        self.controller = Controller(schema, lease_s, pair=pair, first_claim=first_claim)
        self.warehouse = Warehouse(list(schema.columns.values()), arena)
        self.store = Store(schema, self.warehouse, max_rows, first_claim)
        self.journal: Callable[[str, dict], None] | None = None
        self.on_gone: Callable[[Partition, np.ndarray], None] | None = None
        self.before: Callable[[Message], None] = lambda message: None
        self._parked: dict[object, _Parked] = {}  # who waits for room, oldest first
        self._wanted: dict[object, tuple[list[str], bool]] = {}  # columns that parked claims ask for; as bytes?
        self._outcomes: list[tuple[object, dict | Answer | AsyncFlowError]] = []
        self._anonymous = (pair << PAIR_SHIFT) + first_claim  # ids of groups that a put did not name: minus this
        self.back_pressure_s = 0.0  # time that finished waits for room took
        self.verbs: dict[Verb, Callable[[Message, float], dict | Answer | None]] = {
            Verb.RESERVE: self._reserve, Verb.PUT: self._put, Verb.CLAIM: self._claim, Verb.READ: self._read,
            Verb.WRITE: self._write, Verb.DONE: self._done, Verb.RELEASE: self._release, Verb.DROP: self._drop,
            Verb.FREE: self._free, Verb.SEAL: self._seal, Verb.FORGET: self._forget, Verb.STATS: self._stats,
            Verb.TASK: self._task, Verb.CLOSE: self._close, Verb.FINISH: self._finish, Verb.CHECK: self._check,
            Verb.RENEW: self._renew,
        }  # fmt: skip

    def set_journal(self, note: Callable[[str, dict], None]) -> None:
        self.journal = self.controller.journal = self.store.journal = note

    def set_pair(self, pair: int) -> None:
        """The number of this pair in its dock. Raises DockError when rows carry another one already."""
        if pair != self.pair and self.controller.partitions:
            raise DockError(f"this pair has partitions as number {self.pair} and cannot become number {pair}")
        self._anonymous += (pair - self.pair) << PAIR_SHIFT
        self.pair = pair
        self.controller.set_pair(pair)

    def handle(self, verb: Verb, message: Message, connection: object, key: object, now: float) -> dict | Answer | None:
        """The answer, or None when the call is parked under `key`. `connection` owns what the call reserves."""
        action = self.verbs.get(verb)
        if action is None:
            raise WireError(f"{verb.name} is not for this server")
        message["connection"] = connection
        message["key"] = key
        try:
            self.before(message)
            return action(message, now)
        except NoRoom as full:
            deadline = now + message.real("timeout_s")
            if deadline <= now:
                self._forget_reserved(message)
                raise self._full(full.what, 0.0) from None
            self._parked[key] = _Parked(verb, message, full.what, now, deadline)
            return None
        except AsyncFlowError:
            self._forget_reserved(message)
            raise
        finally:
            self.settle(now)

    def take_outcomes(self) -> list[tuple[object, dict | Answer | AsyncFlowError]]:
        """Answers to parked calls since the last look."""
        found = self._outcomes
        if found:
            self._outcomes = []
        return found

    def tick(self, now: float) -> None:
        self.controller.tick(now)
        for key in [k for k, p in self._parked.items() if p.deadline <= now]:
            parked = self._parked.pop(key)
            self.back_pressure_s += now - parked.started
            self._forget_reserved(parked.message)
            self._outcomes.append((key, self._full(parked.what, now - parked.started)))
        self.settle(now)

    def next_deadline(self) -> float | None:
        control = self.controller.next_deadline()
        if not self._parked:
            return control
        times = [p.deadline for p in self._parked.values()]
        return min(times if control is None else [*times, control])

    def cancel(self, key: object) -> None:
        """The asker of a parked call is gone."""
        self._parked.pop(key, None)
        self._wanted.pop(key, None)
        self.controller.cancel(key)

    def connection_lost(self, connection: object, now: float) -> None:
        if self.store.cancel_of(connection):
            self.room_made(now)

    def room_made(self, now: float) -> None:
        """Bytes are free again that no row had."""
        self._retry_parked(now)
        self.settle(now)

    def pin(self, answer: Answer) -> None:
        """Bytes of these rows are on their way: they stay, whatever happens to the rows, until `unpin`."""
        self.controller.pin(answer.part, answer.slots)

    def unpin(self, answer: Answer, now: float) -> None:
        self.controller.unpin(answer.part, answer.slots, now)
        self.settle(now)

    def settle(self, now: float) -> None:
        """Frees the bytes of departed rows, then lets waiting puts and writes try again, then collects answers."""
        control = self.controller
        while control.departed:
            departed, control.departed = control.departed, []
            for part, slots, groups in departed:
                if self.on_gone is not None:
                    self.on_gone(part, groups)
                self.warehouse.release_rows(part.number, slots, groups)
            if self._parked:
                self._retry_parked(now)
        if control.outcomes:
            outcomes, control.outcomes = control.outcomes, []
            for key, outcome in outcomes:
                columns, copy = self._wanted.pop(key, ([], False))
                granted = self._granted(outcome, columns, copy) if isinstance(outcome, Grant) else outcome
                self._outcomes.append((key, granted))

    def _retry_parked(self, now: float) -> None:
        """Serves parked calls in their order, each kind (put, other) up to its first that does not fit."""
        blocked = set()
        for key, parked in list(self._parked.items()):
            kind = parked.verb is Verb.PUT or (parked.verb is Verb.RESERVE and parked.message.flag("put"))
            if kind in blocked:
                continue
            result: dict | Answer | AsyncFlowError | None
            try:
                self.before(parked.message)
                result = self.verbs[parked.verb](parked.message, now)
            except NoRoom:
                blocked.add(kind)
                continue
            except AsyncFlowError as error:
                self._forget_reserved(parked.message)
                result = error
            assert result is not None  # only claims park in the controller, and they never wait for room
            del self._parked[key]
            self.back_pressure_s += now - parked.started
            self._outcomes.append((key, result))

    def _forget_reserved(self, message: Message) -> None:
        number = message.get("reservation")
        if isinstance(number, int) and number:
            self.store.cancel_of(message["connection"], number)

    @property
    def live_rows(self) -> int:
        return sum([part.rows.count for part in self.controller.partitions.values()])

    def _full(self, what: str, waited_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"waited {waited_s:.1f} s for {what} in the dock: {self.warehouse.used_bytes} of "
            f"{self.warehouse.capacity_bytes} bytes are in use by {self.live_rows} rows that nobody freed or "
            f"reserved for calls under way ({self.store.reserved_bytes}); look why they are not consumed, or raise "
            "dock.arena_mb or dock.max_rows"
        )

    # -- rows and values -------------------------------------------------------------------------------------------

    def _reserve(self, message: Message, now: float) -> dict:
        rows, groups, connection = message.whole("rows"), message.whole("groups"), message["connection"]
        if not 0 < rows <= MOST_ROWS or not 0 <= groups <= rows:
            raise WireError(f"a reservation is for 1 to {MOST_ROWS} rows")
        if message.flag("put"):
            self.store.check_rows(rows, self.live_rows)
        if (instead := message.optional_whole("instead")) is not None:
            self.store.cancel_of(connection, instead)
        if (nbytes := message.optional_whole("nbytes")) is not None:
            return self.store.reserve_stretch(nbytes, connection, message.flag("put"))
        return self.store.reserve(message, connection, message.names("columns"), rows, groups)

    def _with_room_ahead(self, body: dict, message: Message, part: Partition, put: bool) -> dict | Answer:
        """The answer to a put or write, with room for the next one of this client if it asks for it."""
        wanted = message.optional_whole("ahead")
        ahead = {} if self._parked else self.store.ahead(wanted, message["connection"], put)
        return Answer(body, part, _NO_ROWS, {"ahead": [ahead["reservation"], ahead["offset"]]}) if ahead else body

    def _put(self, message: Message, now: float) -> dict | Answer:
        ids, sizes, counts, members = self._groups(message)
        rows = len(members)
        message["put_ids"] = ids
        anonymous = message.get("group_ids") is None
        part = self.controller.check_put(message.text("partition"), ids, sizes, counts, anonymous)
        versions = read_versions(message, rows)
        self.store.check_rows(rows, self.live_rows)
        fresh = None  # which groups are new, where others are there already, with their shared columns
        if not anonymous and not part.groups.by_id.keys().isdisjoint(ids.tolist()):
            fresh = part.groups.lookup(ids) < 0
        values = self.store.fill(message, message["connection"], rows, len(ids), True)
        refusal = "" if fresh is None else late_refusal(self.store, part, ids, ~fresh, members, counts, values)
        if refusal:
            self.store.give_up(values)
            raise DockError(refusal)
        ready = self.schema.layout(values.columns).mask
        at_once = ready if versions is None else np.int64(0)
        tokens = self.store.tokens(values, counts, rows, {})
        with self.controller.unwoken(now):
            slots, groups = self.controller.put(part, ids, sizes, counts, members, at_once, tokens, now)
            self.warehouse.place(part.number, [
                Placed(cell.name, groups, offsets, lengths, fresh) if cell.shared else
                Placed(cell.name, slots, offsets, lengths)
                for cell, lengths, offsets in zip(values.parts, values.lengths, values.offsets)
            ])  # fmt: skip
            if versions is not None:
                self.controller.commit(part, slots, ready, None, versions, now)
            if self.journal is not None:
                kept = {} if fresh is None else {cell.name: fresh for cell in values.parts if cell.shared}
                effect = put_effect(part, slots, ready, tokens, now, versions)
                effect |= anonymous_groups(ids) if anonymous else named_groups(ids, sizes, counts, members)
                self.journal("put", effect | cell_fields(part, values, slots, groups, kept))
            handles = part.handles(slots)
        body = {"rows": handles, "free_bytes": self.warehouse.free_bytes, "live_rows": self.live_rows}
        return self._with_room_ahead(body, message, part, True)

    def _groups(self, message: Message) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Group ids, sizes and counts, and the members, of a put; without ids each row is a group of its own."""
        if message.get("group_ids") is not None:
            return read_groups(message, MOST_ROWS)
        rows = message.whole("count")
        if not 0 < rows <= MOST_ROWS:
            raise WireError(f"a put is of 1 to {MOST_ROWS} rows")
        ones = np.ones(rows, np.int64)
        return self._fresh_ids(message.text("partition"), rows), ones, ones, np.zeros(rows, np.int32)

    def _fresh_ids(self, partition: str, rows: int) -> np.ndarray:
        """Ids of groups that a put did not name; never one that a restored or named group of the partition has."""
        part = self.controller.partitions.get(partition)
        while True:
            ids = np.arange(-self._anonymous, -self._anonymous - rows, -1)
            self._anonymous += rows
            taken = part.groups.by_id.keys() & set(ids.tolist()) if part is not None else ()
            if not taken:
                return ids
            self._anonymous = max(self._anonymous, 1 - min(part.groups.by_id)) if part is not None else 0

    def _write(self, message: Message, now: float) -> dict | Answer:
        claim_id = message.optional_whole("claim_id")
        if claim_id is not None:
            self.controller.leases.get(claim_id, now)  # says "expired" rather than "stale" for a late result
        part, slots = self.controller.resolve(message.ints("rows"))
        if claim_id is not None:
            self.controller.held(claim_id, part, slots, now)
        versions = read_versions(message, len(slots))
        values = self.store.fill(message, message["connection"], len(slots), len(slots), False)
        refusal, fresh, replaced = second_results(self.store, part, slots, values, claim_id is not None)
        if refusal:
            self.store.give_up(values)
            raise DockError(refusal)
        if replaced:
            self.warehouse.release(part.number, replaced)
        self.warehouse.place(part.number, [
            Placed(cell.name, slots, offsets, lengths, fresh.get(cell.name))
            for cell, lengths, offsets in zip(values.parts, values.lengths, values.offsets)
        ])  # fmt: skip
        tokens = self.store.tokens(values, None, len(slots), fresh)
        ready = self.schema.layout(values.columns).mask
        with self.controller.unwoken(now):
            self.controller.commit(part, slots, ready, tokens, versions, now)
            if self.journal is not None:
                self.journal("write", write_effect(part, slots, ready) | cell_fields(part, values, slots, None, fresh))
        if claim_id is not None and message.flag("done"):
            self.controller.done(claim_id, part, slots, now)
        return self._with_room_ahead({}, message, part, False)

    def _read(self, message: Message, now: float) -> Answer:
        part, slots = self.controller.resolve(message.ints("rows"), repeats=True)
        answer = Answer({}, part, slots)
        self._attach(answer, message.names("columns"), message.flag("copy"))
        return answer

    def _attach(self, answer: Answer, columns: list[str], copy: bool) -> None:
        """Adds where the cells are (`copy` false: offsets in bytes) or their bytes, and their lengths."""
        cells = self.store.locate(answer.part, answer.slots, columns)
        if copy:
            answer.extra["lengths"] = cells[1::2]
            answer.stream = self.store.stream(columns, cells)
        else:
            answer.extra["cells"] = cells

    def _check(self, message: Message, now: float) -> dict:
        self.controller.resolve(message.ints("rows"), repeats=True)
        return {}

    # -- claims ----------------------------------------------------------------------------------------------------

    def _claim(self, message: Message, now: float) -> dict | Answer | None:
        group_ids = message.optional_ints("group_ids")
        ask = read_ask(message)
        task = self.schema.task(ask.task)
        strange = [name for name in ask.columns if name not in task.columns]
        if strange:
            raise DockError(f"a claim brings columns that its task reads; task {task.name!r} does not read {strange}")
        request = ClaimRequest(
            ask.task, ask.partition, ask.count, ask.worker, now + ask.timeout_s, message["key"], ask.unit, ask.policy,
            None if group_ids is None else group_ids.tolist(), ask.min_version, ask.at_least, ask.max_age_s, ask.seed,
            ask.team, ask.rank, ask.ranks, ask.split, ask.claim_id, message.get("hold_end") is True,
        )  # fmt: skip
        grant = self.controller.claim(request, now)
        if grant is not None:
            return self._granted(grant, ask.columns, ask.copy)
        if ask.columns:
            self._wanted[message["key"]] = (ask.columns, ask.copy)
        return None

    def _granted(self, grant: Grant, columns: list[str], copy: bool) -> dict | Answer:
        body = grant_message(grant)
        if not columns or not len(grant.rows):
            return body
        claim = self.controller.leases.open.get(grant.claim_id)
        if claim is not None and claim.slots is grant.slots:  # held since the grant: there is nothing to be checked
            answer = Answer(body, self.controller.partitions[claim.partition], claim.slots)
        else:
            answer = Answer(body, *self.controller.resolve(grant.rows))
        self._attach(answer, columns, copy)
        return answer

    def _stats(self, message: Message, now: float) -> dict:
        house, reserved = self.warehouse, self.store.reserved_bytes
        self.controller.now = now
        return report.stats(self.controller) | {
            "arena_bytes": house.capacity_bytes,
            "used_bytes": house.used_bytes - reserved,
            "reserved_bytes": reserved,
            "free_bytes": house.free_bytes,
            "peak_bytes": house.peak_bytes,
            "payload_bytes": house.payload_bytes,
            "live_rows": self.live_rows,
            "column_bytes": house.bytes_by_column(),
            "waiting_for_room": [
                {"verb": p.verb.name, "for": p.what, "waited_s": now - p.started} for p in self._parked.values()
            ],
            "back_pressure_s": self.back_pressure_s,
        }
