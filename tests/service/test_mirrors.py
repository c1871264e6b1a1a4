"""Which replica fetches for its node, and who takes over when it dies. No processes."""

import asyncio

import pytest

from mindspeed_asyncflow.config.schema import WorkflowConfig
from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.service.mirrors import NOBODY, Mirrors
from mindspeed_asyncflow.service.relays import Place, plan_relays

A, B, C = Place("a", "10.0.0.1"), Place("b", "10.0.0.2"), Place("c", "10.0.0.3")
PLACES = {0: B, 1: A, 2: B, 3: C, 4: B}


class Replica:
    def __init__(self):
        self.routes, self.dead = [], False

    async def use_mirror(self, route):
        if self.dead:
            raise WorkerLost("gone")
        self.routes.append(route)

    async def fetch(self, manifest):
        raise AssertionError("nothing is published here")


class Sync:
    def __init__(self):
        self.told = []

    def replace_mirror(self, first, mirror):
        self.told.append((first, None if mirror is None else mirror.replicas))


@pytest.fixture
def made():
    """Replica 4 is still starting."""
    workers = {i: Replica() for i in (0, 1, 2, 3)}
    served = []

    async def serve(servers, secret):
        served.append(dict(servers))
        return [f"{ip}:1" for ip in servers.values()]

    mirrors = Mirrors(plan_relays([A, A]), WorkflowConfig(), workers, serve)

    async def start():
        for index in sorted(workers):
            await mirrors.need(index, PLACES)

    asyncio.run(start())
    mirrors.sync = Sync()
    return mirrors, workers, served


def test_one_replica_of_a_node_fetches_for_all_that_are_or_come_there(made):
    mirrors, workers, served = made
    assert [(m.node, m.replicas) for m in mirrors.all()] == [(B.ip, (0, 2, 4)), (C.ip, (3,))]
    assert [len(w.routes) for w in workers.values()] == [1, 0, 0, 1]
    assert workers[0].routes[0].path != workers[3].routes[0].path
    assert workers[0].routes[0].sources == ("10.0.0.1:1",) and served == [{0: A.ip}]


def test_a_late_replica_uses_the_mirror_that_knows_it_and_makes_one_on_a_node_of_its_own(made):
    mirrors, workers, _ = made
    workers[4], workers[5] = Replica(), Replica()
    asyncio.run(mirrors.need(4, PLACES))
    asyncio.run(mirrors.need(5, PLACES | {5: Place("d", "10.0.0.4")}))
    assert (workers[4].routes, mirrors.sync.told) == ([], [(NOBODY, (5,))])


def test_when_the_one_that_fetches_dies_the_next_one_of_its_node_takes_over(made):
    mirrors, workers, _ = made
    first = workers.pop(0)
    assert asyncio.run(mirrors.lost(0)) == []
    assert mirrors.sync.told == [(0, (2, 4, 0))]
    assert workers[2].routes[0].path != first.routes[0].path


def test_one_that_comes_back_loads_through_the_mirror_that_its_node_has_by_then(made):
    mirrors, workers, _ = made
    for dead in (2, 0):  # nobody fetches for their node any more
        del workers[dead]
        assert asyncio.run(mirrors.lost(dead)) == []
    assert mirrors.sync.told == [(0, None)]
    workers[0], workers[2] = Replica(), Replica()
    asyncio.run(mirrors.need(2, PLACES))
    asyncio.run(mirrors.need(0, PLACES))
    assert mirrors.sync.told == [(0, None), (NOBODY, (2, 0, 4))]
    assert (len(workers[2].routes), len(workers[0].routes)) == (1, 0)
    del workers[2]
    asyncio.run(mirrors.lost(2))
    workers[2] = Replica()
    asyncio.run(mirrors.need(2, PLACES))
    assert mirrors.sync.told[-1] == (2, (0, 4, 2)) and workers[2].routes == []


def test_one_that_only_loads_changes_nothing_when_it_dies(made):
    mirrors, workers, _ = made
    del workers[2]
    assert asyncio.run(mirrors.lost(2)) == []
    assert mirrors.sync.told == [] and mirrors.all()[0].replicas[0] == 0


def test_replicas_of_a_node_where_nobody_can_fetch_any_more_are_named(made):
    mirrors, workers, _ = made
    del workers[0]
    workers[2].dead = True
    assert asyncio.run(mirrors.lost(0)) == [2]
    assert mirrors.sync.told == [(0, None)]
    workers[4] = Replica()
    asyncio.run(mirrors.need(4, {1: A, 3: C, 4: B}))  # it was known to the old mirror, and comes up without one
    assert mirrors.sync.told[-1] == (NOBODY, (4,))
