"""A rollout engine without a model: continuous batching as a few sums over arrays, on the clock of the event loop.

All running answers take one decoding step together; a step costs `Costs.decode_s(running, context)`. Between two
events (an answer ends, a waiting one is admitted) the number of running answers is constant and the context grows
linearly, so the time of every event follows in closed form, for all answers at once (`Timeline`). Nothing happens per
token. A change from outside (new answers, new weights, a stop) cuts the timeline at the present step, and what is left
makes a new one.

Left out: eviction when the cache is full (`max_running` bounds it), and prefill in chunks beside decoding: a prefill
stops the others for its own length.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mindspeed_asyncflow.errors import AsyncFlowError
from mindspeed_asyncflow.planner.costs import Costs

MOMENTS = 16  # at least, of a timeline, at which units are delivered
NO_TOKEN = -1  # version of an answer's first token before there is one
_FIELDS = ("context", "left", "done", "prefilled", "first", "unit", "owner", "place", "gone")
_FLAGS = ("prefilled", "gone")


class Timeline:
    """When each of n answers starts and ends, in decoding steps and in seconds from the beginning.

    `context` int64 [n]: tokens before the next one; `left` int64 [n]: tokens to generate; `prefilled` bool [n]. Answers
    are admitted in order, at most `max_running` at a time.
    """

    def __init__(
        self, costs: Costs, context: np.ndarray, left: np.ndarray, prefilled: np.ndarray, max_running: int
    ) -> None:
        self._costs = costs
        self.start = _starts(left, max_running)  # int64 [n], step
        self.end = self.start + left
        events, where = np.unique(np.concatenate([self.start, self.end]), return_inverse=True)  # [e]
        n = len(left)
        began, ended = where[:n], where[n:]
        e = len(events)
        # Context of running answers at event j: sum of (context - start) + running * step.
        opened = np.bincount(began, minlength=e) - np.bincount(ended, minlength=e)
        base = context - self.start
        moved = np.bincount(began, base, minlength=e) - np.bincount(ended, base, minlength=e)
        running = np.cumsum(opened)[:-1].astype(np.float64)  # [e - 1]
        tokens = np.cumsum(moved)[:-1] + running * events[:-1]
        steps = np.diff(events).astype(np.float64)
        first = costs.decode_s(running, tokens)
        last = costs.decode_s(running, tokens + running * (steps - 1))
        fresh = np.where(prefilled, 0, context).astype(np.float64)
        prompts = np.bincount(began, fresh, minlength=e)[:-1]
        squares = np.bincount(began, fresh * fresh, minlength=e)[:-1]
        prefill = np.where(prompts > 0, costs.prefill_s(prompts, squares), 0.0)  # type: ignore[arg-type]
        self._events, self._steps, self._first, self._last, self._prefill = events, steps, first, last, prefill
        lengths = prefill + steps * (first + last) / 2
        self._times = np.concatenate([[0.0], np.cumsum(lengths)])  # [e], at which events happen
        self.end_s = self._times[ended]  # float64 [n]

    @property
    def total_s(self) -> float:
        return float(self._times[-1])

    def steps_at(self, seconds: float) -> tuple[int, bool]:
        """Whole steps done after `seconds`; and whether prompts admitted at just that step are prefilled."""
        j = int(np.searchsorted(self._times, seconds, side="right")) - 1
        if j >= len(self._steps):
            return int(self._events[-1]), True
        inside = seconds - self._times[j] - self._prefill[j]
        if inside < 0:
            return int(self._events[j]), False
        first, steps = self._first[j], self._steps[j]
        grows = (self._last[j] - first) / (steps - 1) if steps > 1 else 0.0
        # k steps take k * first + grows * k (k - 1) / 2.
        linear = first - grows / 2
        if grows > 1e-12 * first:
            k = (np.sqrt(linear * linear + 2 * grows * inside) - linear) / grows
        else:
            k = inside / first if first > 0 else steps
        return int(self._events[j] + min(steps, np.floor(k + 1e-6))), True


def _starts(left: np.ndarray, max_running: int) -> np.ndarray:
    """Step at which each answer is admitted: in order, as soon as one before it has ended."""
    start = np.zeros(len(left), np.int64)
    if len(left) > max_running:
        ends = left[:max_running].tolist()
        heapq.heapify(ends)
        for i, length in enumerate(left[max_running:].tolist(), max_running):
            start[i] = at = ends[0]
            heapq.heapreplace(ends, at + length)
    return start


# places in the request, tokens generated now, version of the first and of the last of them (NO_TOKEN: none yet)
Deliver = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
# places in the request, tokens generated by now, version of those that no earlier call has told of
Note = Callable[[np.ndarray, np.ndarray, int], None]


@dataclass(slots=True)
class _Request:
    deliver: Deliver
    note: Note | None
    open: int  # answers that were not delivered
    ended: asyncio.Future[None] = field(repr=False)


class SimulatedEngine:
    """One replica. `speed`: factor on its pace (faults); `version`: of its weights.

    Answers come back in units (prompt groups): all members of a unit in one request are delivered when the last of them
    ends, those that are stopped at once with the tokens that they have. Units that end close together come back at once
    (`_delivery`); the last one of a timeline, which frees the replica, comes when it ends.
    """

    def __init__(self, costs: Costs, max_running: int, speed: float = 1.0) -> None:
        self.costs, self.max_running, self.speed = costs, max_running, speed
        self.version = 0
        self._requests: dict[int, _Request] = {}
        self._next_request = self._next_unit = 0
        self._a = {name: np.empty(0, bool if name in _FLAGS else np.int64) for name in _FIELDS}
        self._timeline: Timeline | None = None
        self._began = 0.0
        self._paused = 0
        self._due: list[tuple[float, int]] = []  # end and number of each unit of the timeline, last one first
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Answers that were not delivered."""
        return int(np.count_nonzero(~self._a["gone"]))

    # -- from outside ----------------------------------------------------------------------------------------------

    def submit(
        self, context: np.ndarray, left: np.ndarray, units: np.ndarray, deliver: Deliver, note: Note | None = None
    ) -> asyncio.Future[None]:
        """Admit answers; the result is set when all of them were delivered.

        `context` int64 [n] tokens that are there, `left` int64 [n] tokens to generate, `units` int64 [n] number of the
        group of each, any numbers. `note` is told of running answers before the version changes.
        """
        loop = asyncio.get_running_loop()
        self._cut()
        number = self._next_request
        self._next_request += 1
        request = _Request(deliver, note, len(left), loop.create_future())
        self._requests[number] = request
        names, unit = np.unique(units, return_inverse=True)
        fresh = {
            "context": context, "left": left, "done": np.zeros(len(left), np.int64),
            "prefilled": np.zeros(len(left), bool), "first": np.full(len(left), NO_TOKEN),
            "unit": unit + self._next_unit, "owner": np.full(len(left), number), "place": np.arange(len(left)),
            "gone": np.zeros(len(left), bool),
        }  # fmt: skip
        self._next_unit += len(names)
        self._a = {name: np.concatenate([self._a[name], fresh[name]]) for name in _FIELDS}
        self._plan()
        return request.ended

    async def load(self, version: int, seconds: float) -> None:
        """Running answers stand still for `seconds` and go on with `version`."""
        self._cut()
        self._flush()
        self._note_spans()
        self._paused += 1
        try:
            await asyncio.sleep(seconds)
            self.version = version
        finally:
            self._paused -= 1
            self._plan()

    def stop(self) -> int:
        """All answers end now; they are delivered with the tokens that they have. Returns how many."""
        self._cut()
        leaving, self._a = self._a, {name: self._a[name][:0] for name in _FIELDS}
        self._give(leaving)
        return len(leaving["left"])

    def withdraw(self, ended: asyncio.Future[None]) -> None:
        """Nobody waits any more for the request whose `submit` gave `ended`: its answers are dropped."""
        self._cut()
        for number in [n for n, request in self._requests.items() if request.ended is ended]:
            del self._requests[number]
            stay = self._a["owner"] != number
            self._a = {name: self._a[name][stay] for name in _FIELDS}
        self._plan()

    def fail(self, error: BaseException) -> None:
        """The replica is gone: nothing is delivered any more."""
        self._cut()
        requests, self._requests = self._requests, {}
        self._a = {name: self._a[name][:0] for name in _FIELDS}
        for request in requests.values():
            if not request.ended.done():
                request.ended.set_exception(error)

    def set_speed(self, speed: float) -> None:
        self._cut()
        self.speed = speed
        self._plan()

    # -- timelines -------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        if self._paused or self._timeline is not None or not len(self):
            return
        a = self._a
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._timeline = Timeline(self.costs, a["context"], a["left"], a["prefilled"], self.max_running)
        units, where = np.unique(a["unit"], return_inverse=True)
        ends = np.zeros(len(units))
        np.maximum.at(ends, where, self._timeline.end_s)
        ends = self._delivery(ends)
        order = np.argsort(-ends, kind="stable")
        self._due = list(zip(ends[order].tolist(), units[order].tolist()))
        self._wait()

    def _delivery(self, ends: np.ndarray) -> np.ndarray:
        """When units that end at `ends` (seconds of the timeline) are delivered: at the next of the moments that all
        replicas share, of which a timeline has 16 to 32. Each one costs the simulation as much as a unit."""
        last = ends.max()
        if last <= 0 or len(ends) <= 2:
            return ends
        grid = 2.0 ** np.floor(np.log2(last / self.speed / MOMENTS))
        at = (np.ceil((self._began + ends / self.speed) / grid) * grid - self._began) * self.speed
        return np.where(ends >= last, ends, np.clip(at, ends, last))

    def _wait(self) -> None:
        if self._due:
            at = self._began + self._due[-1][0] / self.speed
            self._timer = asyncio.get_running_loop().call_at(at, self._units_end)

    def _units_end(self) -> None:
        """The next units are complete."""
        self._timer = None
        passed = (asyncio.get_running_loop().time() - self._began) * self.speed + 1e-9
        units = []
        while self._due and self._due[-1][0] <= passed:
            units.append(self._due.pop()[1])
        a = self._a
        ended = a["unit"] == units[0] if len(units) == 1 else np.isin(a["unit"], units)
        where = np.flatnonzero(ended & ~a["gone"])
        a["done"][where] += a["left"][where]
        a["left"][where] = 0
        a["first"][where] = np.where(a["first"][where] == NO_TOKEN, self.version, a["first"][where])
        a["gone"][where] = True
        leaving = {name: a[name][where] for name in _FIELDS}
        if self._due:
            self._wait()
        else:
            self._timeline, self._a = None, {name: a[name][:0] for name in _FIELDS}
        self._give(leaving)

    def _cut(self) -> None:
        """Bring all answers to the present step; no timeline afterwards."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        timeline, self._timeline = self._timeline, None
        if timeline is None:
            return
        stay = ~self._a["gone"]
        a = self._a = {name: self._a[name][stay] for name in _FIELDS}
        start, end = timeline.start[stay], timeline.end[stay]
        passed = (asyncio.get_running_loop().time() - self._began) * self.speed + 1e-9
        step, prefilled = timeline.steps_at(passed)
        moved = np.clip(step - start, 0, end - start)
        a["prefilled"] |= (start < step) | ((start == step) & prefilled)
        a["done"] += moved
        a["context"] += moved
        a["left"] -= moved
        a["first"][(moved > 0) & (a["first"] == NO_TOKEN)] = self.version

    def _flush(self) -> None:
        """Deliver units that are complete and waited for their moment: their tokens are of this version."""
        a = self._a
        ended = np.isin(a["unit"], a["unit"][a["left"] > 0], invert=True)
        if ended.any():
            leaving = {name: a[name][ended] for name in _FIELDS}
            self._a = {name: a[name][~ended] for name in _FIELDS}
            self._give(leaving)

    def _note_spans(self) -> None:
        a = self._a
        for number, request in self._requests.items():
            mine = (a["owner"] == number) & (a["done"] > 0)
            if request.note is not None and mine.any():
                request.note(a["place"][mine], a["done"][mine], self.version)

    def _give(self, leaving: dict[str, np.ndarray]) -> None:
        owners = leaving["owner"]
        for number in dict.fromkeys(owners.tolist()):
            mine = slice(None) if (owners == number).all() else owners == number
            request = self._requests[number]
            places, done, first = leaving["place"][mine], leaving["done"][mine], leaving["first"][mine]
            last = np.where(done > 0, self.version, NO_TOKEN)
            try:
                request.deliver(places, done, first, last)
            except AsyncFlowError as error:  # boundary: refused answers are the error of whoever waits for them
                self._refused(number, request, error)
                continue
            request.open -= len(places)
            if not request.open:
                del self._requests[number]
                if not request.ended.done():
                    request.ended.set_result(None)

    def _refused(self, number: int, request: _Request, error: AsyncFlowError) -> None:
        """A request ends with an error; its other answers are dropped."""
        del self._requests[number]
        self._a["gone"] |= self._a["owner"] == number
        if not request.ended.done():
            request.ended.set_exception(error)
