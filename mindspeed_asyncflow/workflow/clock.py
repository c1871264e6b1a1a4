"""The clock of the loops: seconds of the running event loop, so that a loop on virtual time drives the same code."""

from __future__ import annotations

import asyncio


def now() -> float:
    """Monotonic seconds; only differences mean something."""
    return asyncio.get_running_loop().time()
