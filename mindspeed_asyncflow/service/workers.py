"""Processes that a run cannot do without: dock pairs, trainer and critic ranks; how processes are started and ended."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import DeadlineExceeded
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.platforms.base import current
from mindspeed_asyncflow.service import wiring
from mindspeed_asyncflow.service.actors import Remote, here, spawn
from mindspeed_asyncflow.service.cleanup import shm_path
from mindspeed_asyncflow.service.dock_pair import build_pair
from mindspeed_asyncflow.service.head import daemons
from mindspeed_asyncflow.service.placement import DEVICE
from mindspeed_asyncflow.service.process_table import ProcessTable
from mindspeed_asyncflow.service.relays import Place, RelayOfRank, over_loopback
from mindspeed_asyncflow.service.sides import Sides

T = TypeVar("T")
BESIDE_TRAINING = ("published", "finish_save", "saved_bytes", "drop_saved")  # what a rank answers while it trains
CLOSE_S = 5.0  # workers get this long to close in order before they are killed


class Workers:
    """Base of `Session`. Every process that `_spawn` starts is ended by `close` or `kill`."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.config, self.folder = config, folder
        self.sides = Sides(config, current(config.run.platform).name == "npu", os.environ)
        self.workers: list[Remote] = []
        self.table = ProcessTable(folder.processes)
        self.places: dict[str, Place] = {}
        self.home: dict[str, str] = {}  # Ray's id of the node where a process must run, by its name

    def spawn(self, name: str, devices: int = 0, **options: Any) -> Remote:
        options.setdefault("node", self.home.get(name, ""))
        worker = spawn(name, resources={DEVICE: float(devices)} if devices else {}, **options)
        worker.built = self.table.enter
        self.workers.append(worker)
        return worker

    def spawn_trainers(self, beside: int = 0) -> list[Remote]:
        """One process for each rank, on a device of its own; `beside`: threads for a second worker in it."""
        ranks = range(self.config.trainer.world_size)
        options = {"aside": BESIDE_TRAINING, "beside": beside, **self.sides.trainer()}
        return [self.spawn(f"trainer{r}", devices=1, **options) for r in ranks]

    def spawn_replica(self, index: int, devices: int, **options: Any) -> Remote:
        return self.spawn(f"rollout{index}", devices, **{**self.sides.replica(index), **options})

    def spawn_critics(self) -> list[Remote]:
        """One process for each critic rank, on a device of its own; none without a critic."""
        options = {"aside": BESIDE_TRAINING, **self.sides.critic()}
        return [self.spawn(f"critic{r}", devices=1, **options) for r in range(self.config.critic_size)]

    async def find_places(self, workers: Sequence[Remote], others: Mapping[str, Place], *, all_there: bool) -> None:
        """Where the workers run, by name, and the driver. `others`: places that are known already; `all_there`: no
        process on another node can come in later."""
        found = {"driver": Place(*here()), **others}
        for name, pid in {"driver": os.getpid(), **daemons()}.items():
            self.table.enter(name, pid, found["driver"].ip)

        async def ask(worker: Remote) -> None:
            found[worker.name] = Place(*await worker.where())

        await self.in_time({worker.name: ask(worker) for worker in workers})
        private = not os.environ.get("RAY_ADDRESS")
        self.places = over_loopback(found) if all_there or private else found

    async def find_places_again(self, workers: Sequence[Remote]) -> None:
        """Of processes that take the place of others of their names."""
        for worker in workers:
            node, ip = await self.within(worker.where(), f"{worker.name} to say where it runs")
            here_only = self.places[worker.name].ip == "127.0.0.1"
            self.places[worker.name] = Place(node, "127.0.0.1" if here_only else ip)

    async def start_dock(self, pairs: Sequence[Remote], secret: bytes) -> list[str]:
        """Addresses of the pairs, also left in the run folder for `asyncflow dock`."""
        starting = {}
        for i, pair in enumerate(pairs):
            host = self.places[pair.name].ip
            starting[pair.name] = pair.build(build_pair, self.config, secret, i, shm_path(f"arena{i}"), host)
        await self.in_time(starting)
        found = [await self.within(pair.get("address"), f"{pair.name} to name its address") for pair in pairs]
        self.folder.dock.touch(mode=0o600)
        self.folder.dock.write_text(json.dumps({"addresses": found, "secret": secret.hex()}), encoding="utf-8")
        return found

    async def rendezvous(self, first: Remote) -> tuple[str, int]:
        """Address at which trainer or critic ranks meet; the process of rank 0 keeps the port until it is used."""
        host = self.places[first.name].ip
        await self.in_time({first.name: first.build(wiring.hold_rendezvous_port, host)})
        return host, await self.within(first.get("port"), f"{first.name} to name its port")

    async def start_trainers(
        self, trainers: Sequence[Remote], spec: wiring.WorkerSpec, relays: Sequence[RelayOfRank], gives: bool = False
    ) -> None:
        """Build all ranks together. `gives`: their devices are used by replicas in turn."""
        master = await self.rendezvous(trainers[0])
        ranks = enumerate(trainers)
        await self.in_time({w.name: w.build(wiring.build_trainer, spec, r, master, relays[r], gives) for r, w in ranks})

    async def start_critics(self, critics: Sequence[Remote], spec: wiring.WorkerSpec) -> None:
        """Build all ranks together."""
        if not critics:
            return
        master = await self.rendezvous(critics[0])
        await self.in_time({w.name: w.build(wiring.build_critic, spec, r, master) for r, w in enumerate(critics)})

    async def in_time(self, starting: Mapping[str, Awaitable[Any]]) -> None:
        """First failure wins; a deadline names who is missing."""
        tasks = {asyncio.ensure_future(c): name for name, c in starting.items()}
        if not tasks:
            return
        limit = self.config.workflow.start_timeout_s
        try:
            done, waiting = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if waiting:
                missing = ", ".join(sorted(tasks[t] for t in waiting))
                raise DeadlineExceeded(f"not started after {limit:g} s (workflow.start_timeout_s): {missing}")
        finally:
            for task in tasks:
                task.cancel()

    async def within(self, work: Awaitable[T], whom: str) -> T:
        """Work outside the loops, which the watchdog does not see; the deadline is that of the start."""
        limit = self.config.workflow.start_timeout_s
        try:
            return await asyncio.wait_for(work, limit)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"waited {limit:g} s (workflow.start_timeout_s) for {whom}") from None

    async def close(self) -> None:
        """Ask every worker to close; `kill` ends those that do not."""
        closing = [asyncio.ensure_future(w.close()) for w in reversed(self.workers)]
        if not closing:
            return
        _, late = await asyncio.wait(closing, timeout=CLOSE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)

    def kill(self) -> None:
        """End the processes of all workers now."""
        self.folder.dock.unlink(missing_ok=True)
        self.table.remove()
        for worker in self.workers:
            worker.dismiss()
