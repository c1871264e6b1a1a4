"""A pair as a member of a dock: its node with a journal, with peers, and with a stop for snapshots.

What a call did is in the journal before anybody is answered. A claim that the node cannot serve goes to the peers, and
a stream that has ended here is answered so when it has ended everywhere. A put is answered when the next pair in the
ring knows its groups. While one client has frozen the pair, the calls of all others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.arena import Arena
from mindspeed_asyncflow.dock.columns import Schema
from mindspeed_asyncflow.dock.inventory import divide, export, find
from mindspeed_asyncflow.dock.link import Link, Watcher
from mindspeed_asyncflow.dock.memory import Memory
from mindspeed_asyncflow.dock.node import Answer, DockNode
from mindspeed_asyncflow.dock.partition import Partition
from mindspeed_asyncflow.dock.peers import Peers
from mindspeed_asyncflow.dock.stolen import Lent, as_shares, for_peers, team_of
from mindspeed_asyncflow.dock.wire import Message, Verb
from mindspeed_asyncflow.errors import AsyncFlowError, DeadlineExceeded, DockError

_NOT_REMEMBERED = (Verb.READ, Verb.STATS, Verb.RESERVE, Verb.CHECK, Verb.FIND, Verb.LOST, Verb.EXPORT)
_NEVER_HELD = (Verb.READ, Verb.STATS, Verb.CHECK, Verb.CANCEL, Verb.MIRROR, Verb.LOST, Verb.FIND, Verb.JOIN)
_LONGEST_FREEZE_S = 3600.0

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
        now: float, restart: bool, life: int = 0,
    ) -> None:  # fmt: skip
        self.memory = memory = Memory(arena, restart, life)
        self.node = DockNode(schema, arena, lease_s, pair, max_rows, memory.first_number)
        self.peers = Peers(secret, watcher, self._stolen, self._groups)
        memory.start(self.node, self.peers, now, lease_s)
        self.journal, self.answers = memory.journal, memory.answers
        self._lent = Lent(self.node.controller.leases)
        self.messages = 0  # frames that came in, from clients and from other pairs
        self._callers: dict[object, _Caller] = {}  # of calls that wait
        self._outcomes: list[tuple[object, Outcome]] = []
        self._team_asks: dict[tuple[str, str, str], object] = {}  # the claim of a team that other pairs are asked for
        self._unasked: set[tuple[str, str, str]] = set()  # teams for which another rank has to ask
        self._frozen_by: int | None = None
        self._thaw_at = 0.0
        self._held: list[tuple[object, _Caller]] = []  # calls that came while another client had frozen the pair
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
        self.messages += 1
        self.peers.now = now
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
                if verb is Verb.CLAIM:
                    message["hold_end"] = self._asks_peers(message)
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
        return self._finished(key, caller, reply)

    def _finished(self, key: object, caller: _Caller, reply: dict | Answer) -> Outcome | None:
        """The call has its answer; None when the next pair has to note it first."""
        outcome = self._framed(caller, reply)
        if caller.verb is Verb.PUT:
            ids, partition = caller.message["put_ids"], caller.message.text("partition")
            if self.peers.note(partition, ids, lambda: self._noted(key, outcome)):
                self._callers[key] = caller
                return None
        return outcome

    def _framed(self, caller: _Caller, reply: dict | Answer) -> Outcome:
        """The frame of an answer; it is kept for the case that its caller asks again, also after a restart."""
        body = reply.body if isinstance(reply, Answer) else reply
        frame = wire.frame(caller.verb, 0, caller.client, caller.request, body)
        if caller.verb is Verb.DIVIDE:
            self._lent.note(caller.connection, body["claim_ids"].tolist())
        elif caller.verb is Verb.CLAIM and caller.message.get("forwarded"):
            self._lent.note(caller.connection, [body["claim_id"]])
        if caller.verb not in _NOT_REMEMBERED:
            self.answers.keep((caller.client, caller.request), frame)
            # a claim ends with a restart, and is made anew; only what it dropped would be told to nobody
            if self.journal.pending and (caller.verb is not Verb.CLAIM or body["dropped_groups"]):
                self.journal.note("answer", {"client": caller.client, "request": caller.request, "frame": frame})
        return reply if isinstance(reply, Answer) else frame

    def _collect(self, now: float) -> None:
        """Answers of the node to calls that waited."""
        while (outcomes := self.node.take_outcomes()) or self.node.controller.ends or self._unasked:
            for key, reply in outcomes:
                caller = self._callers.pop(key, None)
                if caller is None:
                    continue
                if caller.verb is Verb.CLAIM:
                    if isinstance(reply, DeadlineExceeded):
                        reply = DeadlineExceeded(f"{reply}{self.peers.missing(key)}")
                    self._stop_asking(key, caller.message)
                outcome = reply if isinstance(reply, AsyncFlowError) else self._finished(key, caller, reply)
                if outcome is not None:
                    self._outcomes.append((key, outcome))
            ends, self.node.controller.ends = self.node.controller.ends, []
            for key in ends:
                caller = self._callers.get(key)
                if caller is not None:
                    team = team_of(caller.message)
                    self.peers.ended_here(key if team is None else self._team_asks.get(team, key))
            if self._unasked:
                self._ask_for_teams(now)

    def cancel(self, key: object) -> None:
        """The asker of a call that waits is gone."""
        caller = self._callers.pop(key, None)
        self._held = [held for held in self._held if held[0] != key]
        if caller is not None and caller.verb is Verb.CLAIM:
            self._stop_asking(key, caller.message)
        self.node.cancel(key)

    def connection_lost(self, connection: object, now: float) -> None:
        """What was granted to another pair, and by nobody used, is offered again: nobody may have heard of it."""
        self.node.connection_lost(connection, now)
        for claim_id in self._lent.take_unused(connection):
            self.node.controller.release(claim_id, None, None, now)
        self.node.settle(now)
        self._collect(now)
        self.journal.flush()

    def serve_link(self, link: Link, now: float) -> None:
        """Something can be read from another pair, or sent to it."""
        self.peers.now = now
        self.messages += link.serve()

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
        self.memory.tick(now)
        if self._frozen_by is not None and self._thaw_at <= now:
            self._end_freeze(now)
        self._collect(now)
        self.journal.flush()
        self.memory.compact()

    def next_deadline(self) -> float | None:
        times = [self.node.next_deadline(), self.peers.next_deadline(), self.memory.next_deadline()]
        if self._frozen_by is not None:
            times.append(self._thaw_at)
        return min((time for time in times if time is not None), default=None)

    def close(self) -> None:
        self.peers.close()
        self.journal.close(remove=True)

    # -- other pairs -----------------------------------------------------------------------------------------------

    def _asks_peers(self, message: Message) -> bool:
        """Whether other pairs are asked for what this one does not have: not for a pair, nor without time to wait."""
        return bool(self.peers.links) and not message.get("forwarded") and message.real("timeout_s") > 0

    def _ask_peers(self, key: object, message: Message, deadline: float) -> None:
        """Once per team: one round answers all its ranks."""
        if not self._asks_peers(message):
            return
        team = team_of(message)
        if team is None or self._team_asks.setdefault(team, key) == key:
            self.peers.parked(key, for_peers(message), deadline, message.whole("claim_id"))

    def _stop_asking(self, key: object, message: Message) -> None:
        """A claim that waited needs no other pair any more; of a team, another rank that still waits takes over."""
        self.peers.answered(key)
        team = team_of(message)
        if team is not None and self._team_asks.get(team) == key:
            del self._team_asks[team]
            self._unasked.add(team)

    def _ask_for_teams(self, now: float) -> None:
        """Of teams for which nobody asks now, a rank that still waits does."""
        teams, self._unasked = self._unasked, set()
        for key, caller in list(self._callers.items()):
            team = team_of(caller.message) if caller.verb is Verb.CLAIM else None
            if team in teams:
                teams.discard(team)
                self._ask_again(key, caller, now)

    def _ask_again(self, key: object, caller: _Caller, now: float) -> None:
        """For a claim that has waited for a while: the stream of this pair may have ended for it."""
        self._ask_peers(key, caller.message, caller.deadline)
        control = self.node.controller
        control.touched.add((caller.message.text("partition"), caller.message.text("task")))
        control.wake(now)
        self.node.settle(now)

    def _stolen(self, key: object, call: Callable[..., int] | None, reply: dict[str, Any] | AsyncFlowError) -> None:
        """Another pair has granted what a caller here asks for; `call` None: the stream has ended at all pairs.

        An error: what it granted is lost.
        """
        caller = self._callers.get(key)
        if caller is None:
            if call is not None and not isinstance(reply, AsyncFlowError) and reply["grant"].shape[1]:
                call(Verb.RELEASE, {"claim_id": reply["claim_id"], "rows": np.ascontiguousarray(reply["grant"][0])})
            return
        if isinstance(reply, AsyncFlowError):
            self._ask_again(key, caller, self.peers.now)
            return
        team = team_of(caller.message)
        if team is None:
            self.node.cancel(key)
            del self._callers[key]
            self._outcomes.append((key, self._framed(caller, dict(reply))))
            return

        def lost() -> None:
            if self._team_asks.pop(team, None) is not None:
                self._unasked.add(team)

        as_shares(self.node, caller.message, reply, call, lost, self.peers.now)

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
        self.peers.join(index, addresses)
        return {}

    def _mirror(self, message: Message, now: float) -> dict:
        self.peers.mirror(message)
        return {}

    def _lost(self, message: Message, now: float) -> dict:
        found = self.peers.groups_of(message.whole("pair"))
        return {"partitions": list(found)} | {f"ids{i}": ids for i, ids in enumerate(found.values())}

    def _forget(self, message: Message, now: float) -> dict:
        number = message.whole("pair")
        if number not in self.peers.forgotten:
            self.peers.forget(number)
            self.journal.note("forget_pair", {"number": number})
        return {}

    def _cancel_call(self, message: Message, now: float) -> dict:
        caller: _Caller = message["caller"]
        key = (caller.connection, message.whole("request"))
        if key in self._callers:
            self.cancel(key)
            self._outcomes.append((key, DeadlineExceeded("the call was called off")))
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
            "forgotten_pairs": self.peers.forgotten,
            "messages": self.messages,
            "journal_bytes": self.journal.size,
            "frozen": self._frozen_by is not None,
            "starts": self.memory.boot + 1,
            "peers": asdict(self.peers.counters),
        }
