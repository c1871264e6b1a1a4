"""The one law of staleness, and the window that makes it likely.

    lag(sample) = trainer version that consumes it - version that sampled its OLDEST token
    law:          lag <= max_lag for every trained token

The trainer version rises by one per global batch. The law is *guaranteed* in one place: the claim of the `train`
task passes `oldest_allowed()` as its bound, and the controller drops what is older. Admission only makes drops rare:
batch j (the prompts of step j) may be issued once `j <= published + max_lag`, so that at most (max_lag + 1) batches
are between issue and training.

Two versions are told apart. `version` is the trainer's: it rises with the optimizer step, and the law counts from it.
`published` is the newest one that replicas can load: it follows when all trainer ranks have written their shards,
while the trainer is in its next step already. published <= version, so admission is never ahead of the law.

Why that suffices when every replica serves at least `needed_for(j)` before it samples for batch j: batch j is issued
at published >= j - max_lag and trained at version j, so its lag is at most max_lag. Example with max_lag 1: batches 0
and 1 are issued at version 0, batch 2 at version 1, batch 3 at version 2: iterations sample with versions 0, 0, 1, 2
and train at 0, 1, 2, 3, a lag of 0 once and 1 ever after.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any


class StalenessWindow:
    """Counts what is in flight and opens the door for the next batch. Lives in the driver's event loop."""

    def __init__(self, max_lag: int, version: int = 0) -> None:
        self.max_lag = max_lag
        self.version = version  # of the trainer; equals the step trained next
        self.published = version  # newest version that replicas can load
        self.issued = 0  # samples
        self.trained = 0  # samples
        self.dropped: Counter[str] = Counter()  # samples by reason
        self._opened = asyncio.Condition()
        self._held = False

    @property
    def open(self) -> int:
        """Samples issued and neither trained nor dropped."""
        return self.issued - self.trained - sum(self.dropped.values())

    def may_issue(self, batch: int) -> bool:
        return batch <= self.published + self.max_lag

    def oldest_allowed(self) -> int:
        """The bound that the claim of the `train` task enforces."""
        return self.version - self.max_lag

    def needed_for(self, batch: int) -> int:
        """Oldest version that may sample for `batch`: what is older would be dropped when step `batch` claims it."""
        return batch - self.max_lag

    async def wait_to_issue(self, batch: int) -> None:
        """Wait until `batch` may be issued; what unblocks it is `publish`."""
        async with self._opened:
            await self._opened.wait_for(lambda: self.may_issue(batch) and not self._held)

    def hold(self) -> None:
        """Nothing is issued until `release`."""
        self._held = True

    async def release(self) -> None:
        async with self._opened:
            self._held = False
            self._opened.notify_all()

    async def wait_published(self, version: int) -> None:
        """Wait until replicas can load `version`; what unblocks it is `publish`."""
        async with self._opened:
            await self._opened.wait_for(lambda: self.published >= version)

    def advance(self, version: int) -> None:
        """The trainer made `version`: the law counts from it at once."""
        if version != self.version + 1:
            raise ValueError(f"version must rise by one per global batch: {self.version} -> {version}")
        self.version = version

    async def publish(self, version: int) -> None:
        """Replicas can load `version`: admission of the next batch may go on."""
        if not self.published < version <= self.version:
            raise ValueError(f"version {version} cannot be published: {self.published} is, {self.version} is trained")
        async with self._opened:
            self.published = version
            self._opened.notify_all()

    def state(self) -> dict[str, Any]:
        """As JSON values. What replicas can load is not in it: a run that goes on publishes `version` first."""
        counts = {"issued": self.issued, "trained": self.trained, "dropped": dict(self.dropped)}
        return {"version": self.version} | counts

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = self.published = int(state["version"])
        self.issued, self.trained = int(state["issued"]), int(state["trained"])
        self.dropped = Counter(state["dropped"])
