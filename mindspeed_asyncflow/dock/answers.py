"""Answers that are kept for callers that repeat a call after a broken connection or a restart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

_MOST, _MOST_BYTES = 4096, 32 << 20

Identity = tuple[int, int]  # client, request


class Answers:
    """Frames by the identity of their call; the oldest go first."""

    def __init__(self) -> None:
        self._frames: OrderedDict[Identity, bytes] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[tuple[Identity, bytes]]:
        return iter(self._frames.items())

    def get(self, identity: Identity) -> bytes | None:
        return self._frames.get(identity)

    def keep(self, identity: Identity, frame: bytes) -> None:
        self._frames[identity] = frame
        self._bytes += len(frame)
        while len(self._frames) > _MOST or self._bytes > _MOST_BYTES:
            self._bytes -= len(self._frames.popitem(last=False)[1])
