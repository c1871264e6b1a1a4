"""Calls to one pair: connections, repetition after a broken one, and how values get there and back."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock import arguments, kinds
from mindspeed_asyncflow.dock.arena import GRANULE, Arena
from mindspeed_asyncflow.dock.channel import NO_STRETCH, Broken, Channel
from mindspeed_asyncflow.dock.columns import Part, Schema, TaskSpec, read_columns
from mindspeed_asyncflow.dock.kinds import Packing
from mindspeed_asyncflow.dock.pool import BufferPool
from mindspeed_asyncflow.dock.ragged import Ragged, copy_runs, runs
from mindspeed_asyncflow.dock.warehouse import check_fits, granules, lay_out
from mindspeed_asyncflow.dock.wire import Message, Verb
from mindspeed_asyncflow.errors import DockError, WorkerLost

INLINE_BYTES = 8 << 10  # smaller values travel in their frame: one message instead of two
_NO_LENGTHS = np.empty(0, np.int64)
_RETRY_S = 0.02  # between two attempts to reach a pair that may be starting again


class Replaced(WorkerLost):
    """A pair has lost its memory and begins empty under its old number: this client of it is of no use any more."""

    def __init__(self, words: str, pair: int) -> None:
        super().__init__(words)
        self.pair = pair


class Calls:
    """See `PairClient`."""

    def __init__(
        self, address: str, secret: str | bytes = b"", wait_s: float = 30.0, map_arena: bool = True,
        restart_s: float = 2.0,
    ) -> None:  # fmt: skip
        self.address = address
        self.wait_s, self.restart_s = arguments.seconds("wait_s", wait_s), arguments.seconds("restart_s", restart_s)
        self._secret = secret.encode() if isinstance(secret, str) else bytes(secret)
        self._client = secrets.randbits(63)
        self._requests = itertools.count(1)
        self._idle: list[Channel] = []
        self._under_way: set[Channel] = set()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._pool = BufferPool()
        self._local = ""  # name of the pair's socket on this node
        self._token = b""  # of the pair's arena: another one means another pair, which has none of our rows
        self.life = 0  # how often the pair has lost its memory
        channel = self._connect()
        hello = channel.hello
        self._idle.append(channel)
        self.schema = Schema(
            read_columns(hello["columns"]),
            [TaskSpec(n, tuple(c)) for n, c in hello["tasks"]],
        )
        self.pair = hello.whole("pair")
        self.addresses = hello.names("addresses")  # of all pairs of the dock, by number; none: it is a dock by itself
        self.forgotten: list[int] = list(hello["forgotten"])  # pairs of the dock that are lost for good
        self.arena_bytes = self.free_bytes = hello.whole("arena_bytes")
        self.live_rows = 0
        self._arena = Arena.attach(hello.text("arena_path"), self._token) if map_arena else None
        if self._arena is not None:
            self._local = hello.text("local")
            self._keep(self._connect())
            self._idle.pop(0).close()

    @property
    def token(self) -> bytes:
        """Of the pair's arena: a pair with another one has none of the rows of this."""
        return self._token

    @property
    def mapped(self) -> bool:
        """Whether reads are views into shared memory."""
        return self._arena is not None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels = [*self._idle, *self._under_way]
            self._idle = []
        for channel in channels:
            channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def patience(self, timeout_s: float | None) -> float:
        return self.wait_s if timeout_s is None else arguments.seconds("timeout_s", timeout_s)

    # -- values ----------------------------------------------------------------------------------------------------

    def pack(self, values: Mapping[str, Any]) -> dict[str, list[Packing]]:
        """The values of a call by column, checked against the schema."""
        schema = self.schema
        return {name: kinds.pack(schema.column(name), schema.parts[name], column) for name, column in values.items()}

    def send_values(
        self, verb: Verb, message: dict[str, Any], packed: Mapping[str, list[Packing]], rows: tuple[int, int],
        timeout_s: float | None,
    ) -> Message:  # fmt: skip
        """A put or write of `rows` (rows, groups).

        Few values travel in the frame; others are copied into the mapped arena before it, or follow it as bulk.
        """
        columns = [column for parts in packed.values() for column in parts]
        lengths = [column.lengths for column in columns if not column.part.fixed]
        for column in columns:
            expected = rows[1] if column.part.shared else rows[0]
            if len(column.lengths) != expected:
                raise DockError(
                    f"column {column.part.column!r} came with {len(column.lengths)} rows, expected {expected}"
                )
        sizes = [column.nbytes for column in columns]
        total = sum(sizes)
        check_fits(total, self.arena_bytes)
        what = {
            "columns": list(packed), "timeout_s": self.patience(timeout_s),
            "lengths": lengths[0] if len(lengths) == 1 else np.concatenate(lengths) if lengths else _NO_LENGTHS,
        }  # fmt: skip
        if total <= INLINE_BYTES:
            data = b"".join([column.values.tobytes() for column in columns])
            return self.call(verb, message | what | {"reservation": 0, "data": np.frombuffer(data, np.uint8)})
        reserve = what | {"put": verb is Verb.PUT, "rows": rows[0], "groups": rows[1]}
        request = next(self._requests)
        short = message | {"timeout_s": what["timeout_s"]}
        arena = self._arena

        def place_and_send(channel: Channel) -> Message:
            reply = channel.call(Verb.RESERVE, next(self._requests), reserve)
            pieces = reply.ints("pieces").reshape(-1, 4).tolist()
            bulk = []
            for i, first, last, offset in pieces:
                part, items = columns[i].part, int(columns[i].counts[first:last].sum())
                if arena is not None:
                    columns[i].copy_into(arena.room(offset, part, items), first, last)
                else:
                    bulk += columns[i].buffers(first, last)
            return channel.call(verb, request, short | {"reservation": reply.whole("reservation")}, bulk)

        if arena is None:
            return self._attempt(verb, place_and_send)
        in_stretch = partial(self._in_stretch, arena, verb, message | what, columns, reserve, request)
        return self._attempt(verb, lambda channel: in_stretch(channel) or place_and_send(channel))

    def _in_stretch(
        self, arena: Arena, verb: Verb, message: dict[str, Any], columns: Sequence[Packing], reserve: dict[str, Any],
        request: int, channel: Channel,
    ) -> Message | None:  # fmt: skip
        """Values copied into one stretch of the mapped arena, then their call; None where there is no such stretch.

        The stretch is the one that the answer to the last such call on this connection brought, if it is long enough:
        then the call is a single message.
        """
        sizes = [granules(column.nbytes) for column in columns]
        need = sum(sizes) * GRANULE
        (number, offset, length), channel.ahead = channel.ahead, NO_STRETCH
        if length < need:
            ask = {n: v for n, v in reserve.items() if n not in ("columns", "lengths")}
            reply = channel.call(Verb.RESERVE, next(self._requests), ask | {"nbytes": need, "instead": number or None})
            number = reply.whole("reservation")
            if not number:
                return None
            offset = reply.whole("offset")
        for i, _, rows, at in lay_out(offset, [len(column.lengths) for column in columns], sizes):
            part = columns[i].part
            columns[i].copy_into(arena.room(at, part, columns[i].items), 0, rows)
        reply = channel.call(verb, request, message | {"reservation": number, "ahead": need})
        if "ahead" in reply:
            channel.ahead = (reply["ahead"][0], reply["ahead"][1], need)
        return reply

    def take_values(self, reply: Message, columns: Sequence[str], copy: bool = False) -> dict[str, Any] | None:
        """The columns that an answer locates in the arena or brings along; None when it does neither."""
        cells, lengths = reply.get("cells"), reply.get("lengths")
        if cells is None and lengths is None:
            return None
        bulk = reply.get("bulk")
        out: dict[str, Any] = {}
        at = i = 0
        for name in columns:
            found = []
            for part in self.schema.parts[name]:
                if cells is not None:
                    assert self._arena is not None
                    ragged = self._arena.ragged(part, cells[2 * i], cells[2 * i + 1])
                    found.append(self._copied(ragged) if copy else ragged)
                else:
                    assert lengths is not None
                    ragged, at = _received(part, lengths[i], bulk, at)
                    found.append(ragged)
                i += 1
            out[name] = kinds.unpack(self.schema.columns[name], found)
        return out

    def _copied(self, cells: Ragged) -> Ragged:
        """Values of the caller's own, in a recycled buffer."""
        counts = cells.counts
        out = self._pool.take(int(counts.sum()) * cells.values.itemsize).view(cells.values.dtype)
        copy_runs(cells.values, *runs(cells.starts, counts), out)
        return Ragged(out, np.cumsum(counts) - counts, cells.lengths, cells.inner)

    # -- connections -----------------------------------------------------------------------------------------------

    def call(self, verb: Verb, message: Mapping[str, Any]) -> Message:
        request = next(self._requests)
        return self._attempt(verb, lambda channel: channel.call(verb, request, message))

    def _attempt(self, verb: Verb, action: Callable[[Channel], Message]) -> Message:
        """Carries out a call, again under the same identity when its connection breaks, until `restart_s` is over."""
        give_up = 0.0
        while True:
            try:
                channel = self._channel(fresh=give_up > 0)
                try:
                    return action(channel)
                finally:
                    self._keep(channel)
            except Broken as broken:
                now = time.monotonic()
                give_up = give_up or now + self.restart_s
                if now >= give_up:
                    raise WorkerLost(
                        f"dock pair {self.pair} at {self.address} went away during {verb.name} and did not come back "
                        f"within {self.restart_s:g} s: {broken}"
                    ) from broken
                time.sleep(_RETRY_S)

    def _keep(self, channel: Channel) -> None:
        with self._lock:
            self._under_way.discard(channel)
            if channel.usable and not self._closed:
                self._idle.append(channel)
                return
        channel.close()

    def _channel(self, fresh: bool) -> Channel:
        with self._lock:
            if self._closed:
                raise DockError("this dock client is closed")
            if self._process != os.getpid():
                raise DockError("this dock client was made before a fork: make one in each process")
            if self._idle and not fresh:
                channel = self._idle.pop()
                self._under_way.add(channel)
                return channel
        channel = self._open()
        with self._lock:
            self._under_way.add(channel)
        return channel

    def _connect(self) -> Channel:
        try:
            return self._open()
        except Broken as broken:
            raise WorkerLost(f"no dock server at {self.address}, or the secret is wrong: {broken}") from broken

    def _open(self) -> Channel:
        channel = Channel(self.address, self._secret, self._client, self.wait_s, self._pool, self._local)
        token = channel.hello.array("arena_token", "uint8").tobytes()
        if self._token and token != self._token:
            channel.close()
            words = f"dock pair {self.pair} at {self.address} was replaced by another one; its rows are gone"
            raise Replaced(words, self.pair) if channel.hello.whole("life") > self.life else WorkerLost(words)
        self._token, self.life = token, channel.hello.whole("life")
        return channel


def _received(part: Part, lengths: np.ndarray, bulk: np.ndarray | None, at: int) -> tuple[Ragged, int]:
    """The cells of a part that begin at byte `at` of the bulk, and where the next part begins."""
    counts = lengths * (part.itemsize // part.dtype.itemsize)
    nbytes = int(counts.sum()) * part.dtype.itemsize
    values = np.empty(0, part.dtype) if not nbytes or bulk is None else bulk[at : at + nbytes].view(part.dtype)
    return Ragged(values, np.cumsum(counts) - counts, lengths, part.inner), at + nbytes + -nbytes % 8
