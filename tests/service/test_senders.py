"""One transfer between a sender and its replica, whatever either of them does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.errors import EngineError, PlatformError, WeightSyncError, WorkerLost
from mindspeed_asyncflow.records import UpdateReport, WeightManifest
from mindspeed_asyncflow.service import senders as module
from mindspeed_asyncflow.service.relays import Place
from mindspeed_asyncflow.service.senders import Senders

MANIFEST = WeightManifest(3, "", 0, (), (), "f" * 16)
REPORT = UpdateReport(3, 0.1, "f" * 16)
DROPPED = WeightSyncError("version 3 was dropped")
DIRTY = WeightSyncError("the engine is DIRTY")
DEAD = WorkerLost("rollout0 (process 7) died")
BROKE = EngineError("connection closed by peer")
NEVER = object()


class Fake:
    """A process; each method gives what it was told, or raises it, or never ends."""

    def __init__(self, name: str, **results: Any) -> None:
        self.name, self.results, self.called, self.killed = name, results, [], False

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> Any:
            self.called.append(method)
            await asyncio.sleep(0)
            result = self.results.get(method)
            if result is NEVER:
                await asyncio.Event().wait()
            if isinstance(result, Exception):
                raise result
            return result

        return call

    def method(self, path: str) -> Any:
        return getattr(self, path)

    def kill(self) -> None:
        self.killed = True


class World:
    """What `Senders` takes from a session, and which processes it started."""

    def __init__(self, nodes: tuple[str, ...] = ("n",), **results: Any) -> None:
        self.config = parse_config("", ["rollout.ascend.transfer=hccl"])
        self.places = {f"trainer{i}": Place(node, f"10.0.0.{i}") for i, node in enumerate(nodes)}
        self.ranks = [Fake(f"trainer{i}", devices=[str(4 + i)]) for i in range(len(nodes))]
        self.sides = SimpleNamespace(replica=lambda index: {"environment": {}}, ports=None)
        self.results, self.started = results, []

    def spawn(self, name: str, **options: Any) -> Fake:
        self.started.append((name, options))
        return Fake(name, get=5000, **self.results)

    async def pair(self, replica: Fake) -> Senders:
        senders = Senders(self, self.ranks)
        await senders.add(0, replica, replica.build(), None)
        return senders


def load(world: World, replica: Fake) -> tuple[Any, Fake]:
    """(what came of one load: the report or the error, the sender)"""

    async def run() -> tuple[Any, Fake]:
        senders = await world.pair(replica)
        sender = senders._pairs[0][0]
        try:
            return await asyncio.wait_for(senders.load(0, MANIFEST), 20.0), sender
        except Exception as error:
            return error, sender

    return asyncio.run(run())


def test_both_sides_meet_before_anything_is_sent_and_a_load_needs_both() -> None:
    replica = Fake("rollout0", load=REPORT)
    found, sender = load(World(), replica)
    assert found == REPORT
    assert sender.called == ["build", "get", "join", "ready", "send"]
    assert replica.called == ["build", "engine.join", "load"]
    assert not sender.killed and not replica.killed


def test_a_sender_runs_on_the_device_of_a_trainer_rank_in_turn() -> None:
    world = World(("n", "n"))

    async def run() -> None:
        senders = Senders(world, world.ranks)
        for index in (0, 1, 2):
            replica = Fake(f"rollout{index}")
            await senders.add(index, replica, replica.build(), None)

    asyncio.run(run())
    devices = [options["environment"]["ASCEND_RT_VISIBLE_DEVICES"] for _, options in world.started]
    assert [name for name, _ in world.started] == ["sender0", "sender1", "sender2"] and devices == ["4", "5", "4"]


def test_a_version_that_is_not_in_the_relay_reaches_neither_side() -> None:
    replica = Fake("rollout0", load=REPORT)
    found, sender = load(World(ready=DROPPED), replica)
    assert found is DROPPED and "send" not in sender.called and "load" not in replica.called
    assert not sender.killed and not replica.killed


def test_a_version_that_is_taken_back_is_told_by_the_sender_and_both_live_on() -> None:
    replica = Fake("rollout0", load=DIRTY)
    found, sender = load(World(send=DROPPED), replica)
    assert found is DROPPED and not sender.killed and not replica.killed


def test_what_the_replica_refuses_stops_the_run_as_with_the_relay() -> None:
    found, sender = load(World(), Fake("rollout0", load=DIRTY))
    assert found is DIRTY and not sender.killed


@pytest.mark.parametrize(
    ("send", "loads", "said"),
    [
        (BROKE, DEAD, "process 7"),  # a replica dies, and the broadcast to it breaks
        (WorkerLost("sender0 (process 8) died"), DIRTY, "process 8"),
        (BROKE, DIRTY, "broke off .*connection closed"),
        (None, NEVER, "rollout0 is stuck"),
        (NEVER, DIRTY, "sender0 is stuck .*the engine is DIRTY"),
    ],
)
def test_a_pair_that_is_out_of_step_is_lost_together(
    send: Any, loads: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    replica = Fake("rollout0", load=loads)
    found, sender = load(World(send=send), replica)
    assert isinstance(found, WorkerLost)
    with pytest.raises(WorkerLost, match=said):
        raise found
    assert sender.killed and replica.killed


def test_a_replica_that_comes_again_gets_a_sender_of_its_own() -> None:
    world = World()

    async def run() -> tuple[Fake, Fake, Any]:
        senders = await world.pair(Fake("rollout0"))
        first = senders._pairs[0][0]
        again = Fake("rollout0", load=REPORT)
        await senders.add(0, again, again.build(), None)
        second = senders._pairs[0][0]
        return first, second, await senders.load(0, MANIFEST)

    first, second, report = asyncio.run(run())
    assert first.killed and not second.killed and report == REPORT and "send" not in first.called


def test_trainer_ranks_of_several_nodes_have_no_relay_that_a_sender_could_read() -> None:
    world = World(("n", "m"))
    with pytest.raises(PlatformError, match=r"transfer=hccl.*10\.0\.0\.0, 10\.0\.0\.1: set it to relay"):
        Senders(world, world.ranks)
