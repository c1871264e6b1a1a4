"""Versions on their way to replicas on another node: who waits for them, and who goes on. Scripted and real mirrors."""

import asyncio
import json

import pytest

from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError
from mindspeed_asyncflow.reshard.relay_mirror import PullReport
from mindspeed_asyncflow.workflow.arrivals import Mirror
from mindspeed_asyncflow.workflow.weight_sync import WeightSync
from tests.workflow.fakes import FakeRollout, FakeTrain, prompts_of, run_loops
from tests.workflow.test_run import config
from tests.workflow.test_weight_sync import TABLE, Replica, publish

UPDATES = ["delayed", "rolling", "in_flight"]


class Link:
    """To node b: a fetch ends when the test lets it (`arrive`, `fail`)."""

    def __init__(self):
        self.fetches = []  # version of each
        self.ending = []

    async def fetch(self, manifest):
        self.fetches.append(manifest.version)
        self.ending.append(asyncio.get_running_loop().create_future())
        await self.ending[-1]
        return manifest, PullReport(manifest.version, full_bytes=100, wire_bytes=40, seconds=2.0)

    async def arrive(self):
        self.ending[-1].set_result(None)
        await turns()

    async def fail(self, error):
        self.ending[-1].set_exception(error)
        await turns()


async def turns():
    for _ in range(20):
        await asyncio.sleep(0)


def apart(link, *replicas, here=(), update="delayed", keep=3):
    """`replicas` are on node b, all but those in `here`."""
    there = tuple(i for i in range(len(replicas)) if i not in here)
    mirrors = [Mirror("b", there, link.fetch)]
    return WeightSync(replicas, "float32", "nowhere", TABLE.text, update=update, keep=keep, mirrors=mirrors)


async def started(sync, link):
    """Version 0 is everywhere."""
    publish(sync, 0)
    starting = asyncio.create_task(sync.bring_all_up())
    await turns()
    assert not starting.done()
    await link.arrive()
    await starting


async def answers(sync, index, needed):
    async with sync.boundary(index, needed) as since:
        return since


@pytest.mark.parametrize("update", UPDATES)
def test_a_replica_goes_on_with_its_version_until_the_newer_one_has_arrived(update):
    link, away, home = Link(), Replica(), Replica()
    sync = apart(link, away, home, here=(1,), update=update)

    async def scenario():
        await started(sync, link)
        followers = [asyncio.create_task(sync.follow(i)) for i in (0, 1)] if update == "in_flight" else []
        publish(sync, 1)
        await turns()
        assert await answers(sync, 1, 0) == 1, "the replica on the trainer's node has it at once"
        assert await answers(sync, 0, 0) == 0 and sync.behind() == [1, 0]
        await link.arrive()
        assert await answers(sync, 0, 0) == 1
        for follower in followers:
            follower.cancel()

    asyncio.run(scenario())
    assert away.loads == home.loads == [0, 1] and link.fetches == [0, 1]


@pytest.mark.parametrize("update", UPDATES)
def test_a_batch_that_the_law_forbids_to_answer_with_less_waits_for_the_arrival(update):
    link, replica = Link(), Replica()
    sync = apart(link, replica, update=update)

    async def scenario():
        await started(sync, link)
        publish(sync, 1)
        batch = asyncio.create_task(answers(sync, 0, 1))
        await turns()
        assert not batch.done()
        await link.arrive()
        return await batch

    assert asyncio.run(scenario()) == 1


def test_a_replica_that_joins_on_another_node_loads_only_what_has_arrived_there():
    link, home, late = Link(), Replica(), Replica()
    sync = WeightSync([home, None], "float32", "nowhere", TABLE.text)

    async def scenario():
        publish(sync, 0)
        await sync.bring_all_up()
        sync.replace_mirror(-1, Mirror("c", (1,), link.fetch))
        sync.join(1, late)
        joining = asyncio.create_task(answers(sync, 1, 0))
        await turns()
        assert not joining.done()
        await link.arrive()
        assert await joining == 0
        publish(sync, 1)
        await turns()
        assert (await answers(sync, 0, 0), await answers(sync, 1, 0)) == (1, 0)
        await link.arrive()
        assert await answers(sync, 1, 0) == 1

    asyncio.run(scenario())


