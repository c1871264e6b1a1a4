"""What the pairs of a dock do for each other: serve each other's waiting consumers, and remember each other's groups.

A claim is always asked of one pair. When that pair has nothing, it asks all others on behalf of the waiting request;
the first grant answers it, the other asks are called off, and a grant that comes too late is given back at once. A
stream has ended for a consumer when every pair says so. Each pair tells the next one in the ring which groups it
holds, before the producer gets its answer: when a pair is lost with its node, that one can name them.

No pair decides for another and none sees another's rows: what travels is one claim, one grant, and group ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.link import Link, Reply, Watcher
from mindspeed_asyncflow.dock.wire import Message, Verb
from mindspeed_asyncflow.errors import AsyncFlowError, DockError

MIRROR_S = 1.0  # a put waits at most this long for the next pair to note its groups
Answer = Callable[[object, Callable[..., int] | None, dict[str, Any] | AsyncFlowError], None]  # key, way there, reply


@dataclass(slots=True)
class _Ask:
    """One waiting request and what the other pairs were asked for it."""

    message: Mapping[str, Any]
    deadline: float
    spread: int  # id of the claim over several pairs that rows are for, or 0
    requests: dict[int, int] = field(default_factory=dict)  # pair -> request number of the claim there
    ended: set[int] = field(default_factory=set)  # pairs where the stream has ended for this consumer
    doubtful: set[int] = field(default_factory=set)  # pairs whose word that it has ended is worth nothing: see below
    ended_here: bool = False  # the stream of this pair has ended for it


@dataclass(slots=True)
class PeerCounters:
    """Since the start of the pair."""

    steals: int = 0  # claims of consumers here that another pair served
    steals_returned: int = 0  # grants of another pair that came too late
    unmirrored_puts: int = 0  # answered without the note of the next pair
    stolen_rows: int = 0


class Peers:
    """`answer(key, way, reply)` answers a waiting request; `groups()` are those of this pair, by partition.

    `now` is the clock of the server, set by whoever calls.
    """

    def __init__(
        self, secret: bytes, watcher: Watcher, answer: Answer, groups: Callable[[], dict[str, np.ndarray]]
    ) -> None:  # fmt: skip
        self._secret, self._watcher = secret, watcher
        self._answer, self._groups = answer, groups
        self.now = 0.0  # s
        self.forgotten: list[int] = []  # pairs that are lost for good
        self.index = 0
        self.addresses: list[str] = []
        self.links: dict[int, Link] = {}
        self.counters = PeerCounters()
        self._asks: dict[object, _Ask] = {}
        self._noted: dict[int, dict[str, set[int]]] = {}  # pair -> partition -> group ids that it holds
        self._unnoted: dict[object, tuple[float, Callable[[], None]]] = {}  # puts that wait for the note
        self._synced = False  # the next pair in the ring has been told all groups of this one
        self._lagging = False  # it was late to say so

    # -- who is there ----------------------------------------------------------------------------------------------

    def join(self, index: int, addresses: Sequence[str]) -> None:
        """This is pair `index` of `addresses`. Saying the same again changes nothing."""
        if self.addresses:
            if (index, list(addresses)) != (self.index, self.addresses):
                raise DockError(f"this pair is number {self.index} of {self.addresses} already")
            return
        self.index, self.addresses = index, list(addresses)
        for number, address in enumerate(addresses):
            if number != index:
                self.links[number] = Link(number, address, self._secret, self._watcher, self._changed)

    def forget(self, number: int) -> None:
        """Pair `number` is lost for good: nobody waits for it any more."""
        if number not in self.links:
            raise DockError(f"pair {self.index} knows no other pair of the number {number}")
        self.forgotten.append(number)
        was_next = self._next is self.links[number]
        link = self.links.pop(number)
        link.close()
        if was_next:
            self._synced = False
            self._sync()
        for key in list(self._asks):
            self._look_for_end(key)

    @property
    def _next(self) -> Link | None:
        """The pair after this one in the ring that is not forgotten."""
        order = sorted(self.links, key=lambda n: (n - self.index) % len(self.addresses))
        return self.links[order[0]] if order else None

    def _changed(self, link: Link) -> None:
        if link is self._next:
            self._synced = False
            self._sync()
        if link.up:
            for key in list(self._asks):
                self._ask(key, link)
        else:
            for ask in self._asks.values():
                ask.requests.pop(link.number, None)
                ask.ended.discard(link.number)  # with its claims, which may be what the stream ended for
                ask.doubtful.discard(link.number)

    # -- claims ----------------------------------------------------------------------------------------------------

    def parked(self, key: object, message: Mapping[str, Any], deadline: float, spread: int = 0) -> None:
        """This pair cannot serve a claim yet: `message` is asked of the others. `spread`: see `_rename`."""
        self._asks[key] = _Ask(message, deadline, spread)
        for link in list(self.links.values()):
            self._ask(key, link)

    def answered(self, key: object) -> None:
        """The request was served here, or its asker is gone: call off what others were asked for it."""
        ask = self._asks.pop(key, None)
        if ask is not None:
            self._call_off(ask)

    def ended_here(self, key: object) -> None:
        """The stream of this pair has ended for a request; it is answered so when it has ended at all pairs."""
        if key in self._asks:
            self._asks[key].ended_here = True
            self._look_for_end(key)

    def missing(self, key: object) -> str:
        """In words: which pairs an ended stream still waits for."""
        ask = self._asks.get(key)
        if ask is None or not ask.ended_here:
            return ""
        missing = ", ".join(f"{n} at {self.addresses[n]}" for n in sorted(set(self.links) - ask.ended))
        return f"; pair {self.index} has nothing more for this stream, but pairs {missing} have more, or do not answer"

    def _ask(self, key: object, link: Link) -> None:
        ask = self._asks[key]
        if not link.up or link.number in ask.requests:
            return
        message = dict(ask.message) | {"timeout_s": max(ask.deadline - self.now, 0.0) + 1.0}
        ask.requests[link.number] = link.call(
            Verb.CLAIM, message, lambda reply: self._granted(key, link, message, reply)
        )

    def _granted(self, key: object, link: Link, message: Mapping[str, Any], reply: Reply) -> None:
        ask = self._asks.get(key)
        if isinstance(reply, AsyncFlowError):
            if ask is not None:
                ask.requests.pop(link.number, None)
            return
        rows = reply.matrix("grant", 6)
        if ask is None:
            self._give_back(link, message, reply, rows[0])
            return
        ask.requests.pop(link.number, None)
        if reply.flag("sealed") and not rows.shape[1] and not reply["dropped_groups"]:
            if link.number in ask.doubtful:
                ask.doubtful.discard(link.number)
                self._ask(key, link)
                return
            ask.ended.add(link.number)
            self._look_for_end(key)
            return
        self.counters.steals += 1
        self.counters.stolen_rows += rows.shape[1]
        del self._asks[key]
        self._call_off(ask)
        if ask.spread and rows.shape[1]:
            self._rename(key, link, ask, reply, rows[0])
        else:
            self._answer(key, link.call, reply)

    def _rename(self, key: object, link: Link, ask: _Ask, reply: Message, rows: np.ndarray) -> None:
        """Rows for a claim over several pairs come under its id only when it is sure that they are used.

        Its client may end it any time, wherever it has rows: those of a grant that comes too late must not be meant.
        """

        def renamed(answer: Reply) -> None:
            if isinstance(answer, AsyncFlowError):
                self._answer(key, None, answer)
            else:
                self._answer(key, link.call, reply | {"claim_id": ask.spread})

        link.call(Verb.DIVIDE, {
            "claim_id": reply.whole("claim_id"), "rows": np.ascontiguousarray(rows), "counts": np.array([len(rows)]),
            "workers": [ask.message["worker"]], "spread": ask.spread,
        }, renamed)  # fmt: skip

    def _give_back(self, link: Link, message: Mapping[str, Any], reply: Message, rows: np.ndarray) -> None:
        """A consumer's own rows do not keep its stream from ending: asks that this pair got while it thought that these
        were the consumer's are made again when they are answered so."""
        if len(rows):
            self.counters.steals_returned += 1
            for ask in self._asks.values():
                if link.number in ask.requests and _consumer(ask.message) == _consumer(message):
                    ask.doubtful.add(link.number)
            link.call(Verb.RELEASE, {"claim_id": reply.whole("claim_id"), "rows": np.ascontiguousarray(rows)})

    def _call_off(self, ask: _Ask) -> None:
        for number, request in ask.requests.items():
            link = self.links.get(number)
            if link is not None and link.up:
                link.call(Verb.CANCEL, {"request": request})  # the claim's own callback gives back what comes late

    def _look_for_end(self, key: object) -> None:
        ask = self._asks[key]
        if ask.ended_here and set(self.links) <= ask.ended:
            del self._asks[key]
            nothing = np.empty((6, 0), np.int64)
            self._answer(key, None, {"claim_id": 0, "sealed": True, "ready": 0, "grant": nothing, "dropped_groups": []})

    # -- groups ----------------------------------------------------------------------------------------------------

    def note(self, partition: str, ids: np.ndarray, then: Callable[[], None]) -> bool:
        """Groups were put here: the next pair notes them, then `then` runs. False: there is nobody to wait for."""
        link = self._next
        if link is None:
            return False
        if not link.up or not self._synced:
            self.counters.unmirrored_puts += 1
            return False
        token = object()

        def noted(reply: Reply) -> None:
            self._lagging &= isinstance(reply, AsyncFlowError)
            self._noted_by(token)

        link.call(Verb.MIRROR, {"from": self.index, "partition": partition, "put": ids, "whole": False}, noted)
        if self._lagging:
            self.counters.unmirrored_puts += 1
            return False
        self._unnoted[token] = (self.now + MIRROR_S, then)
        return True

    def note_gone(self, partition: str, ids: np.ndarray) -> None:
        """Groups have left this pair."""
        link = self._next
        if link is not None and link.up and self._synced:
            link.call(Verb.MIRROR, {"from": self.index, "partition": partition, "gone": ids, "whole": False})

    def mirror(self, message: Message) -> None:
        """Another pair says which groups it holds."""
        known = self._noted.setdefault(message.whole("from"), {})
        if message.flag("whole"):
            known.clear()
        if "partition" not in message:
            return
        ids = known.setdefault(message.text("partition"), set())
        put, gone = message.optional_ints("put"), message.optional_ints("gone")
        if put is not None:
            ids.update(put.tolist())
        if gone is not None:
            ids.difference_update(gone.tolist())
            if not ids:
                del known[message.text("partition")]

    def groups_of(self, number: int) -> dict[str, np.ndarray]:
        """Group ids by partition that pair `number` held when it was last heard of. Raises DockError: never heard."""
        if number not in self._noted:
            raise DockError(f"pair {self.index} has never heard which groups pair {number} holds; ask the one after it")
        return {name: np.array(sorted(ids), np.int64) for name, ids in self._noted[number].items() if ids}

    def _noted_by(self, token: object) -> None:
        waiting = self._unnoted.pop(token, None)
        if waiting is not None:
            waiting[1]()

    def _sync(self) -> None:
        """Tells a new neighbour everything."""
        link = self._next
        if link is None or not link.up:
            for token in list(self._unnoted):
                self._noted_by(token)
            return
        link.call(Verb.MIRROR, {"from": self.index, "whole": True})
        for partition, ids in self._groups().items():
            link.call(Verb.MIRROR, {"from": self.index, "partition": partition, "put": ids, "whole": False})
        self._synced, self._lagging = True, False

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        self.now = now
        for link in self.links.values():
            link.attempt(now)
        for token in [t for t, (deadline, _) in self._unnoted.items() if deadline <= now]:
            self.counters.unmirrored_puts += 1
            self._lagging = True  # nobody waits for it again before it has answered
            self._noted_by(token)

    def next_deadline(self) -> float | None:
        times = [link.next_attempt for link in self.links.values() if link.down]
        times += [deadline for deadline, _ in self._unnoted.values()]
        return min(times, default=None)

    def close(self) -> None:
        for link in self.links.values():
            link.close()


def _consumer(message: Mapping[str, Any]) -> tuple[str, str, str]:
    return message["partition"], message["task"], message["worker"]
