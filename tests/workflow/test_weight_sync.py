"""Who loads what and when, and that wrong or standing weights stop the run. Replicas are scripted, no relay file."""

import asyncio
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.errors import WeightSyncError, WorkerLost
from mindspeed_asyncflow.observe.log import ROOT
from mindspeed_asyncflow.records import OptimReport, UpdateReport
from mindspeed_asyncflow.reshard.relay_table import make_table
from mindspeed_asyncflow.workflow.publisher import RankShards
from mindspeed_asyncflow.workflow.weight_sync import WeightSync

PROBE = [(np.array([1, 2], np.int32), np.array([3, 4], np.int32))]
TABLE = make_table({"a": (4,), "b": (12,)}, "float32")
STEP = OptimReport(True, 1.0, 1e-3)


def weights(version, content=None):
    """One rank's shards; `content` tells versions' bytes apart (default: every version has its own)."""
    content = version if content is None else content
    return [RankShards(version, {0: 100 + content, 1: 200 + content}, 0.5)]


class Replica:
    """Serves version v with log-probabilities -v; `fault` breaks it in a named way; loads take `turns` of the loop."""

    def __init__(self, fault="", turns=0):
        self.version, self.fault, self.turns = 0, fault, turns
        self.loads = []

    async def load(self, m):
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if self.fault == "dies":
            raise WorkerLost("rollout0 (process 1) died")
        self.loads.append(m.version)
        if self.fault != "did not load":
            self.version = m.version
        fingerprint = "other" if self.fault == "other bytes" else m.fingerprint
        return UpdateReport(m.version, 0.01, fingerprint)

    async def score(self, sequences):
        return self.version, [np.full(2, -float(self.version), np.float32)]


def sync_of(*replicas, update="delayed", dtype="float32", probe=True, **more):
    sync = WeightSync(replicas, dtype, "nowhere", TABLE.text, update=update, **more)
    sync.probe = PROBE if probe else []
    publish(sync, 0)
    return sync


class Scored:
    """The trainer's probe of `version`, at hand."""

    def __init__(self, version):
        self.expected = [np.full(2, -float(version), np.float32)]

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return self.expected


def publish(sync, version, content=None, optim=STEP):
    sync.publish(weights(version, content), Scored(version), optim if version else None)


def bring_up(replica):
    sync = sync_of(replica)
    publish(sync, 1)
    asyncio.run(sync.bring_up(0))
    return sync


def test_a_correct_load_is_served_and_measured():
    sync = bring_up(Replica())
    assert sync.served == [1] and sync.gap_max == 0.0 and not sync.is_behind(0)
    assert sync.step_load_s == 0.01 and sync.publish_s == 0.5


@pytest.mark.parametrize("fault", ["did not load", "other bytes"])
def test_weights_that_are_not_the_published_ones_stop_the_run(fault):
    with pytest.raises(WeightSyncError, match="rollout0"):
        bring_up(Replica(fault))


def test_a_nan_in_the_engine_is_not_taken_for_a_small_gap():
    class Broken(Replica):
        async def score(self, sequences):
            return self.version, [np.full(2, np.nan, np.float32)]

    with pytest.raises(WeightSyncError, match="nan"):
        bring_up(Broken())


def test_a_late_joiner_loads_the_newest_version_only():
    replica = Replica()
    sync = sync_of(replica)
    for version in (1, 2, 3):
        publish(sync, version)
    asyncio.run(sync.bring_up(0))
    assert replica.loads == [3] and sync.served == [3] and sync.gap_max == 0.0


def test_a_version_published_during_a_load_is_loaded_next_and_each_is_checked_against_its_own_probe():
    replica = Replica(turns=3)
    sync = sync_of(replica)

    async def scenario():
        loading = asyncio.create_task(sync.bring_up(0))
        await asyncio.sleep(0)
        publish(sync, 1)
        await loading
        assert sync.is_behind(0)
        await sync.bring_up(0)

    asyncio.run(scenario())
    assert replica.loads == [0, 1] and sync.gap_max == 0.0


