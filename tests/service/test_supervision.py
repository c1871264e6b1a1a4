"""Who is started again when, and what callers see meanwhile. Workers without processes."""

import asyncio

import pytest

from mindspeed_asyncflow.config.faults import FaultsConfig
from mindspeed_asyncflow.errors import WorkerLost, WorkerReplaced
from mindspeed_asyncflow.service import supervision as supervision_module
from mindspeed_asyncflow.service.supervision import Supervision


class Worker:
    """Answers its number, after `free` is set; dies when `die` is called."""

    def __init__(self, number):
        self.name, self.number = "scorer", number
        self.dead, self.free = asyncio.Event(), asyncio.Event()

    def die(self):
        self.dead.set()

    async def watch(self, heartbeat_s):
        await self.dead.wait()
        raise WorkerLost(f"scorer (process {self.number}) died")

    async def number_of(self):
        dead, free = (asyncio.ensure_future(event.wait()) for event in (self.dead, self.free))
        await asyncio.wait([dead, free], return_when=asyncio.FIRST_COMPLETED)
        dead.cancel(), free.cancel()
        if self.dead.is_set():
            raise WorkerLost(f"scorer (process {self.number}) died")
        return self.number


class Starts:
    """`again` of a worker: fails as often as it is told to."""

    def __init__(self, failures=0):
        self.made, self.failures = [Worker(1)], failures

    async def again(self):
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise OSError("no memory")
        self.made.append(Worker(len(self.made) + 1))
        return self.made[-1]


def supervised(scenario, max_restarts=3, failures=0):
    """Result of `scenario(kept, starts, supervision)`, and what was noted."""
    notes = []

    async def main():
        supervision = Supervision(
            FaultsConfig(max_restarts=max_restarts), lambda kind, **fields: notes.append((kind, fields))
        )
        starts = Starts(failures)
        kept = supervision.keep(starts.made[0], starts.again)
        try:
            return await asyncio.wait_for(scenario(kept, starts, supervision), 10)
        finally:
            supervision.close()

    return asyncio.run(main()), notes


def test_a_call_whose_process_dies_ends_when_another_one_is_up_and_the_next_call_reaches_that():
    async def scenario(kept, starts, supervision):
        asked = asyncio.ensure_future(kept.number_of())
        await asyncio.sleep(0.01)
        starts.made[0].die()
        with pytest.raises(WorkerReplaced, match="process 1"):
            await asked
        assert len(starts.made) == 2
        starts.made[1].free.set()
        return await kept.number_of()

    found, notes = supervised(scenario)
    assert found == 2
    assert [(kind, fields["component"]) for kind, fields in notes] == [("lost", "scorer"), ("recovered", "scorer")]


def test_a_death_that_nobody_asks_about_is_noticed_and_calls_wait_for_the_next_process():
    async def scenario(kept, starts, supervision):
        starts.made[0].die()
        while len(starts.made) < 2:
            await asyncio.sleep(0.001)
        starts.made[1].free.set()
        return await kept.number_of()

    assert supervised(scenario)[0] == 2


def test_a_start_that_fails_is_tried_again_and_counts():
    async def scenario(kept, starts, supervision):
        starts.made[0].die()
        while len(starts.made) < 2:
            await asyncio.sleep(0.001)
        return supervision.restarts["scorer"]

    count, notes = supervised(scenario, failures=2)
    assert count == 3
    assert [kind for kind, _ in notes] == ["lost", "recovered"]


@pytest.mark.parametrize(("max_restarts", "failures", "deaths"), [(0, 0, 1), (2, 0, 3), (2, 5, 1)])
def test_a_component_that_is_lost_too_often_ends_the_run_and_every_call(max_restarts, failures, deaths):
    async def scenario(kept, starts, supervision):
        ended = asyncio.ensure_future(supervision.failure())
        for death in range(deaths):
            assert not ended.done()
            starts.made[death].die()
            await asyncio.sleep(0.02)
        with pytest.raises(WorkerLost, match=r"faults\.max_restarts") as of_run:
            await ended
        with pytest.raises(WorkerLost) as of_call:
            await kept.number_of()
        assert of_call.value is of_run.value and not isinstance(of_call.value, WorkerReplaced)
        return str(of_run.value)

    said, _ = supervised(scenario, max_restarts, failures)
    assert said.startswith("scorer") and ("no memory" in said) == bool(failures)


def test_a_worker_that_tells_of_the_loss_of_another_one_is_not_replaced(monkeypatch):
    monkeypatch.setattr(supervision_module, "NOTICE_S", 0.02)

    async def scenario(kept, starts, supervision):
        async def score():
            raise WorkerLost("dock pair 0 went away")

        starts.made[0].score = score
        with pytest.raises(WorkerLost, match="dock pair 0") as found:
            await kept.score()
        assert not isinstance(found.value, WorkerReplaced)
        return len(starts.made)

    assert supervised(scenario) == (1, [])


def test_what_ends_after_the_close_is_no_loss():
    async def scenario(kept, starts, supervision):
        supervision.close()
        starts.made[0].die()
        await asyncio.sleep(0.01)

    assert supervised(scenario) == (None, [])
