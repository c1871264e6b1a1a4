"""A bare controller with short verbs, and a served dock with real sockets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mindspeed_asyncflow.dock import table
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, ColumnSpec, Schema, TaskSpec, grpo_tasks
from mindspeed_asyncflow.dock.controller import Controller
from mindspeed_asyncflow.dock.member import Member
from mindspeed_asyncflow.dock.partition import ClaimRequest, Grant
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import AsyncFlowError
from mindspeed_asyncflow.records import PromptRow

SECRET = "a secret of this test"


class Bench:
    """Controller on a clock of its own: columns a, b, c; task `first` reads a, `second` a and b, `third` c."""

    def __init__(self, lease_s: float = 10.0, **how) -> None:
        columns = [ColumnSpec(name, "int32") for name in "abc"]
        tasks = [TaskSpec("first", ("a",)), TaskSpec("second", ("a", "b")), TaskSpec("third", ("c",))]
        self.schema = Schema(columns, tasks)
        self.control = Controller(self.schema, lease_s, **how)
        self.now = 0.0
        self._keys = itertools.count()

    def put(
        self, ids: list[int], size: int = 4, columns: str = "a", partition: str = "p", count: int | None = None
    ) -> np.ndarray:
        """Handles [groups, rows]."""
        n = count or size
        part = self.control.check_put(partition, ids, [size] * len(ids), [n] * len(ids))
        total = len(ids) * n
        members = np.tile(np.arange(n, dtype=np.int32), len(ids))
        slots, _ = self.control.put(
            part, ids, [size] * len(ids), np.full(len(ids), n), members, self.schema.mask(columns),
            np.zeros(total, np.int64), self.now,
        )  # fmt: skip
        return part.handles(slots).reshape(len(ids), n)

    def write(self, rows: np.ndarray, columns: str, version: int | None = None) -> None:
        part, slots = self.control.resolve(np.ravel(rows))
        versions = None if version is None else (np.full(len(slots), version, np.int32),) * 2
        self.control.commit(part, slots, self.schema.mask(columns), None, versions, self.now)

    def ask(self, task: str, count: int, wait_s: float = 0.0, **how) -> tuple[int, Grant | None]:
        """(key, grant); None: parked."""
        key = next(self._keys)
        how = {"partition": "p", "worker": "w"} | how
        request = ClaimRequest(task=task, count=count, deadline=self.now + wait_s, key=key, **how)
        return key, self.control.claim(request, self.now)

    def claim(self, task: str, count: int, **how) -> Grant:
        grant = self.ask(task, count, **how)[1]
        assert grant is not None, "the claim was parked"
        return grant

    def done(self, grant: Grant, rows: np.ndarray | None = None) -> None:
        part, slots = (None, None) if rows is None else self.control.resolve(rows)
        self.control.done(grant.claim_id, part, slots, self.now)

    def release(self, grant: Grant) -> None:
        self.control.release(grant.claim_id, None, None, self.now)

    def free(self, rows: np.ndarray) -> None:
        self.control.free(*self.control.resolve(np.ravel(rows)), self.now)

    def drop(self, rows: np.ndarray, reason: str = "test") -> None:
        self.control.drop(*self.control.resolve(np.ravel(rows)), reason, self.now)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.control.tick(self.now)

    def outcomes(self) -> dict[int, Grant | AsyncFlowError]:
        found, self.control.outcomes = dict(self.control.outcomes), []
        return found

    def counts(self, task: str, partition: str = "p") -> list[int]:
        """Rows waiting, ready, claimed, done."""
        return self.control.partitions[partition].queues[task].counts[1:]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="session")
def new_bench() -> type[Bench]:
    """For tests that need a fresh one per generated example."""
    return Bench


@pytest.fixture
def server() -> Iterator[DockServer]:
    with DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=4, lease_s=30.0, secret=SECRET) as served:
        yield served
        assert served.failure is None


@pytest.fixture
def connect(server: DockServer) -> Iterator[Callable[..., DockClient]]:
    """Makes clients of `server`; all are closed at the end."""
    made: list[DockClient] = []

    def make(**how) -> DockClient:
        made.append(DockClient(server.address, SECRET, wait_s=10.0, **how))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture(params=["mapped", "remote"])
def client(request: pytest.FixtureRequest, connect: Callable[..., DockClient]) -> DockClient:
    made = connect(map_arena=request.param == "mapped")
    assert made.mapped == (request.param == "mapped")
    return made


@pytest.fixture
def prompts() -> Callable[..., list[list[PromptRow]]]:
    """prompts(n, size, first, tokens): n groups of `size` rows with ids from `first`; the prompt tells its group."""

    def make(n: int, size: int = 4, first: int = 0, tokens: int = 6) -> list[list[PromptRow]]:
        return [
            [PromptRow(g, m, size, np.full(tokens, g, np.int32), f"truth {g}") for m in range(size)]
            for g in range(first, first + n)
        ]

    return make


PAIR_COLUMNS = [
    ColumnSpec("prompt", "int32", "ragged", shared=True, tokens=True),
    ColumnSpec("x", "int32", "ragged", tokens=True),
    ColumnSpec("y", "float32"),
    ColumnSpec("note", "uint8", "text"),
    ColumnSpec("turns", "int16", "nested"),
    ColumnSpec("grid", "bfloat16", "ragged", shape=(2, 3)),
]
PAIR_TASKS = [TaskSpec("make", ("prompt",)), TaskSpec("use", ("x",)), TaskSpec("learn", ("prompt", "x", "y"))]


class Dock:
    """Several pairs, each on a loopback address of its own as if on a node of its own; nothing is mapped across."""

    def __init__(self, count: int, **how) -> None:
        how = {"arena_mb": 2, "lease_s": 30.0, "secret": SECRET} | how
        self.servers = [DockServer(PAIR_COLUMNS, PAIR_TASKS, host=f"127.0.0.{2 + i}", **how) for i in range(count)]
        for server in self.servers:
            server.start()
        self.addresses = [server.address for server in self.servers]
        self.clients: list[DockClient] = []
        self.client(home=0)  # joins them
        self.when(lambda: all(link.up for i in range(count) for link in self.member(i).peers.links.values()))

    def client(self, home: int = 0, **how) -> DockClient:
        how = {"wait_s": 10.0, "map_arena": False, "restart_s": 0.1} | how
        self.clients.append(DockClient(self.addresses, SECRET, home=home, **how))
        return self.clients[-1]

    def member(self, number: int) -> Member:
        return self.servers[number]._member

    def stats(self, number: int) -> dict:
        return self.clients[0]._pair(number).stats()

    def lose(self, number: int) -> None:
        """This pair goes away with its node."""
        self.servers[number].close()

    @staticmethod
    def when(condition: Callable[[], object], limit_s: float = 10.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"did not happen within {limit_s} s"
            time.sleep(0.002)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.close()
            assert server.failure is None


@pytest.fixture
def docks() -> Iterator[Callable[..., Dock]]:
    """docks(n): n pairs as one dock."""
    made: list[Dock] = []

    def make(count: int = 3, **how) -> Dock:
        made.append(Dock(count, **how))
        return made[-1]

    yield make
    for dock in made:
        dock.close()


def unpack_handles(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pairs, partition numbers, slots, generations; int64 [n] each."""
    numbers = rows >> table.NUMBER_SHIFT
    slots = (rows >> table.GENERATION_BITS) & (table.MAX_SLOTS - 1)
    return (
        numbers >> table.PARTITION_BITS,
        numbers & ((1 << table.PARTITION_BITS) - 1),
        slots,
        rows & table.LAST_GENERATION,
    )
