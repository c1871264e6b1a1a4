"""What the loops need of the dock, as calls that can be awaited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from mindspeed_asyncflow.dock.client import Claim, DockClient
from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded
from mindspeed_asyncflow.records import PromptRow

T = TypeVar("T")
OTHER_CALLS = 8  # at the same time, beside claims that wait
SLICE_S = 2.0  # a parked claim is renewed this often, so that a run that stops never waits for one longer
PATIENCE_S = 0.25


class Dock(Protocol):
    """The rows of one partition. What the verbs mean is said at `dock/client.py`."""

    patience_s: float  # how long a claim whose condition may become pointless is parked before it is asked anew

    async def put_groups(self, groups: Sequence[Sequence[PromptRow]]) -> None: ...

    async def claim(
        self,
        task: str,
        count: int,
        *,
        worker: str,
        unit: str = "groups",
        policy: str = "fifo",
        group_ids: Sequence[int] | None = None,
        at_least: int = 1,
        min_version: int | None = None,
        timeout_s: float | None = None,
    ) -> Claim:
        """Raises DeadlineExceeded after `timeout_s`; None: waits while the run lives, which its watchdog bounds."""
        ...

    async def read(self, rows: np.ndarray, columns: Sequence[str]) -> Mapping[str, Any]: ...

    async def done(self, claim_id: int) -> None: ...

    async def release(self, claim_id: int, rows: np.ndarray | None = None) -> None:
        """What is not held any more needs not be given back."""
        ...

    async def free(self, rows: np.ndarray) -> None: ...

    async def drop_groups(self, group_ids: Sequence[int], reason: str) -> None: ...

    async def drop_rows(self, rows: np.ndarray, reason: str) -> None: ...

    async def missing(self, group_ids: Sequence[int]) -> list[int]: ...

    async def forget_worker(self, worker: str) -> int: ...

    async def seal(self) -> None: ...

    async def stats(self) -> Mapping[str, Any]: ...

    async def describe(self) -> str: ...


class ThreadDock:
    """The dock of real runs: blocking calls of a client, in threads. `claimers`: loops that may wait at one time."""

    patience_s = PATIENCE_S

    def __init__(self, client: DockClient, partition: str, claimers: int) -> None:
        self.client, self.partition = client, partition
        # asyncio's own pool has few threads on a small machine: parked claims would hold up everything else.
        self._threads = ThreadPoolExecutor(claimers + OTHER_CALLS, thread_name_prefix="dock")

    async def run(self, call: Callable[..., T], *args: Any, **how: Any) -> T:
        """Any blocking call of the client, in a thread of these."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args, **how))

    async def put_groups(self, groups: Sequence[Sequence[PromptRow]]) -> None:
        await self.run(self.client.put_groups, self.partition, groups)

    async def claim(self, task: str, count: int, *, timeout_s: float | None = None, unit: str = "groups", **how: Any):
        how |= {"partition": self.partition, "unit": unit, "timeout_s": SLICE_S if timeout_s is None else timeout_s}
        while True:
            asked = asyncio.ensure_future(self.run(self.client.claim, task, count, **how))
            try:
                return await asyncio.shield(asked)
            except DeadlineExceeded:
                if timeout_s is not None:
                    raise
            except asyncio.CancelledError:
                asked.add_done_callback(self._give_back)
                raise

    def _give_back(self, asked: asyncio.Future[Claim]) -> None:
        """The loop that asked is gone: others shall have what the thread still gets."""
        if not asked.cancelled() and asked.exception() is None and asked.result().claim_id:
            back = asyncio.ensure_future(self.release(asked.result().claim_id))
            back.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def read(self, rows: np.ndarray, columns: Sequence[str]) -> Mapping[str, Any]:
        return await self.run(self.client.read, rows, columns)

    async def write(self, rows: np.ndarray, values: Mapping[str, Any], claim_id: int) -> None:
        await self.run(partial(self.client.write, rows, values, claim_id=claim_id))

    async def done(self, claim_id: int) -> None:
        await self.run(self.client.done, claim_id)

    async def release(self, claim_id: int, rows: np.ndarray | None = None) -> None:
        with contextlib.suppress(ClaimLost):
            await self.run(self.client.release, claim_id, rows)

    async def free(self, rows: np.ndarray) -> None:
        await self.run(self.client.free, rows)

    async def drop_groups(self, group_ids: Sequence[int], reason: str) -> None:
        await self.run(self.client.drop, group_ids=group_ids, partition=self.partition, reason=reason)

    async def drop_rows(self, rows: np.ndarray, reason: str) -> None:
        await self.run(self.client.drop, rows, reason=reason)

    async def missing(self, group_ids: Sequence[int]) -> list[int]:
        return await self.run(self.client.missing, self.partition, group_ids)

    async def forget_worker(self, worker: str) -> int:
        return await self.run(self.client.forget_worker, worker)

    async def seal(self) -> None:
        await self.run(self.client.seal, self.partition)

    async def stats(self) -> Mapping[str, Any]:
        return await self.run(self.client.stats)

    async def describe(self) -> str:
        return await self.run(self.client.describe)

    def close(self) -> None:
        """Threads that still wait for a claim end with its slice."""
        self._threads.shutdown(wait=False)
