"""Whether the client of a run is there: what the run waits for it is no hang, and does not last for ever either."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from mindspeed_asyncflow.errors import ClientSilent
from mindspeed_asyncflow.workflow.clock import in_time

LOOK_S = 0.2


class Presence:
    """`limit_s`: `service.client_timeout_s`. `progressed` is called while a run waits, for its watchdog.

    Calls may come from any thread; `wait` lives in the driver's event loop.
    """

    def __init__(self, limit_s: float, progressed: Callable[[], None]) -> None:
        self.limit_s, self.progressed = limit_s, progressed
        self.name = "the client"
        self._calls = 0
        self._until = time.monotonic()  # when the last call ended

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Around a call of the client."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._until = time.monotonic()

    @property
    def silent_s(self) -> float:
        return 0.0 if self._calls > 0 else time.monotonic() - self._until

    async def wait(self, changed: asyncio.Event, what: str, over: Callable[[], bool] = lambda: False) -> None:
        """Until `changed` is set, or `over`. Raises `ClientSilent` where the client, of whom the run needs `what`, has
        called nothing for too long."""
        began = time.monotonic()
        while not changed.is_set() and not over():
            silent_s = min(self.silent_s, time.monotonic() - began)
            if silent_s > self.limit_s:
                raise ClientSilent(
                    f"the run waits for {what}, and {self.name} has called nothing for {silent_s:.0f} s: see whether "
                    "it still runs, or raise service.client_timeout_s"
                )
            self.progressed()
            with contextlib.suppress(asyncio.TimeoutError):
                await in_time(changed.wait(), LOOK_S)
