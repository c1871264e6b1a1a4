"""The peer's side of dock.py: `transferqueue` on a private Ray of this process. Runs in .venv-peer.

This process is the producer, the consumer is an actor, the store is what the package starts: a controller and two
storage units. What is timed is what dock_ours.py times: a put until the call returns, a get from asking for metadata
until the values are in hand and one element of every row was read. Metadata is asked for in polling mode, as in the
other mode one empty answer stops the whole controller for seconds.
"""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
from dock_load import COLUMNS, JAGGED, Batch, Plan, digest, make_plan, one_row
from dock_measure import cpu_s, latencies, memory, now, reset_peak
from dock_process import serve

GRANT = 8
META_COLUMNS = ["a", "b", "c"]
POLL_S = 0.001
UNITS = 2


class Peer:
    def start(self, folder: str) -> dict[str, str]:
        """Starts Ray, whose files go to `folder`, and the store; returns versions."""
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", TQ_LOGGING_LEVEL="CRITICAL")
        os.environ.setdefault("TQ_NUM_THREADS", str(os.cpu_count() or 1))
        from importlib.metadata import version

        import ray
        import transfer_queue
        from omegaconf import OmegaConf

        self.ray, self.package = ray, transfer_queue
        ray.init(
            num_cpus=10, include_dashboard=False, object_store_memory=256 << 20, logging_level="ERROR",
            log_to_driver=False, _temp_dir=folder,
        )  # fmt: skip
        settings = {
            "controller": {"polling_mode": True},
            "backend": {"SimpleStorage": {"num_data_storage_units": UNITS, "total_storage_size": None}},
        }
        transfer_queue.init(OmegaConf.create(settings, flags={"allow_objects": True}))
        self.client = transfer_queue.get_client()
        self.consumers: list[Any] = []
        self.units = _processes("SimpleStorageUnit")
        self.controller = _processes("TransferQueueController")
        return {name: version(name) for name in ("transferqueue", "ray", "torch", "tensordict", "pyzmq")}

    def stop(self) -> None:
        try:
            self.package.close()
        finally:
            self.ray.shutdown()

    def users(self, count: int) -> list[Any]:
        while len(self.consumers) < count:
            actor = self.ray.remote(num_cpus=0.1)(Consumer).remote()
            self.consumers.append((actor, self.ray.get(actor.pid.remote())))
        return [actor for actor, _ in self.consumers[:count]]

    # -- sections --------------------------------------------------------------------------------------------------

    def cell(self, kind: str, mb: int, batch: int, repeats: int, streams: int) -> dict[str, Any]:
        plan, (user,) = make_plan(kind, mb, batch), self.users(1)
        tables = [_table(b) for b in plan.pool]
        self._put(tables, plan.some, part := f"{kind}-{mb}-{batch}-warm")
        got = self._get(user, plan, part, kind, len(plan.some), check=True)
        if got["digest"] != sum(plan.batch(i).digest() for i in plan.some):
            raise RuntimeError("the values that came back are not those that were put")
        self.client.clear_partition(part)
        pids = [os.getpid(), self.consumers[0][1], *self.units, *self.controller]
        times: dict[str, list[float]] = {name: [] for name in ("put_s", "get_s", "clear_s", "stream_s")}
        before = cpu_s(pids)
        for repeat in range(repeats):
            part = f"{kind}-{mb}-{batch}-{repeat}"
            began = now()
            self._put(tables, range(plan.puts), part)
            times["put_s"].append(now() - began)
            times["get_s"].append(self._get(user, plan, part, kind, plan.puts)["get_s"])
            began = now()
            self.client.clear_partition(part)
            times["clear_s"].append(now() - began)
        cpu = (cpu_s(pids) - before) / repeats / plan.nbytes * 1e9
        for repeat in range(streams):
            part = f"{kind}-{mb}-{batch}-stream{repeat}"
            began = now()
            coming = user.drain.remote(part, plan.rows, plan.puts, COLUMNS[kind], False)
            self._put(tables, range(plan.puts), part)
            times["stream_s"].append(self.ray.get(coming)["end"] - began)
            self.client.clear_partition(part)
        return {**times, "cpu_s_per_gb": cpu, "rows": plan.rows, "nbytes": plan.nbytes}

    def _put(self, tables: list[Any], puts: range, partition: str) -> None:
        for i in puts:
            self.client.put(tables[i % len(tables)], partition_id=partition)

    def _get(self, user: Any, plan: Plan, partition: str, kind: str, puts: int, check: bool = False) -> dict[str, Any]:
        got = self.ray.get(user.drain.remote(partition, plan.rows, puts, COLUMNS[kind], check))
        if puts == plan.puts and got["nbytes"] != plan.nbytes:
            raise RuntimeError(f"{got['nbytes']} bytes came back of {plan.nbytes}")
        return got

    def latency(self, count: int, gap_s: float, warm: int = 10) -> dict[str, float]:
        """One row at a time to a consumer that asks each millisecond, from the beginning of the put."""
        import torch

        (user,) = self.users(1)
        coming = user.arrivals.remote("late", count + warm, [*COLUMNS[JAGGED], "sent"])
        sent = torch.zeros((1, 1), dtype=torch.float64)
        table = _table(one_row(), sent=sent)
        for _ in range(count + warm):
            time.sleep(gap_s)
            sent[0, 0] = now()
            self.client.put(table, partition_id="late")
        seconds = self.ray.get(coming)
        self.client.clear_partition("late")
        return latencies(seconds[warm:])

    def grants(self, sizes: list[int], requests: int, repeats: int, consumers: list[int], many: int) -> dict[str, Any]:
        """As in dock_ours.py; a metadata request marks its rows as consumed, as a claim does."""
        found: dict[str, Any] = {"rows": {}, "consumers": {}}
        users = self.users(max(consumers, default=1))
        for size in sizes:
            windows = []
            for repeat in range(repeats):
                self._fill(part := f"rows-{size}-{repeat}", size)
                got = self.ray.get(users[0].grants.remote(part, "task0", requests))
                windows.append(got["ended"] - got["began"])
                self.client.clear_partition(part)
            found["rows"][str(size)] = requests / min(windows)
        for n in consumers:
            rates = []
            for repeat in range(repeats):
                self._fill(part := f"together-{n}-{repeat}", 8192)
                spans = self.ray.get([u.grants.remote(part, f"task{i}", many) for i, u in enumerate(users[:n])])
                rates.append(many * n / (max(s["ended"] for s in spans) - min(s["began"] for s in spans)))
                self.client.clear_partition(part)
            found["consumers"][str(n)] = max(rates)
        return found

    def _fill(self, partition: str, rows: int) -> None:
        import torch
        from tensordict import TensorDict

        chunk = min(rows, 2048)
        zeros = torch.zeros(chunk, 1, dtype=torch.int64)
        table = TensorDict(dict.fromkeys(META_COLUMNS, zeros), batch_size=chunk)
        for _ in range(rows // chunk):
            self.client.put(table, partition_id=partition)

    def hold(self, mb: int, batch: int) -> dict[str, float]:
        """Resident memory of the storage units over the payload while they hold it, and what comes back.

        Asked for first: memory that earlier rows left behind would be used again and not be seen.
        """
        (user,) = self.users(1)
        self.client.put(_table(one_row()), partition_id="first")
        plan = make_plan(JAGGED, mb, batch)
        tables = [_table(b) for b in plan.pool]
        before = self._resident()
        for pid in self.units:
            reset_peak(pid)
        self._put(tables, range(plan.puts), "hold")
        self._get(user, plan, "hold", JAGGED, plan.puts)
        peak = sum(memory(pid)["peak"] for pid in self.units)
        self.client.clear_partition("hold")
        time.sleep(1.0)
        return {
            "peak_over_payload": (peak - before) / plan.nbytes,
            "freed_over_cleared_all": 1 - (self._resident() - before) / plan.nbytes,
        }

    def _resident(self) -> int:
        return sum(memory(pid)["private"] + memory(pid)["shared"] for pid in self.units)


class Consumer:
    """An actor; the methods mirror those of our consumer."""

    def __init__(self) -> None:
        import torch
        import transfer_queue

        torch.set_num_threads(1)
        transfer_queue.init()
        self.client = transfer_queue.get_client()

    def pid(self) -> int:
        return os.getpid()

    def _take(self, partition: str, rows: int, columns: list[str]) -> dict[str, Any]:
        while not (meta := self.client.get_meta(columns, rows, partition, task_name="use")).size:
            time.sleep(POLL_S)
        values = dict(self.client.get_data(meta).items())
        for column in values.values():
            (column.values()[column.offsets()[:-1]] if column.is_nested else column[:, 0]).sum()
        return values

    def drain(self, partition: str, rows: int, puts: int, columns: list[str], check: bool) -> dict[str, Any]:
        get_s, nbytes, found = 0.0, 0, 0
        for _ in range(puts):
            began = now()
            values = self._take(partition, rows, columns)
            get_s += now() - began
            flat = [v.values() if v.is_nested else v for v in values.values()]
            nbytes += sum(v.nbytes for v in flat)
            if check:
                found += sum(digest(v.contiguous().numpy()) for v in flat)
        return {"get_s": get_s, "end": now(), "nbytes": nbytes, "digest": found}

    def arrivals(self, partition: str, count: int, columns: list[str]) -> list[float]:
        seconds = []
        for _ in range(count):
            sent = self._take(partition, 1, columns)["sent"]
            seconds.append(now() - float((sent.values() if sent.is_nested else sent).reshape(-1)[0]))
        return seconds

    def grants(self, partition: str, task: str, count: int) -> dict[str, float]:
        began = now()
        for _ in range(count):
            got = self.client.get_meta(META_COLUMNS, GRANT, partition, task_name=task).size
            if got != GRANT:
                raise RuntimeError(f"a grant of {got} rows instead of {GRANT}")
        return {"began": began, "ended": now()}


def _table(batch: Batch, **more: Any) -> Any:
    """The batch as the package takes it; shares the memory of its columns."""
    import torch
    from tensordict import TensorDict

    offsets = torch.from_numpy(batch.offsets)
    columns = {name: torch.from_numpy(values) for name, values in batch.fixed.items()}
    for name, values in batch.flat.items():
        columns[name] = torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), offsets)
    return TensorDict({**columns, **more}, batch_size=batch.rows)


def _processes(actor: str) -> list[int]:
    """Those that this process's Ray runs for actors of a class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        if any(actor in word for word in process.cmdline()):
            found.append(process.pid)
    if not found:
        raise RuntimeError(f"no process of {actor} was found")
    return found


if __name__ == "__main__":
    peer = Peer()
    names = ("start", "stop", "cell", "latency", "grants", "hold")
    serve({name: getattr(peer, name) for name in names})