def test_callers_that_want_the_same_replica_up_load_it_once():
    replica = Replica(turns=2)
    sync = sync_of(replica)

    async def scenario():
        await asyncio.gather(sync.bring_up(0), sync.bring_all_up(), sync.bring_up(0))

    asyncio.run(scenario())
    assert replica.loads == [0]


# ---- three ways to update ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["delayed", "rolling"])
def test_weights_in_use_do_not_change_before_the_boundary(update):
    replicas = [Replica(), Replica()]
    sync = sync_of(*replicas, update=update)

    async def scenario():
        async with sync.boundary(0, 0) as since:
            publish(sync, 1)
            others = asyncio.create_task(sync.bring_all_up())  # as an evaluation does
            for _ in range(20):
                await asyncio.sleep(0)
            assert replicas[0].version == since == 0
        await others
        assert replicas[0].version == 1

    asyncio.run(scenario())


def test_in_flight_a_replica_loads_while_it_answers_and_skips_what_is_superseded():
    replica = Replica(turns=3)
    sync = sync_of(replica, update="in_flight")

    async def scenario():
        follower = asyncio.create_task(sync.follow(0))
        async with sync.boundary(0, 0) as since:
            for version in (1, 2, 3):
                publish(sync, version)
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            assert (since, replica.version) == (0, 3)
        follower.cancel()

    asyncio.run(scenario())
    assert replica.loads == [0, 1, 3]  # 2 was superseded while 1 was loaded


@pytest.mark.parametrize("update", ["delayed", "rolling", "in_flight"])
def test_a_batch_never_begins_with_an_older_version_than_it_needs(update):
    """The law at its strictest, max_lag 0: batch 2 needs version 2."""
    replicas = [Replica(turns=2), Replica(turns=2)]
    sync = sync_of(*replicas, update=update)
    seen = []

    async def answer(index):
        async with sync.boundary(index, 2) as since:
            seen.append(since)

    async def scenario():
        await sync.bring_all_up()
        publish(sync, 1)
        publish(sync, 2)
        await asyncio.gather(answer(0), answer(1))

    asyncio.run(scenario())
    assert seen == [2, 2]


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=2, max_size=5),
    gaps=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    slack=st.integers(1, 3),
)
def test_rolling_never_has_two_loading_and_the_others_go_on_answering(replicas, gaps, slack):
    """R - 1 serve: while one loads, a replica whose batch may use its version is never made to wait.

    `replicas`: (turns of a load, turns of a batch); `gaps`: turns between publications; `slack`: max_lag.
    """
    loading, most, waits = set(), [], []

    class Watched(Replica):
        async def load(self, m):
            loading.add(self)
            most.append(len(loading))
            report = await super().load(m)
            loading.discard(self)
            return report

    pool = [Watched(turns=turns) for turns, _ in replicas]
    sync = sync_of(*pool, update="rolling", probe=False)
    turns = 0

    async def answer(index, length):
        nonlocal turns
        while True:
            needed = sync.newest.version - slack
            free = sync.served[index] >= max(needed, 0) and loading - {pool[index]}
            before = turns
            async with sync.boundary(index, needed) as since:
                if free:
                    waits.append(turns - before)
                assert since >= needed
                for _ in range(length + 1):
                    await asyncio.sleep(0)

    async def scenario():
        nonlocal turns
        await sync.bring_all_up()
        tasks = [asyncio.create_task(answer(i, length)) for i, (_, length) in enumerate(replicas)]
        for version, gap in enumerate(gaps, 1):
            publish(sync, version)
            for _ in range(gap):
                await asyncio.sleep(0)
                turns += 1
        for _ in range(40 * len(pool)):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results), results

    asyncio.run(scenario())
    assert max(most) == 1
    assert not any(waits)
    assert sync.served == [len(gaps)] * len(pool)  # all came up in the end


