"""Shards on their way from a relay server into a relay file: bounded requests, two under way, taken up after a drop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from mindspeed_asyncflow.dock.channel import Broken
from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError
from mindspeed_asyncflow.reshard import delta
from mindspeed_asyncflow.reshard.fingerprint import checksum
from mindspeed_asyncflow.reshard.relay_file import RelayFile
from mindspeed_asyncflow.reshard.relay_link import MOST_RANGES, NO_ANCHOR, Question, RelayLink
from mindspeed_asyncflow.reshard.relay_table import RelayTable

T = TypeVar("T")
_AGAIN_S = 0.05
_AHEAD = 1  # requests that are asked before the answer in hand has come


class Peer:
    """A relay server (host:port) that is asked again after every drop, until it has said nothing for `timeout_s`."""

    def __init__(self, address: str, secret: bytes, timeout_s: float, what: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise WeightSyncError(f"{address!r} is no address of a relay server (host:port)")
        self.address, self._secret, self._timeout_s, self._what = address, secret, timeout_s, what
        self.received = self.drops = 0  # bytes; connections that broke
        self._heard_at = 0.0

    def insist(self, use: Callable[[RelayLink], T], heard: Callable[[int], None] = lambda _: None) -> T:
        """What `use` makes of a connection; it is called again with a new one. Raises `DeadlineExceeded`."""

        def note(count: int) -> None:
            self.received += count
            self._heard_at = time.monotonic()
            heard(count)

        self._heard_at = time.monotonic()
        silence_s = self._timeout_s / 3  # a connection that died without a word costs a part of the deadline only
        while True:
            try:
                with RelayLink(self.address, self._secret, silence_s, note) as link:
                    return use(link)
            except Broken as error:
                reason = error
            self.drops += 1
            silent_s = time.monotonic() - self._heard_at
            if silent_s >= self._timeout_s:
                raise DeadlineExceeded(
                    f"the relay server {self.address} sent nothing of {self._what} for {silent_s:.3g} s "
                    f"(deadline {self._timeout_s:g}): {reason}"
                )
            time.sleep(min(_AGAIN_S, self._timeout_s))


class _OtherBytes(Exception):
    """A shard that arrived has not the published checksum."""


class Fetch:
    """`shards` of `version` into `slot`, those that are in `anchor` (-1: none) as differences where that is shorter."""

    def __init__(
        self, file: RelayFile, slot: int, version: int, shards: np.ndarray, anchor: int, block: int, chunk_bytes: int
    ) -> None:  # fmt: skip
        self.shards, self._file, self._slot, self._version = shards, file, slot, version
        self._anchor, self._block = anchor, block
        self._requests = _requests(file.table, shards, chunk_bytes)
        self._next = 0

    def run(self, peer: Peer) -> None:
        """Raises `DeadlineExceeded`, or `WeightSyncError` when the version is gone or its bytes are others."""
        try:
            if len(self.shards):
                peer.insist(self._stream, self._heard)
        except _OtherBytes as error:
            peer.insist(lambda link: ask_info(link, self._version))  # says so if it was evicted while it was sent
            raise WeightSyncError(
                f"{error} of weight version {self._version} came from {peer.address} with other bytes than published"
            ) from None

    def _heard(self, count: int) -> None:
        self._file.landed[0] += count

    def _stream(self, link: RelayLink) -> None:
        asked = self._next
        while self._next < len(self._requests):
            while asked < min(len(self._requests), self._next + 1 + _AHEAD):
                ask = {"version": self._version, "anchor": self._anchor, "block": self._block}
                link.ask(Question.FETCH, {**ask, "ranges": self._requests[asked]})
                asked += 1
            self._take(link, self._requests[self._next])
            self._next += 1

    def _take(self, link: RelayLink, ranges: np.ndarray) -> None:
        """The answer to one request, range by range into the file."""
        answer, nbytes = link.answer()
        sizes, deltas = answer.ints("sizes"), answer.array("deltas", "uint8")
        full = ranges[2] - ranges[1]
        fits = len(sizes) == len(deltas) == len(full) and int(sizes.sum()) == nbytes
        if not fits or not np.where(deltas > 0, sizes < full, sizes == full).all():
            raise WeightSyncError("a relay server answered with other ranges than were asked for")
        for index, (shard, begin, end) in enumerate(ranges.T.tolist()):
            target = self._span(self._slot, shard, begin, end)
            try:
                if deltas[index]:
                    self._apply(link, int(sizes[index]), shard, begin, target)
                else:
                    link.into(target.data)
            except Broken:  # goes on from here on the next connection
                rest = ranges[:, index:].copy()
                rest[1, 0] += 0 if deltas[index] else link.filled
                self._requests[self._next] = rest
                raise
            if end == self._file.table.shards[shard].nbytes:
                self._complete(shard)

    def _apply(self, link: RelayLink, nbytes: int, shard: int, begin: int, target: np.ndarray) -> None:
        message = bytearray(nbytes)
        link.into(memoryview(message))
        try:
            base = self._file.slot_of(self._anchor)
            delta.apply(message, self._span(base, shard, begin, begin + len(target)), target)
        except WeightSyncError as error:  # the server's anchor is not ours: the same bytes again, in full
            self._anchor = NO_ANCHOR
            raise Broken(str(error)) from error

    def _span(self, slot: int, shard: int, begin: int, end: int) -> np.ndarray:
        start = self._file.payload_at(slot) + self._file.table.shards[shard].offset
        return self._file.bytes[start + begin : start + end]

    def _complete(self, shard: int) -> None:
        self._file.still_assigned(self._slot, self._version)
        whole = self._span(self._slot, shard, 0, self._file.table.shards[shard].nbytes)
        if checksum(whole.data) != int(self._file.crc[self._slot][shard]):
            raise _OtherBytes(self._file.table.describe(shard))
        self._file.present[self._slot][shard] = 1


def ask_info(link: RelayLink, version: int) -> tuple[int, bytes, np.ndarray, np.ndarray]:
    """(version, digest of the table, crc uint32 [S], present uint8 [S]). Raises what the server says."""
    link.ask(Question.INFO, {"version": version})
    info, _ = link.answer()
    digest = info.array("digest", "uint8").tobytes()
    return info.whole("version"), digest, info.array("crc", "uint32"), info.array("present", "uint8")


def ask_table(link: RelayLink) -> bytes:
    link.ask(Question.TABLE, {})
    table, _ = link.answer()
    return table.array("text", "uint8").tobytes()


def _requests(table: RelayTable, shards: np.ndarray, chunk_bytes: int) -> list[np.ndarray]:
    """int64 [3, k] each: ranges (shard, begin, end) in order, at most `chunk_bytes` together."""
    done: list[np.ndarray] = []
    ranges: list[tuple[int, int, int]] = []
    room = chunk_bytes
    for shard in shards.tolist():
        begin, nbytes = 0, table.shards[shard].nbytes
        while True:
            end = min(nbytes, begin + room)
            ranges.append((shard, begin, end))
            room -= end - begin
            if not room or len(ranges) == MOST_RANGES:
                done.append(np.array(ranges, np.int64).T)
                ranges, room = [], chunk_bytes
            begin = end
            if begin == nbytes:
                break
    return [*done, np.array(ranges, np.int64).T] if ranges else done
