"""Who counts as frozen, on virtual time; and the table of processes."""

import asyncio

import pytest

from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.service.heartbeat import silence
from mindspeed_asyncflow.service.process_table import ProcessTable, read_table
from mindspeed_asyncflow.simulation.clock import VirtualLoop

LIMIT_S = 10.0


def run(scenario):
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(scenario)
    finally:
        loop.close()


def pings(*delays):
    """Answers after these seconds, the last one again and again."""
    left = list(delays)

    async def ping():
        await asyncio.sleep(left.pop(0) if len(left) > 1 else left[0])

    return ping


def test_silence_shorter_than_the_limit_is_forgiven_again_and_again():
    async def scenario():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(silence(pings(0, 9.5, 0, 9.5, 5), LIMIT_S), 1000)

    run(scenario())


def test_a_process_is_frozen_as_soon_as_one_ping_has_had_no_answer_for_the_limit():
    async def scenario():
        await silence(pings(0, 0, 1e6), LIMIT_S)
        return asyncio.get_running_loop().time()

    assert LIMIT_S <= run(scenario()) <= LIMIT_S + 5


def test_time_in_which_the_driver_itself_stood_still_is_nobodys_silence():
    """The machine sleeps for an hour in the middle of a ping; the answer comes soon after it has woken."""

    async def scenario():
        loop = asyncio.get_running_loop()
        awake = loop.create_future()
        loop.call_later(3.0, lambda: setattr(loop._jump, "now", loop.time() + 3600))
        loop.call_later(3607.0, awake.set_result, None)
        count = 0

        async def ping():
            nonlocal count
            count += 1
            await asyncio.shield(awake) if count == 2 else None

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(silence(ping, LIMIT_S), 5000)
        return count

    assert run(scenario()) > 2


def test_the_death_of_the_process_is_raised_as_itself():
    async def scenario():
        async def ping():
            raise WorkerLost("rollout0 died")

        with pytest.raises(WorkerLost, match="rollout0 died"):
            await silence(ping, LIMIT_S)

    run(scenario())


def test_the_table_names_the_newest_process_of_each_name_and_is_gone_after_the_run(tmp_path):
    path = tmp_path / "processes.json"
    assert read_table(path) == {}
    table = ProcessTable(path)
    table.enter("rollout0", 11, "10.0.0.1")
    table.enter("dock0", 12, "10.0.0.2")
    table.enter("rollout0", 13, "10.0.0.1")
    assert read_table(path) == {"rollout0": (13, "10.0.0.1"), "dock0": (12, "10.0.0.2")}
    assert [file.name for file in tmp_path.iterdir()] == ["processes.json"]
    table.remove()
    assert read_table(path) == {}
