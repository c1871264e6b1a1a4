"""Replicas that keep the version that they serve, while others load newer ones: an evaluation measures one version.

A replica that is held goes on answering batches that its version is young enough for. One that such a batch came to
needs newer weights (`Hold.wanted`), which its holder should know: the sooner it lets go, the sooner that batch begins.
"""

from __future__ import annotations

import asyncio


class Hold:
    """One replica at one version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.wanted = False  # a batch waits for newer weights
        self.over = asyncio.Event()


class Holds:
    """Lives in the driver's event loop; one hold of a replica at a time."""

    def __init__(self) -> None:
        self._by_replica: dict[int, Hold] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._by_replica

    def begin(self, index: int, version: int) -> Hold:
        hold = self._by_replica[index] = Hold(version)
        return hold

    def end(self, index: int) -> None:
        """Also for a replica that nobody holds."""
        hold = self._by_replica.pop(index, None)
        if hold is not None:
            hold.over.set()

    def forbids(self, index: int, needed: int) -> bool:
        """Whether replica `index` may not come to `needed` now; its holder is told that it should."""
        hold = self._by_replica.get(index)
        if hold is None or needed <= hold.version:
            return False
        hold.wanted = True
        return True

    async def over(self, index: int, needed: int) -> None:
        """Wait until replica `index` may come to version `needed`; its holder has a deadline."""
        while self.forbids(index, needed):
            await self._by_replica[index].over.wait()

    def describe(self) -> list[str]:
        """For messages of the no-progress watchdog."""
        return [f"an evaluation holds rollout{i} at version {h.version}" for i, h in self._by_replica.items()]
