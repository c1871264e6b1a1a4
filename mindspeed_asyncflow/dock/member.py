"""A pair as a member of a dock: its node with a journal, with peers, and with a stop for snapshots.

What a call did is in the journal before anybody is answered. A claim that the node cannot serve goes to the peers, and
a stream that has ended here is answered so when it has ended everywhere. A put is answered when the next pair in the
ring knows its groups. While one client has frozen the pair, the calls of all others wait.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.arena import Arena
from mindspeed_asyncflow.dock.columns import Schema
from mindspeed_asyncflow.dock.effects import describe_state
from mindspeed_asyncflow.dock.inventory import divide, export, find
from mindspeed_asyncflow.dock.journal import Effect, Journal, read_journal
from mindspeed_asyncflow.dock.link import Reply, Watcher
from mindspeed_asyncflow.dock.node import Answer, DockNode
from mindspeed_asyncflow.dock.partition import Partition
from mindspeed_asyncflow.dock.peers import Peers
from mindspeed_asyncflow.dock.rebuild import Rebuild
from mindspeed_asyncflow.dock.stolen import as_shares, for_peers
from mindspeed_asyncflow.dock.wire import Message, Verb
from mindspeed_asyncflow.errors import AsyncFlowError, DockError

_REMEMBERED, _REMEMBERED_BYTES = 512, 32 << 20  # answers kept for callers that repeat a call after a broken connection
_NOT_REMEMBERED = (Verb.READ, Verb.STATS, Verb.RESERVE, Verb.CHECK, Verb.FIND, Verb.LOST, Verb.EXPORT)
_NEVER_HELD = (Verb.READ, Verb.STATS, Verb.CHECK, Verb.CANCEL, Verb.MIRROR, Verb.LOST, Verb.FIND, Verb.JOIN)
_LONGEST_FREEZE_S = 3600.0
_PER_ROW_BYTES = 128  # most that one row of a call adds to the journal, per part
BOOT_SHIFT = 32  # claim ids, reservations and groups without a name: the number of the start, then a counter

Outcome = bytes | Answer | AsyncFlowError


@dataclass(slots=True)
class _Caller:
    verb: Verb
    client: int
    request: int
    message: Message
    connection: object
    deadline: float


class Member:
    def __init__(
        self, schema: Schema, arena: Arena, lease_s: float, pair: int, max_rows: int, secret: bytes, watcher: Watcher,
        now: float, restart: bool,
    ) -> None:  # fmt: skip
        effects = list(read_journal(journal_path(arena.path), arena.token)) if restart else []
        boot = 1 + max((fields["number"] for kind, fields in effects if kind == "boot"), default=-1)
        self._boot = boot
        self.node = DockNode(schema, arena, lease_s, pair, max_rows, first_claim=(boot << BOOT_SHIFT) + 1)
        self.peers = Peers(secret, watcher, self.node.cancel, self._stolen, self._groups)
        self.answers: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._answer_bytes = 0
        self._callers: dict[object, _Caller] = {}  # of calls that wait
        self._outcomes: list[tuple[object, Outcome]] = []
        self._team_asks: dict[tuple[str, str, str], object] = {}  # the claim of a team that other pairs are asked for
        self._frozen_by: int | None = None
        self._thaw_at = 0.0
        self._held: list[tuple[object, _Caller]] = []  # calls that came while another client had frozen the pair
        self._quarantine: list[tuple[float, np.ndarray]] = []  # bytes that a client of an earlier start may still write
        if restart:
            self._rebuild(effects, now, lease_s)
        self.journal = Journal(journal_path(arena.path), arena.token)
        self.journal.start(self._description())
        self.node.set_journal(self.journal.note)
        self.node.on_gone = self._gone
        self._own = {
            Verb.JOIN: self._join, Verb.MIRROR: self._mirror, Verb.LOST: self._lost, Verb.FORGET_PAIR: self._forget,
            Verb.FREEZE: self._freeze, Verb.THAW: self._thaw, Verb.CANCEL: self._cancel_call, Verb.STATS: self._stats,
            Verb.FIND: lambda message, now: find(self.node, message), Verb.EXPORT: lambda m, now: export(self.node, m),
            Verb.DIVIDE: lambda message, now: divide(self.node, message, now),
        }  # fmt: skip

    # -- calls -----------------------------------------------------------------------------------------------------

    def handle(
        self, verb: Verb, message: Message, connection: object, key: object, client: int, request: int, now: float
    ) -> Outcome | None:
        """The answer, or None when the call waits under `key`. Raises WireError; other errors are answers."""
        caller = _Caller(verb, client, request, message, connection, 0.0)
        if self._frozen_by not in (None, client) and verb not in _NEVER_HELD:
            self._held.append((key, caller))
            self._callers[key] = caller
            return None
        outcome = self._carry_out(key, caller, now)
        self._collect(now)
        self.journal.flush()
        return outcome

    def take_outcomes(self) -> list[tuple[object, Outcome]]:
        """Answers to calls that waited, since the last look."""
        found = self._outcomes
        if found:
            self._outcomes = []
        return found

    def _carry_out(self, key: object, caller: _Caller, now: float) -> Outcome | None:
        verb, message = caller.verb, caller.message
        own = self._own.get(verb)
        reply: dict | Answer | None
        try:
            if own is not None:
                message["caller"] = caller
                reply = own(message, now)
            else:
                self.journal.ensure_room(_journal_bytes(message))
                reply = self.node.handle(verb, message, caller.connection, key, now)
        except wire.WireError:
            raise
        except AsyncFlowError as error:
            return error
        if reply is None:
            caller.deadline = now + message.real("timeout_s")
            self._callers[key] = caller
            if verb is Verb.CLAIM:
                self._ask_peers(key, message, caller.deadline)
            return None
        return self._finished(key, caller, reply, now)

    def _finished(self, key: object, caller: _Caller, reply: dict | Answer, now: float) -> Outcome | None:
        """The call has its answer; None when the caller must wait for other pairs all the same."""
        verb = caller.verb
        if verb is Verb.CLAIM and self.peers.links and not caller.message.get("forwarded") and _is_end(reply):
            caller.deadline = caller.deadline or now + caller.message.real("timeout_s")
            if self.peers.hold_end(key, for_peers(caller.message), _body(reply), caller.deadline):
                self._callers[key] = caller
                return None
        outcome = self._framed(caller, reply)
        if verb is Verb.PUT and self.peers.links:
            ids = self.node.put_ids
            if self.peers.note(caller.message.text("partition"), ids, lambda: self._noted(key, outcome)):
                self._callers[key] = caller
                return None
        return outcome

    def _framed(self, caller: _Caller, reply: dict | Answer) -> Outcome:
        """The frame of an answer; it is kept for the case that its caller asks again, also after a restart."""
        body = _body(reply)
        frame = wire.frame(caller.verb, 0, caller.client, caller.request, body)
        if caller.verb not in _NOT_REMEMBERED:
            self._remember((caller.client, caller.request), frame)
            if self.journal.pending:
                self.journal.note("answer", {"client": caller.client, "request": caller.request, "frame": frame})
        return reply if isinstance(reply, Answer) else frame

    def _remember(self, identity: tuple[int, int], frame: bytes) -> None:
        self.answers[identity] = frame
        self._answer_bytes += len(frame)
        while len(self.answers) > _REMEMBERED or self._answer_bytes > _REMEMBERED_BYTES:
            self._answer_bytes -= len(self.answers.popitem(last=False)[1])

    def _collect(self, now: float) -> None:
        """Answers of the node to calls that waited."""
        while outcomes := self.node.take_outcomes():
            for key, reply in outcomes:
                caller = self._callers.pop(key, None)
                if caller is None:
                    continue
                if caller.verb is Verb.CLAIM:
                    self._stop_asking(key, caller.message)
                outcome: Outcome | None = reply if isinstance(reply, AsyncFlowError) else None
                if outcome is None and not isinstance(reply, AsyncFlowError):
                    outcome = self._finished(key, caller, reply, now)
                if outcome is not None:
                    self._outcomes.append((key, outcome))

    def cancel(self, key: object) -> None:
        """The asker of a call that waits is gone."""
        caller = self._callers.pop(key, None)
        self._held = [held for held in self._held if held[0] != key]
        if caller is not None and caller.verb is Verb.CLAIM:
            self._stop_asking(key, caller.message)
        self.node.cancel(key)

    def connection_lost(self, connection: object, now: float) -> None:
        self.node.connection_lost(connection, now)
        self._collect(now)

    def settle(self, now: float) -> None:
        """Answers that other pairs have brought."""
        self._collect(now)
        self.journal.flush()

    def unpin(self, answer: Answer, now: float) -> None:
        self.node.unpin(answer, now)
        self._collect(now)

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        self.node.tick(now)
        self.peers.tick(now)
        while self._quarantine and self._quarantine[0][0] <= now:
            self.node.warehouse.give(self._quarantine.pop(0)[1])
            self.node.settle(now)
        if self._frozen_by is not None and self._thaw_at <= now:
            self._end_freeze(now)
        self._collect(now)
        self.journal.flush()
        if self.journal.outgrown:
            self.journal.start(self._description())

    def next_deadline(self) -> float | None:
        times = [self.node.next_deadline(), self.peers.next_deadline()]
        if self._frozen_by is not None:
            times.append(self._thaw_at)
        if self._quarantine:
            times.append(self._quarantine[0][0])
        return min((time for time in times if time is not None), default=None)

    def close(self) -> None:
        self.peers.close()
        self.journal.close(remove=True)

    # -- restarts --------------------------------------------------------------------------------------------------

    def _description(self) -> Iterator[Effect]:
        yield "boot", {"number": self._boot}
        if self.peers.addresses:
            yield "join", {"index": self.peers.index, "addresses": self.peers.addresses}
        yield from describe_state(self.node.controller, self.node.warehouse)
        for number, spans in self.node.store.reserved_spans().items():
            yield "reserve", {"number": number, "spans": spans}
        for i, (_, spans) in enumerate(self._quarantine):
            yield "reserve", {"number": -1 - i, "spans": spans.reshape(-1)}
        for (client, request), frame in self.answers.items():
            yield "answer", {"client": client, "request": request, "frame": frame}

    def _rebuild(self, effects: Sequence[Effect], now: float, lease_s: float) -> None:
        state = Rebuild(self.node.controller, self.node.warehouse, now)
        state.run(effects)
        for identity, frame in state.answers.items():
            self._remember(identity, frame)
        if state.joined:
            self.node.set_pair(state.joined["index"])
            self.peers.join(**state.joined)
        self._quarantine = [(now + lease_s, spans) for spans in state.reserved.values() if len(spans)]

    # -- other pairs -----------------------------------------------------------------------------------------------

    def _ask_peers(self, key: object, message: Message, deadline: float) -> None:
        """Once per team: one round answers all its ranks."""
        if not self.peers.links or message.get("forwarded"):
            return
        team = _team(message)
        if team is None or self._team_asks.setdefault(team, key) == key:
            self.peers.parked(key, for_peers(message), deadline)

    def _stop_asking(self, key: object, message: Message) -> None:
        """A claim that waited needs no other pair any more; of a team, another rank that still waits takes over."""
        self.peers.answered(key)
        team = _team(message)
        if team is not None and self._team_asks.get(team) == key:
            del self._team_asks[team]
            for other, caller in self._callers.items():
                if caller.verb is Verb.CLAIM and _team(caller.message) == team:
                    self._ask_peers(other, caller.message, caller.deadline)
                    break

    def _stolen(self, key: object, call: Callable[..., int] | None, reply: Reply | dict[str, Any]) -> None:
        """Another pair, or all of them, have answered the claim of a caller here."""
        caller = self._callers.pop(key, None)
        if caller is None:
            return
        if isinstance(reply, AsyncFlowError):
            self._outcomes.append((key, reply))
        elif caller.message.get("team"):
            self._callers[key] = caller
            as_shares(self.node, caller.message, reply, call, self.peers.now)
        else:
            self._outcomes.append((key, self._framed(caller, dict(reply))))

    def _noted(self, key: object, outcome: Outcome) -> None:
        if self._callers.pop(key, None) is not None:
            self._outcomes.append((key, outcome))

    def _groups(self) -> dict[str, np.ndarray]:
        return {part.name: part.groups.id[part.groups.live()] for part in self.node.controller.partitions.values()}

    def _gone(self, part: Partition, groups: np.ndarray) -> None:
        if self.peers.links and len(groups):
            self.peers.note_gone(part.name, part.groups.id[groups])

    def _join(self, message: Message, now: float) -> dict:
        index, addresses = message.whole("index"), message.names("addresses")
        if not 0 <= index < len(addresses) <= 1 << 8:
            raise DockError(f"a dock has 1 to {1 << 8} pairs; this cannot be number {index} of {len(addresses)}")
        if not self.peers.addresses:
            self.node.set_pair(index)
            self.journal.note("join", {"index": index, "addresses": addresses})
        self.peers.now = now
        self.peers.join(index, addresses)
        return {}

    def _mirror(self, message: Message, now: float) -> dict:
        self.peers.mirror(message)
        return {}

    def _lost(self, message: Message, now: float) -> dict:
        found = self.peers.groups_of(message.whole("pair"))
        return {"partitions": list(found)} | {f"ids{i}": ids for i, ids in enumerate(found.values())}

    def _forget(self, message: Message, now: float) -> dict:
        self.peers.now = now
        self.peers.forget(message.whole("pair"))
        return {}

    def _cancel_call(self, message: Message, now: float) -> dict:
        caller: _Caller = message["caller"]
        self.cancel((caller.connection, message.whole("request")))
        return {}

    # -- stop ------------------------------------------------------------------------------------------------------

    def _freeze(self, message: Message, now: float) -> dict:
        seconds = message.real("for_s")
        if not 0 < seconds <= _LONGEST_FREEZE_S:
            raise DockError(f"a dock is frozen for up to {_LONGEST_FREEZE_S:g} s, not {seconds:g}")
        self._frozen_by, self._thaw_at = message["caller"].client, now + seconds
        self.node.controller.now = now
        self.node.controller.frozen = True
        return {}

    def _thaw(self, message: Message, now: float) -> dict:
        if self._frozen_by is None:
            raise DockError("the dock is not frozen: its time was over, or nobody froze it")
        self._end_freeze(now)
        return {}

    def _end_freeze(self, now: float) -> None:
        self._frozen_by = None
        self.node.controller.now = now
        self.node.controller.frozen = False
        held, self._held = self._held, []
        for key, caller in held:
            self._callers.pop(key, None)
            try:
                outcome = self._carry_out(key, caller, now)
            except wire.WireError as error:
                outcome = error
            if outcome is not None:
                self._outcomes.append((key, outcome))
        self.node.controller.wake(now)
        self.node.settle(now)

    def _stats(self, message: Message, now: float) -> dict:
        stats = self.node.verbs[Verb.STATS](message, now)
        assert isinstance(stats, dict)
        return stats | {
            "pair": self.node.pair,
            "pairs": len(self.peers.addresses) or 1,
            "journal_bytes": self.journal.size,
            "frozen": self._frozen_by is not None,
            "starts": self._boot + 1,
            "peers": asdict(self.peers.counters),
        }


def _team(message: Message) -> tuple[str, str, str] | None:
    return (message["partition"], message["task"], message["team"]) if message.get("team") else None


def journal_path(arena_path: str) -> str:
    return f"{arena_path}.journal"


def can_restart(arena_path: str) -> bool:
    return os.path.exists(arena_path) and os.path.exists(journal_path(arena_path))


def _body(reply: dict | Answer) -> dict[str, Any]:
    return reply.body if isinstance(reply, Answer) else reply


def _is_end(reply: dict | Answer) -> bool:
    body = _body(reply)
    return body["sealed"] and not body["grant"].shape[1] and not body["dropped_groups"]


def _journal_bytes(message: Mapping[str, Any]) -> int:
    rows = sum(len(value) for value in message.values() if isinstance(value, np.ndarray) and value.dtype != np.uint8)
    return _PER_ROW_BYTES * rows + (1 << 16)