@pytest.mark.parametrize("update", ["delayed", "in_flight"])
def test_a_slow_load_does_not_hold_up_other_replicas(update):
    slow, quick = Replica(turns=1000), Replica()
    sync = sync_of(slow, quick, update=update)

    async def scenario():
        loading = asyncio.create_task(sync.bring_up(0))
        await asyncio.sleep(0)
        async with sync.boundary(1, 0) as since:
            assert not loading.done()
            return since

    assert asyncio.run(scenario()) == 0
    assert quick.loads == [0] and slow.loads == []


def test_a_replica_that_dies_while_loading_gives_its_turn_to_the_next():
    dead, alive = Replica("dies", turns=2), Replica()
    sync = sync_of(dead, alive, update="rolling")

    async def scenario():
        return await asyncio.gather(sync.bring_up(0), sync.bring_up(1), return_exceptions=True)

    first, second = asyncio.run(scenario())
    assert isinstance(first, WorkerLost) and second is None
    assert alive.loads == [0] and sync.served == [-1, 0]


class SlowLink(Replica):
    """Finds version `gone` gone from the relay when it has read it."""

    gone = 0

    async def load(self, m):
        report = await super().load(m)
        if m.version == self.gone:
            raise WeightSyncError(f"weight version {m.version} is not in the relay")
        return report


def overtaken(sync, newest):
    """Replica 0 loads version 0 while versions up to `newest` are published."""

    async def scenario():
        loading = asyncio.create_task(sync.bring_up(0))
        await asyncio.sleep(0)
        for version in range(1, newest + 1):
            publish(sync, version)
        await loading

    asyncio.run(scenario())


def test_a_version_that_is_dropped_while_an_idle_replica_loads_it_makes_room_for_the_newest():
    replica = SlowLink(turns=5)
    sync = sync_of(replica, keep=3)
    overtaken(sync, newest=2)
    assert replica.loads == [0, 2] and sync.served == [2]


def test_a_load_that_fails_for_another_reason_is_not_repeated():
    sync = sync_of(SlowLink(turns=5), keep=3)
    with pytest.raises(WeightSyncError, match="not in the relay"):
        overtaken(sync, newest=1)  # version 0 is kept, whatever the replica says


def test_a_version_that_is_dropped_while_a_replica_answers_and_loads_it_names_the_knob():
    sync = sync_of(SlowLink(turns=5), update="in_flight", keep=3)

    async def scenario():
        sync.served[0], sync.replicas[0].gone = 0, 1
        publish(sync, 1)
        async with sync.boundary(0, -1):
            loading = asyncio.create_task(sync.bring_up(0))
            await asyncio.sleep(0)
            publish(sync, 2)
            publish(sync, 3)
            await loading

    with pytest.raises(WeightSyncError, match=r"rollout0 .* version 1 .*keeps 3 \(workflow\.keep_versions; more than"):
        asyncio.run(scenario())


# ---- watchdog ------------------------------------------------------------------------------------------------------


def served(sync, *pairs, since=0):
    sync.check_served(0, since, pairs)


def loaded(*versions):
    sync = sync_of(Replica())
    for version in versions:
        publish(sync, version)
    asyncio.run(sync.bring_up(0))
    return sync, [sync._fingerprints.get(v) for v in range(max(versions, default=0) + 1)]


def test_answers_of_published_versions_pass():
    sync = sync_of(Replica(), Replica())
    prints = [sync.newest.fingerprint]
    asyncio.run(sync.bring_all_up())
    publish(sync, 1)
    prints.append(sync.newest.fingerprint)
    served(sync, (0, prints[0]), (1, prints[1]))


