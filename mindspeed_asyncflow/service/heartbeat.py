"""Whether a process that lives still runs: a ping that it answers in a thread of its own, however busy it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

EVERY_S = 1.0  # between two pings
PER_LIMIT = 5  # at least so many looks in the time that a process may be silent


async def silence(ping: Callable[[], Awaitable[object]], limit_s: float) -> None:
    """Ping again and again; returns once a ping has had no answer for `limit_s`, raises what a ping raises.

    Only time in which this process itself ran counts: after a pause of the whole machine, or of the driver, the others
    have the rest of their time to answer.
    """
    clock = asyncio.get_running_loop().time
    look_s = min(EVERY_S, limit_s / PER_LIMIT)
    while True:
        asked = asyncio.ensure_future(ping())
        silent_s = 0.0
        try:
            while not asked.done():
                before = clock()
                await asyncio.wait([asked], timeout=look_s)
                silent_s += min(clock() - before, 2 * look_s)
                if silent_s >= limit_s and not asked.done():
                    return
        finally:
            asked.cancel()
        asked.result()
        await asyncio.sleep(look_s)
