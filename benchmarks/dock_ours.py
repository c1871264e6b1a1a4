"""Our side of dock.py: this process is the producer; a server and consumers are processes of their own.

What is timed: a put until the call returns, a get until claim and values are in the consumer's hands. Saying that the
rows are used (`done_s`) and freeing them (`clear_s`) are timed apart; CPU seconds hold all of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dock_calls as calls
import numpy as np
from dock_load import COLUMNS, JAGGED, Plan, make_plan, one_row
from dock_measure import cpu_s, latencies, memory, now, reset_peak
from dock_ours_roles import GRANT
from dock_process import Child, serve

ROLES = str(Path(__file__).with_name("dock_ours_roles.py"))
LIMIT_S = 300.0  # of any step of one child
MODES = {"view": (True, False), "copy": (True, True), "tcp": (False, False)}  # mapped, copied out
PAIRS = 4
PARTIAL_ROWS, PARTIAL_KEPT = 64, 2  # of each batch of the partial clear


def child(role: str, number: int = 0) -> Child:
    return Child(f"our {role} {number}", [sys.executable, ROLES, role])


@contextmanager
def dock(kind: str, payload_bytes: int, consumers: int = 1) -> Iterator[tuple[str, Child, list[Child]]]:
    """A served dock with room for the payload: its address, its process, consumers that are not connected yet."""
    with ExitStack() as stack:
        server = stack.enter_context(child("server"))
        address = server.ask("start", LIMIT_S, kind=kind, payload_bytes=payload_bytes)
        users = [stack.enter_context(child("consumer", i)) for i in range(consumers)]
        yield address, server, users
        server.ask("stop", LIMIT_S)


def cell(kind: str, mb: int, batch: int, repeats: int, streams: int, modes: list[str]) -> dict[str, Any]:
    """Put everything, then get everything, in each mode; then (streams) both at once."""
    plan = make_plan(kind, mb, batch)
    found: dict[str, Any] = {"rows": plan.rows, "puts": plan.puts, "nbytes": plan.nbytes}
    with dock(kind, plan.nbytes) as (address, server, (consumer,)):
        for mode in modes:
            mapped, copy = MODES[mode]
            consumer.ask("connect", LIMIT_S, addresses=[address], mapped=mapped)
            with calls.connect([address], mapped) as client:
                run = _Rounds(plan, kind, client, consumer, [os.getpid(), server.pid, consumer.pid], copy, mode)
                found[mode] = run.measure(repeats, streams)
            consumer.ask("close", LIMIT_S)
    return found


class _Rounds:
    """One mode of one cell."""

    def __init__(
        self, plan: Plan, kind: str, client: Any, consumer: Child, pids: list[int], copy: bool, mode: str
    ) -> None:
        self.plan, self.client, self.consumer, self.pids, self.mode = plan, client, consumer, pids, mode
        self.how = {"rows": plan.rows, "columns": COLUMNS[kind], "copy": copy}

    def measure(self, repeats: int, streams: int) -> dict[str, Any]:
        plan = self.plan
        rows = self._put("warm", plan.some)
        got = self._get("warm", len(plan.some), check=True)
        if got["digest"] != sum(plan.batch(i).digest() for i in plan.some):
            raise RuntimeError(f"{self.mode}: the values that came back are not those that were put")
        calls.clear(self.client, np.concatenate(rows))
        times: dict[str, list[float]] = {name: [] for name in ("put_s", "get_s", "done_s", "clear_s", "stream_s")}
        before = cpu_s(self.pids)
        for repeat in range(repeats):
            began = now()
            rows = self._put(str(repeat), range(plan.puts))
            times["put_s"].append(now() - began)
            got = self._get(str(repeat), plan.puts)
            times["get_s"].append(got["get_s"])
            times["done_s"].append(got["done_s"])
            times["clear_s"].append(self._clear(rows))
        cpu = (cpu_s(self.pids) - before) / repeats / plan.nbytes * 1e9
        for repeat in range(streams):
            self.consumer.tell("drain", **self._what(f"stream{repeat}", plan.puts))
            began = now()
            rows = self._put(f"stream{repeat}", range(plan.puts))
            times["stream_s"].append(self.consumer.answer(LIMIT_S, "drain")["end"] - began)
            self._clear(rows)
        return {**times, "cpu_s_per_gb": cpu}

    def _put(self, name: str, puts: range) -> list[np.ndarray]:
        part, plan = f"{self.mode}-{name}", self.plan
        return [calls.put(self.client, part, plan.batch(i)) for i in puts]

    def _what(self, name: str, puts: int, check: bool = False) -> dict[str, Any]:
        return {"partition": f"{self.mode}-{name}", "puts": puts, "check": check, **self.how}

    def _get(self, name: str, puts: int, check: bool = False) -> dict[str, Any]:
        got = self.consumer.ask("drain", LIMIT_S, **self._what(name, puts, check))
        if puts == self.plan.puts and got["nbytes"] != self.plan.nbytes:
            raise RuntimeError(f"{self.mode}: {got['nbytes']} bytes came back of {self.plan.nbytes}")
        return got

    def _clear(self, rows: list[np.ndarray]) -> float:
        began = now()
        calls.clear(self.client, np.concatenate(rows))
        return now() - began


def latency(count: int, gap_s: float, warm: int = 10) -> dict[str, float]:
    """One row at a time to a consumer that waits for it, as views: from the beginning of the put."""
    row = one_row()
    with dock(calls.LATE, 2 * (count + warm) * row.nbytes) as (address, _, (consumer,)):
        consumer.ask("connect", LIMIT_S, addresses=[address], mapped=True)
        columns = [*COLUMNS[JAGGED], "sent"]
        with calls.connect([address], True) as client:
            consumer.tell("arrivals", partition="late", count=count + warm, columns=columns)
            for _ in range(count + warm):
                time.sleep(gap_s)
                calls.put(client, "late", row, sent=now())
            seconds = consumer.answer(LIMIT_S, "arrivals")
    return latencies(seconds[warm:])


def grants(sizes: list[int], requests: int, repeats: int, consumers: list[int], many: int) -> dict[str, Any]:
    """Metadata requests of 8 rows per second.

    `rows`: with so many rows in the partition, one consumer, windows of `requests`, the best one. `consumers`: 8k
    rows and so many processes, each with a task of its own and `many` requests, together, the best of `repeats`.
    """
    found: dict[str, Any] = {"rows": {}, "consumers": {}}
    most = max([8192 * len(consumers) * repeats, *sizes])
    with dock(calls.META, 64 * most, max(consumers, default=1)) as (address, _, users):
        for user in users:
            user.ask("connect", LIMIT_S, addresses=[address], mapped=True)
        with calls.connect([address], True) as client:
            for size in sizes:
                windows = _windows(client, users[0], size, requests, repeats)
                found["rows"][str(size)] = requests / min(windows)
            for n in consumers:
                rates = [_together(client, users[:n], f"together-{n}-{i}", many) for i in range(repeats)]
                found["consumers"][str(n)] = max(rates)
    return found


def _fill(client: Any, partition: str, rows: int) -> None:
    chunk = min(rows, 8192)
    zeros = np.zeros(chunk, np.int64)
    for _ in range(0, rows, chunk):
        calls.put_values(client, partition, dict.fromkeys(calls.META_COLUMNS, zeros))


def _windows(client: Any, user: Child, size: int, requests: int, repeats: int) -> list[float]:
    """Seconds of each window; a small partition has rows for one of them only."""
    together = size // (requests * GRANT)
    seconds: list[float] = []
    while len(seconds) < repeats:
        partition = f"rows-{size}-{len(seconds)}"
        _fill(client, partition, size)
        for _ in range(min(together, repeats - len(seconds))):
            got = user.ask("grants", LIMIT_S, partition=partition, task="task0", count=requests)
            seconds.append(got["ended"] - got["began"])
    return seconds


def _together(client: Any, users: list[Child], partition: str, count: int) -> float:
    """Requests per second of all users, from the first that begins to the last that ends."""
    _fill(client, partition, 8192)
    start = now() + 0.05
    for i, user in enumerate(users):
        user.tell("grants", partition=partition, task=f"task{i}", count=count, start=start)
    spans = [user.answer(LIMIT_S, "grants") for user in users]
    return count * len(users) / (max(s["ended"] for s in spans) - min(s["began"] for s in spans))


def hold(mb: int, batch: int) -> dict[str, float]:
    """Memory of the store while it holds the payload, over the payload: the larger of mapped and TCP clients.

    Used bytes of the arena, files beside it, and what the server's process grows by, at its peak; `resident` counts
    the whole arena, also what is free in it. And what comes back: 62 of 64 rows of each batch are cleared, or all.
    """
    peaks, resident = {}, 0.0
    for mode in ("view", "tcp"):
        mapped = MODES[mode][0]
        plan = make_plan(JAGGED, mb, batch)
        with dock(JAGGED, plan.nbytes) as (address, server, (consumer,)), calls.connect([address], mapped) as client:
            consumer.ask("connect", LIMIT_S, addresses=[address], mapped=mapped)
            empty, before = calls.used_bytes(client), memory(server.pid)
            files = server.ask("files", LIMIT_S)
            reset_peak(server.pid)
            run = _Rounds(plan, JAGGED, client, consumer, [], False, mode)
            rows = run._put("hold", range(plan.puts))
            run._get("hold", plan.puts)
            held, after = calls.used_bytes(client), memory(server.pid)
            run._clear(rows)
            growth = after["peak"] - after["shared"] - before["private"] + server.ask("files", LIMIT_S) - files
            resident = max(resident, (after["peak"] - before["private"]) / plan.nbytes)
            peaks[mode] = (held - empty + growth) / plan.nbytes
            left = calls.used_bytes(client) - empty
    return {
        "peak_over_payload": max(peaks.values()),
        **{f"peak_{mode}": peak for mode, peak in peaks.items()},
        "resident_over_payload": resident,
        "freed_over_cleared_all": 1 - left / plan.nbytes,
        "freed_over_cleared_part": _partial_clear(min(mb, 128)),
    }


def _partial_clear(mb: int) -> float:
    plan = make_plan(JAGGED, mb, PARTIAL_ROWS)
    with dock(JAGGED, plan.nbytes) as (address, _, _), calls.connect([address], True) as client:
        rows = [calls.put(client, "part", plan.batch(i)) for i in range(plan.puts)]
        held = calls.used_bytes(client)
        for handles in rows:
            calls.clear(client, handles[PARTIAL_KEPT:])
        freed = held - calls.used_bytes(client)
    kept = 0
    for i in range(plan.puts):
        batch, cut = plan.batch(i), PARTIAL_KEPT
        kept += sum(v[:cut].nbytes for v in batch.fixed.values())
        kept += sum(v[: batch.offsets[cut]].nbytes for v in batch.flat.values())
    return freed / (plan.nbytes - kept)


def pairs(mb: int, batch: int) -> dict[str, float]:
    """Four pairs on own addresses, a consumer at each, no shared memory: the busiest's share of all traffic."""
    plan = make_plan(JAGGED, mb, batch)
    with ExitStack() as stack:
        servers = [stack.enter_context(child("server", i)) for i in range(PAIRS)]
        addresses = [
            server.ask("start", LIMIT_S, kind=JAGGED, payload_bytes=plan.nbytes, host=f"127.0.0.{i + 1}", pair=i)
            for i, server in enumerate(servers)
        ]
        users = [stack.enter_context(child("consumer", i)) for i in range(PAIRS)]
        for i, user in enumerate(users):
            user.ask("connect", LIMIT_S, addresses=addresses, mapped=False, home=i)
        client = stack.enter_context(calls.connect(addresses, False))
        for user in users:
            user.tell("drain_sealed", partition="pairs", rows=batch, columns=COLUMNS[JAGGED])
        for i in range(plan.puts):
            calls.put(client, "pairs", plan.batch(i))
        client.seal("pairs")
        got = sum(user.answer(LIMIT_S, "drain_sealed")["nbytes"] for user in users)
        if got != plan.nbytes:
            raise RuntimeError(f"pairs: {got} bytes came back of {plan.nbytes}")
        traffic = [server.ask("traffic", LIMIT_S) for server in servers]
        for server in servers:
            server.ask("stop", LIMIT_S)
    shares = {what: max(t[what] for t in traffic) / sum(t[what] for t in traffic) for what in ("bytes", "messages")}
    return {**shares, "payload_over_traffic": plan.nbytes / sum(t["bytes"] for t in traffic)}


if __name__ == "__main__":
    serve({"cell": cell, "latency": latency, "grants": grants, "hold": hold, "pairs": pairs})