@pytest.mark.parametrize("fingerprint", ["", "0123456789abcdef"])
def test_an_answer_with_another_fingerprint_names_replica_version_and_both(fingerprint):
    sync, prints = loaded(1)
    with pytest.raises(WeightSyncError, match=f"rollout0 .*version 1 .*{fingerprint or 'none'}.*{prints[1]}"):
        served(sync, (1, fingerprint), since=1)


def test_an_answer_of_a_version_that_was_never_published_stops_the_run():
    sync, prints = loaded(1)
    with pytest.raises(WeightSyncError, match="version 7"):
        served(sync, (7, prints[1]))


def test_a_replica_that_says_it_loaded_but_answers_with_older_weights_does_not_move():
    sync = sync_of(Replica(), Replica())
    before = sync.newest.fingerprint
    asyncio.run(sync.bring_all_up())
    publish(sync, 1)
    asyncio.run(sync.bring_up(0))
    with pytest.raises(WeightSyncError, match=r"rollout0 answered with version 0 .*after it had loaded 1.*do not move"):
        served(sync, (0, before), since=1)


def test_what_is_remembered_does_not_grow_with_the_run():
    """B94"""
    sync = sync_of(Replica(), Replica())
    for version in range(1, 200):
        publish(sync, version)
        asyncio.run(sync.bring_all_up())
    assert len(sync._fingerprints) <= 2


def test_equal_bytes_after_a_real_step_stop_a_float32_run_and_say_why():
    sync = sync_of(Replica())
    with pytest.raises(WeightSyncError, match=r"do not move: version 1 .*version 0.*norm 1, rate 0\.001.*trainer\.lr"):
        publish(sync, 1, content=0)
    assert sync.unchanged_share == 1.0


@pytest.mark.parametrize(
    "optim",
    [OptimReport(False, float("nan"), 1e-3, "w"), OptimReport(True, 0.0, 1e-3), OptimReport(True, 1.0, 0.0)],
    ids=["skipped", "no gradient", "no rate"],
)
def test_equal_bytes_without_a_step_are_right(optim):
    sync = sync_of(Replica())
    publish(sync, 1, content=0, optim=optim)
    assert sync.newest.version == 1


def test_bfloat16_weights_may_stand_for_some_steps_with_a_warning_and_not_for_ever(caplog, monkeypatch):
    sync = sync_of(Replica(), dtype="bfloat16")
    monkeypatch.setattr(logging.getLogger(ROOT), "propagate", True)
    with caplog.at_level(logging.WARNING):
        for version in range(1, 10):
            publish(sync, version, content=0)
    assert "rounds away" in caplog.text
    publish(sync, 10)
    with pytest.raises(WeightSyncError, match="10 in a row"):
        for version in range(11, 30):
            publish(sync, version, content=10)


def test_share_of_unchanged_bytes_counts_bytes_not_shards():
    sync = sync_of(Replica())
    sync.publish([RankShards(1, {0: 100, 1: 7}, 0.0)], [], STEP)  # tensor a (16 of 64 bytes) stands still
    assert sync.unchanged_share == 0.25


def test_versions_behind_count_replicas_that_answer_and_start_anew_each_step():
    sync = sync_of(Replica(), Replica())

    async def scenario():
        await sync.bring_all_up()
        async with sync.boundary(0, 0):
            publish(sync, 1)
            publish(sync, 2)
            return sync.step_behind, sync.behind()

    assert asyncio.run(scenario()) == (2, [2, 2])
    sync.new_step()
    assert sync.step_behind == 0


def test_the_no_progress_message_names_replicas_versions_and_loads():
    sync = sync_of(Replica(turns=100), Replica())

    async def scenario():
        await sync.bring_up(1)
        loading = asyncio.create_task(sync.bring_up(0))
        await asyncio.sleep(0)
        publish(sync, 1)
        assert not loading.done()
        return sync.describe()

    said = asyncio.run(scenario())
    assert (
        "version 1 is published" in said and "rollout1 serves 0" in said and "rollout0 serves none, loading 0" in said
    )
