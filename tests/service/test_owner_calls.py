"""What the owner of a run hears when weights are wrong, when the run recovers, and when it waits for its caller."""

import asyncio
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ServiceError, WeightSyncError
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service import beside, outside_rewards
from mindspeed_asyncflow.service.outside import Outside
from mindspeed_asyncflow.service.outside_rewards import OutsideRewards
from mindspeed_asyncflow.service.owner import Owner
from mindspeed_asyncflow.service.presence import Presence
from mindspeed_asyncflow.workflow.workers import RowBatch


class Loops:
    """In the place of `Run`: a task that fails ends it."""

    def __init__(self, version=1):
        self.over, self.failed = False, []
        self.window = SimpleNamespace(version=version, published=version)
        self.job = SimpleNamespace(spawn=self.spawn, step=version)

    def spawn(self, work):
        task = asyncio.ensure_future(work)
        task.add_done_callback(self.ended)
        return task

    def ended(self, task):
        if task.exception() is not None:
            self.over = True
            self.failed.append(task.exception())


class Sync:
    """One replica, which loads version 1 when `may` is set; `error` is found in what it has loaded."""

    def __init__(self, error=None):
        self.served, self.newest = [0], SimpleNamespace(version=1, fingerprint="f1")
        self.error, self.may, self.loads = error, asyncio.Event(), 0
        self.may.set()

    async def bring_all_up(self, indices):
        self.loads += 1
        await self.may.wait()
        for index in indices:
            self.served[index] = 1
        if self.error is not None:
            raise self.error

    def describe(self):
        return f"rollout0 serves {self.served[0]}"


def owner_of(tmp_path, run, sync):
    outside = Outside(Config(), RunFolder(tmp_path))
    turns = SimpleNamespace(shares=lambda index: False)
    outside.session = SimpleNamespace(run=run, sync=sync, rollouts=[0], turns=turns)
    return Owner(outside)


async def code_of(work):
    with pytest.raises(ServiceError) as refused:
        await work
    return refused.value.status, refused.value.code


def test_wrong_weights_that_a_notification_finds_end_the_run_and_no_call_says_that_they_are_served(tmp_path):
    async def main():
        run, sync = Loops(), Sync(WeightSyncError("the engine does not hold the trained weights"))
        owner = owner_of(tmp_path, run, sync)
        told = [await code_of(owner.weight_sync(1, 0.2)) for _ in range(2)]
        assert sync.served == [1] and told == [(504, "timeout")] * 2
        assert run.failed == [sync.error]

    asyncio.run(main())


def test_a_load_goes_on_when_its_caller_is_gone_and_the_next_one_waits_for_the_same_load(tmp_path):
    async def main():
        run, sync = Loops(), Sync()
        owner = owner_of(tmp_path, run, sync)
        sync.may.clear()
        assert await code_of(owner.weight_sync(None, 0.1)) == (504, "timeout")
        again = asyncio.ensure_future(owner.weight_sync(None, 10.0))
        await asyncio.sleep(0.1)
        assert sync.served == [0] and not again.done()
        sync.may.set()
        assert await again == {"version": 1, "fingerprint": "f1", "replicas": {"rollout0": 1}}
        assert sync.loads == 1 and not run.failed

    asyncio.run(main())


def test_a_notification_waits_through_a_recovery(tmp_path):
    async def main():
        owner = owner_of(tmp_path, None, Sync())
        asked = asyncio.ensure_future(owner.weight_sync(1, 10.0))
        await asyncio.sleep(0.1)
        owner.session.run = Loops()
        assert (await asked)["version"] == 1

    asyncio.run(main())


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """Of a client that is thought to be elsewhere after 0.1 s."""
    monkeypatch.setattr(outside_rewards, "UNATTENDED_S", 0.1)
    settings = {"service": {"rewards": "client", "client_timeout_s": 0.6}}
    return OutsideRewards(Config.model_validate(settings), None, Presence(60.0, int), None, lambda group: None)


@contextlib.asynccontextmanager
async def scoring(rewards):
    """The score loop asks for the rewards of two groups of two."""
    batch = RowBatch(np.arange(4, dtype=np.int64), np.array([7, 7, 8, 8]), np.array([0, 1, 0, 1], np.int32))
    asking = asyncio.ensure_future(rewards._ask(1, batch))
    await asyncio.sleep(0)
    yield asking
    asking.cancel()
    await asyncio.wait([asking])


def test_groups_are_unattended_while_nobody_comes_for_their_rewards(rewards):
    async def main():
        async with scoring(rewards) as asking:
            assert not rewards.unattended()
            await asyncio.sleep(0.15)
            assert rewards.unattended().startswith("2 groups wait for your rewards")
            assert not rewards.unattended(lambda: False)
            claim, _ = await rewards.get(2, 1.0)
            await asyncio.sleep(0.15)
            assert not rewards.unattended()  # it may take long to judge them
            await asyncio.sleep(0.3)
            assert rewards.unattended()
            rewards.put(claim, np.arange(2), [(1.0, None)] * 2)
            assert not rewards.unattended()
            rewards.put(claim, np.arange(2, 4), [(1.0, None)] * 2)
            assert set(await asking) == {0, 1, 2, 3}
            await asyncio.sleep(0.4)
            assert not rewards.unattended()

    asyncio.run(main())


def test_somebody_who_waits_for_the_next_group_attends(rewards):
    async def main():
        waiting = asyncio.ensure_future(rewards.get(1, 1.0))
        await asyncio.sleep(0.15)
        async with scoring(rewards):
            assert not rewards.unattended()
            assert (await waiting)[1][0].group == 7
            assert not rewards.unattended()

    asyncio.run(main())


def test_a_checkpoint_that_waits_for_its_own_caller_is_refused_and_not_begun_later(tmp_path, rewards):
    async def main():
        run, asked = Loops(), []
        owner = owner_of(tmp_path, run, Sync())
        owner.outside.rewards = rewards

        def ask(work):
            asked.append(asyncio.get_running_loop().create_future())
            return asked[-1]

        lacking = []
        between = SimpleNamespace(ask=ask)
        run.training = SimpleNamespace(between=between, lacks_scores=lambda: bool(lacking))
        async with scoring(rewards):
            assert await code_of(beside._between(owner.outside, None, 0.3, "checkpoint")) == (504, "timeout")
            lacking.append(True)
            call = beside._between(owner.outside, None, 60.0, "checkpoint")
            assert await asyncio.wait_for(code_of(call), 5) == (409, "waits_for_you")
        assert all(future.cancelled() for future in asked)

    asyncio.run(main())