def test_replicas_of_one_node_share_each_fetch_and_skip_what_is_superseded():
    link, replicas = Link(), [Replica(), Replica()]
    sync = apart(link, *replicas)

    async def scenario():
        await started(sync, link)
        for version in (1, 2, 3):
            publish(sync, version)
            await turns()
        await link.arrive()  # of 1; then 3 is fetched
        assert [await answers(sync, i, 0) for i in (0, 1)] == [1, 1]
        everywhere = asyncio.create_task(sync.bring_all_up())
        await turns()
        assert not everywhere.done(), "the newest is on its way"
        await link.arrive()
        await everywhere

    asyncio.run(scenario())
    assert link.fetches == [0, 1, 3] and [r.loads for r in replicas] == [[0, 1, 3]] * 2
    assert (sync.arrivals.step_fetch_s, sync.arrivals.step_saved) == (2.0, 0.6)
    sync.new_step()
    assert (sync.arrivals.step_fetch_s, sync.arrivals.step_saved) == (0.0, 0.0)


def test_a_version_that_is_dropped_while_it_is_fetched_makes_room_for_the_newest():
    link, replica = Link(), Replica()
    sync = apart(link, replica, keep=3)

    async def scenario():
        await started(sync, link)
        publish(sync, 1)
        await turns()
        publish(sync, 2)
        publish(sync, 3)  # version 4 may be on its way into the slot of 1
        await link.fail(WeightSyncError("version 1 is not in the relay"))
        assert await answers(sync, 0, 0) == 0
        await link.arrive()
        return await answers(sync, 0, 3)

    assert asyncio.run(scenario()) == 3
    assert link.fetches == [0, 1, 3]


@pytest.mark.parametrize("error", [WeightSyncError("other bytes"), DeadlineExceeded("nothing came for 3 s")])
def test_another_failure_of_a_fetch_stops_the_run_and_names_replica_node_and_version(error):
    link = Link()
    sync = apart(link, Replica(), Replica(), here=(0,))
    said = f"rollout1 could not fetch weight version 1 to node b: {error}"

    async def scenario():
        await started(sync, link)
        publish(sync, 1)
        waiting = asyncio.create_task(answers(sync, 1, 1))
        await turns()
        await link.fail(error)
        with pytest.raises(WeightSyncError, match=said):
            await waiting
        for index in (0, 1):  # nobody needs the version, and the run stops all the same
            with pytest.raises(WeightSyncError, match=said):
                await answers(sync, index, 0)
        with pytest.raises(WeightSyncError, match=said):
            publish(sync, 2)

    asyncio.run(scenario())


def test_the_no_progress_message_names_a_running_fetch():
    link = Link()
    sync = apart(link, Replica())

    async def scenario():
        await started(sync, link)
        publish(sync, 1)
        await turns()
        return sync.describe()

    assert "node b fetches 1 for 0." in asyncio.run(scenario())


# ---- real loops, relay, server and mirror ----------------------------------------------------------------------------

WEIGHTS = 50_000  # float32: 200 kB


def metrics_of(folder):
    (file,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def looped(tmp_path, link, **more):
    """The replicas take 60 ms for a step and the trainer 20 ms: rollout is the limit."""
    rollouts = [FakeRollout(delay_s=0.06) for _ in range(2)]
    train = FakeTrain(delay_s=0.005, weights=WEIGHTS)
    settings = config(replicas=2, **more)
    return run_loops(settings, tmp_path, prompts_of(100, 4), rollouts=rollouts, train=train, link=link)


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("max_lag", [0, 1])
def test_law_holds_and_nothing_is_lost_over_a_slow_link(tmp_path, max_lag, update):
    out = looped(tmp_path, 10e6, max_lag=max_lag, workflow={"update": update})
    window = out.run.window
    assert max(out.recorder.lags) <= max_lag
    assert (window.issued, window.trained, window.open) == (48, 48, 0)
    assert out.run.sync.served == [6, 6] and out.run.sync.gap_max == 0.0
    assert all(row["weight_sync/fetch_s"] > 0 for row in metrics_of(tmp_path)[1:])


@pytest.mark.slow
def test_a_slow_link_adds_no_idle_time_to_rollout(tmp_path):
    """A fetch takes 120 ms, a generation batch 60. In turn a step would take 180 ms, most of it idle."""
    out = looped(tmp_path, WEIGHTS * 4 / 0.12, steps=10, max_lag=3, workflow={"keep_versions": 5})
    steady = metrics_of(tmp_path)[2:-1]
    assert max(row["weight_sync/fetch_s"] for row in steady) > 0.1
    assert sum(row["idle/rollout"] for row in steady) / len(steady) < 0.3
    assert sum(row["timing_s/step"] for row in steady) / len(steady) < 0.12
    assert out.run.sync.served == [10, 10]
