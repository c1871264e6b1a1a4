"""Turns on shared devices, on a virtual clock whose loop names every deadlock."""

import asyncio
import contextlib
import random

import pytest

from mindspeed_asyncflow.errors import EngineError, WorkerLost
from mindspeed_asyncflow.simulation import clock
from mindspeed_asyncflow.workflow.turns import NoTurns, Turns


class Device:
    """What lies on the devices, kept by trainer and replicas; raises when both sides are there."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.trainer_there, self.awake, self.weights = [True, True], set(), set()
        self.log: list[str] = []

    async def takes_time(self) -> None:
        await asyncio.sleep(self.chance.choice([0.0, 0.1, 1.0, 5.0]))

    def check(self) -> None:
        assert not (any(self.trainer_there) and self.awake), "both sides are on the devices"


class Rank:
    def __init__(self, device: Device, rank: int) -> None:
        self.device, self.rank, self.fails = device, rank, False

    async def give(self) -> None:
        assert self.device.trainer_there[self.rank]
        await self.device.takes_time()
        if self.fails:
            raise EngineError("the copy broke")
        self.device.trainer_there[self.rank] = False
        self.device.log.append("give")

    async def take_back(self) -> None:
        assert not self.device.trainer_there[self.rank]
        self.device.check()
        await self.device.takes_time()
        assert not self.device.awake
        self.device.trainer_there[self.rank] = True
        self.device.log.append("take")


class Replica:
    def __init__(self, device: Device, index: int) -> None:
        self.device, self.index = device, index
        self.stopped = asyncio.Event()
        self.dead = self.rousing = False

    async def rouse(self) -> None:
        assert not any(self.device.trainer_there) and self.index not in self.device.awake and not self.rousing
        self._alive()
        self.rousing = True
        await self.device.takes_time()
        self.rousing = False
        self._alive()
        self.device.awake.add(self.index)
        self.device.check()

    async def rest(self) -> None:
        self._alive()
        await self.device.takes_time()
        self.device.awake.discard(self.index)

    async def stop(self) -> int:
        self._alive()
        self.stopped.set()
        return 1

    def _alive(self) -> None:
        if self.dead:
            self.device.awake.discard(self.index)
            raise WorkerLost(f"rollout{self.index} died")

    async def answer(self, seconds: float) -> bool:
        """False: stopped before it was complete."""
        self.stopped.clear()
        assert self.index in self.device.awake and not any(self.device.trainer_there)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.stopped.wait(), seconds)
            return False
        assert self.index in self.device.awake and not any(self.device.trainer_there)
        return True


def make(interrupt: bool, replicas: int = 2, seed: int = 0) -> tuple[Device, dict[int, Replica], Turns]:
    device = Device(random.Random(seed))
    workers = {i: Replica(device, i) for i in range(replicas)}
    turns = Turns([Rank(device, r) for r in (0, 1)], workers, interrupt=interrupt, emptied=device.weights.discard)
    return device, workers, turns


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [False, True], ids=["colocated", "lend"])
def test_random_turns_never_meet_on_a_device_and_never_wait_for_ever(interrupt):
    """Batches of three replicas, two lanes each, steps and savings of the trainer, in 100 random orders; a fifth of the
    blocks is cancelled at a random moment."""

    async def one(seed: int) -> None:
        chance = random.Random(seed)
        device, workers, turns = make(interrupt, replicas=3, seed=seed)
        trained = batches = 0

        async def answers(index: int) -> None:
            nonlocal batches
            await asyncio.sleep(chance.uniform(0, 5))
            await turns.open(index)
            async with turns.generating(index):
                assert index in device.awake
                device.weights.add(index)
                await workers[index].answer(chance.choice([0.0, 0.5, 3.0]))
                batches += 1
            await asyncio.sleep(chance.uniform(0, 2))

        async def steps() -> None:
            nonlocal trained
            await asyncio.sleep(chance.uniform(0, 5))
            async with turns.training():
                assert all(device.trainer_there) and not device.awake and not device.weights
                await asyncio.sleep(chance.choice([0.0, 1.0]))
                assert all(device.trainer_there) and not device.awake
                trained += 1

        async def several(block, *args) -> None:
            for _ in range(4):
                task = asyncio.ensure_future(block(*args))
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.uniform(0, 8))
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

        await asyncio.gather(*(several(answers, i) for i in (0, 0, 1, 1, 2)), *(several(steps) for _ in range(2)))
        async with turns.training():
            assert all(device.trainer_there) and not device.awake
        assert trained > 1 and batches > 2

    for seed in range(100):
        clock.run(one(seed))


def test_a_colocated_batch_is_complete_before_the_trainer_has_its_devices():
    async def main() -> None:
        _, workers, turns = make(interrupt=False)
        order = []

        async def train() -> None:
            await asyncio.sleep(20)
            async with turns.training():
                order.append("trained")

        training = asyncio.ensure_future(train())
        async with turns.generating(0):
            order.append(await workers[0].answer(60))
        await training
        assert order == [True, "trained"]

    clock.run(main())


def test_a_lent_replica_is_stopped_also_when_its_batch_has_not_begun_yet():
    """The first request to stop comes while it loads weights."""

    async def main() -> None:
        device, workers, turns = make(interrupt=True)
        complete = []

        async def batch() -> None:
            async with turns.generating(0):
                await asyncio.sleep(10)
                complete.append(await workers[0].answer(1000))

        answering = asyncio.ensure_future(batch())
        while not device.awake:
            await asyncio.sleep(0.1)
        async with turns.training():
            assert complete == [False] and asyncio.get_running_loop().time() < 40
        await answering

    clock.run(main())


def test_lent_devices_stay_with_a_trainer_that_has_its_next_batch_at_once():
    """A turn of the replicas costs time both ways: the trainer is first waited for as long."""

    async def main() -> None:
        device, workers, turns = make(interrupt=True)
        device.takes_time = lambda: asyncio.sleep(2)

        async def answers() -> None:
            while True:
                await turns.open(0)
                async with turns.generating(0):
                    await workers[0].answer(1000)

        answering = asyncio.ensure_future(answers())
        await asyncio.sleep(10)
        for _ in range(5):
            async with turns.training():
                await asyncio.sleep(1)
            await asyncio.sleep(3)  # give, rest and take back: 6 s
        assert turns.count == 1
        await asyncio.sleep(20)
        assert turns.count == 2 and device.awake == {0}
        answering.cancel()

    clock.run(main())


def test_a_trainer_that_comes_at_the_very_moment_at_which_its_devices_are_free_has_them_first():
    """Both are woken in the same round of the loop, the trainer before the replica that waits."""

    async def main() -> None:
        device, workers, turns = make(interrupt=True)
        device.takes_time = lambda: asyncio.sleep(2)
        loop = asyncio.get_running_loop()

        async def batch() -> None:
            async with turns.generating(0):
                await workers[0].answer(1000)

        async def train_at(moment: float) -> None:
            await asyncio.sleep(moment - loop.time())
            async with turns.training():
                for _ in range(50):
                    assert all(device.trainer_there)
                    await asyncio.sleep(0.1)

        first = asyncio.ensure_future(batch())
        await asyncio.sleep(10)
        async with turns.training():
            await first
            second = asyncio.ensure_future(batch())
            training = asyncio.ensure_future(train_at(loop.time() + turns.give_s + turns.take_s))
            await asyncio.sleep(0)
        await training
        await asyncio.sleep(20)
        assert device.awake == {0} and not second.done()
        second.cancel()

    clock.run(main())


def test_an_error_of_a_rank_reaches_everybody_who_waits_and_all_later_turns():
    async def main() -> None:
        _device, _, turns = make(interrupt=False)
        turns._trainers[1].fails = True

        async def batch(index: int) -> None:
            async with turns.generating(index):
                raise AssertionError("it has no device")

        async def step() -> None:
            async with turns.training():
                raise AssertionError("nobody knows where its state is")

        found = await asyncio.gather(batch(0), batch(1), step(), return_exceptions=True)
        found += await asyncio.gather(batch(0), step(), turns.open(1), return_exceptions=True)
        assert [str(error) for error in found] == ["the copy broke"] * 6

    clock.run(main())


def test_a_dead_replica_is_left_out_and_the_others_go_on():
    async def main() -> None:
        device, workers, turns = make(interrupt=True)
        async with turns.generating(0), turns.generating(1):
            workers[1].dead = True
        async with turns.training():
            assert not device.awake
        assert not turns.shares(1)
        async with turns.generating(1):
            pass  # no turn of anybody
        async with turns.generating(0):
            assert device.awake == {0}

    clock.run(main())


def test_a_replica_that_leaves_awake_still_goes_to_rest_before_the_trainer_comes():
    async def main() -> None:
        device, _, turns = make(interrupt=True)
        async with turns.generating(0):
            turns.forget(0)
        assert device.awake == {0} and not turns.shares(0)
        async with turns.training():
            assert not device.awake

    clock.run(main())


def test_the_line_for_the_watchdog_says_who_has_the_devices_and_who_waits():
    async def main() -> None:
        _device, _, turns = make(interrupt=False)
        assert turns.describe() == "turns: devices are with the trainer"
        async with turns.generating(1):
            waiting = asyncio.ensure_future(turns.training().__aenter__())
            await asyncio.sleep(1)
            assert turns.describe() == (
                "turns: devices are with the replicas; the trainer has its turn or waits for it; answering: rollout1"
            )
        await waiting

    clock.run(main())


def test_whoever_owns_its_devices_never_waits():
    async def main() -> None:
        turns = NoTurns()
        async with turns.training(), turns.generating(0), turns.training():
            await turns.open(3)
            assert turns.is_open(3) and not turns.shares(3)
        assert asyncio.get_running_loop().time() == 0

    clock.run(main())
