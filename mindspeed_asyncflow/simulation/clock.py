"""An asyncio event loop on virtual time: when nothing is ready it jumps to the next timer.

`loop.time()` is the virtual clock, so everything that sleeps, sets deadlines or measures through it runs in virtual
seconds and costs real time only for its own Python. Callbacks run in the order in which they became ready, and what
is due at one moment in an order that depends on earlier calls only, so a run is a pure function of its inputs.

Nothing outside the loop can be waited for: threads and files are refused, and a loop with nothing ready and no timer
can never go on. That is a deadlock, and its error names who waits where.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from mindspeed_asyncflow.errors import AsyncFlowError

T = TypeVar("T")


class SimulationError(AsyncFlowError):
    """The simulated run cannot go on; the message names who waits, or what left virtual time."""


class _Jump(selectors.SelectSelector):
    """Waits for no file: the time that a real selector would wait is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.stuck: Callable[[], NoReturn] | None = None
        self.broken: BaseException | None = None

    def select(self, timeout: float | None = None) -> list:
        if self.broken is not None:
            broken, self.broken = self.broken, None
            raise broken
        if timeout is None:
            assert self.stuck is not None, "the loop says what to do"
            self.stuck()
        elif timeout > 0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time starts at 0 s."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._jump.stuck = self._deadlock
        self.set_exception_handler(self._callback_failed)

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        raise SimulationError(f"{_name(func)} asked for a thread: code that runs on virtual time must not leave it")

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)  # there is no other thread

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a timer would be printed and the run would wait for ever: it ends the run instead."""
        if "handle" in context:
            self._jump.broken = self._jump.broken or context.get("exception")

    def _deadlock(self) -> NoReturn:
        waiting = [who_waits(task) for task in asyncio.all_tasks(self)]
        raise SimulationError(
            f"deadlock at {self.time():g} s of virtual time: nothing is ready and no timer runs; waiting:\n  "
            + ("\n  ".join(sorted(waiting)) or "nobody")
        )


def who_waits(task: asyncio.Task) -> str:
    """A task, and the line where its innermost coroutine waits."""
    coroutine: Any = task.get_coro()
    inner = coroutine
    while True:
        below = getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None)
        if getattr(below, "cr_frame", None) is None and getattr(below, "ag_frame", None) is None:
            break
        inner = below
    frame = getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None)
    where = f", {_name(inner)} line {frame.f_lineno}" if frame is not None else ""
    return f"{task.get_name()} in {_name(coroutine)}{where}"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a fresh virtual loop. Tasks that it leaves behind are cancelled.

    Raises SimulationError for a deadlock, and where another event loop runs in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        main.close()
        raise SimulationError("a simulation cannot run inside a running event loop; start it from plain code")
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


def _name(thing: Any) -> str:
    return getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or repr(thing)
