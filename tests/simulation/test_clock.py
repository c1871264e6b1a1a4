import asyncio
import random
import time

import pytest

from mindspeed_asyncflow.simulation import clock
from mindspeed_asyncflow.simulation.clock import SimulationError


def now() -> float:
    return asyncio.get_running_loop().time()


def test_hours_pass_at_once_and_every_sleep_ends_exactly_at_its_time():
    async def main():
        ends = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            ends.append((seconds, now()))

        delays = [random.Random(0).uniform(0, 1e5) for _ in range(300)]
        await asyncio.gather(*map(sleeper, delays))
        return delays, ends

    began = time.perf_counter()
    delays, ends = clock.run(main())
    assert time.perf_counter() - began < 2.0
    assert [s for s, _ in ends] == sorted(delays)
    assert all(at == pytest.approx(s, abs=1e-8) for s, at in ends)


def test_work_without_waiting_takes_no_virtual_time():
    async def main():
        time.sleep(0.02)
        await asyncio.sleep(0)
        return now()

    assert clock.run(main()) == 0.0


def test_what_is_due_at_one_moment_runs_in_the_same_order_on_every_run():
    async def main():
        order = []
        for i in range(50):
            asyncio.get_running_loop().call_at(3.0, order.append, i)
        await asyncio.sleep(3.1)
        return order

    assert sorted(clock.run(main())) == list(range(50))
    assert clock.run(main()) == clock.run(main())


def test_deadlines_run_out_in_virtual_time():
    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3600.0)
        return now()

    assert clock.run(main()) == pytest.approx(3600.0)


def test_a_deadlock_names_who_waits_and_where():
    async def thirsty(cup):
        await cup.wait()

    async def main():
        guest = asyncio.create_task(thirsty(asyncio.Event()), name="guest")
        await asyncio.sleep(5)
        await asyncio.Queue().get()
        guest.cancel()

    with pytest.raises(SimulationError, match=r"(?s)deadlock at 5 s.*guest in .*thirsty.*line"):
        clock.run(main())


def test_threads_are_refused():
    async def by_thread():
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(SimulationError, match="asked for a thread"):
        clock.run(by_thread())


def test_what_main_leaves_behind_is_cancelled():
    ended = []

    async def forever():
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append(now())

    async def main():
        left = asyncio.create_task(forever())
        await asyncio.sleep(2)
        return "" if left.done() else "done"

    assert clock.run(main()) == "done"
    assert ended == [2.0]


def test_an_error_of_main_comes_through_and_the_loop_is_closed():
    async def main():
        await asyncio.sleep(1)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        clock.run(main())


def test_a_simulation_does_not_start_inside_a_running_loop():
    async def main():
        async def nothing():
            return None

        with pytest.raises(SimulationError, match="inside a running event loop"):
            clock.run(nothing())

    asyncio.run(main())


def test_an_error_in_a_timer_ends_the_run():
    async def main():
        asyncio.get_running_loop().call_later(2.0, {}.pop, "absent")
        await asyncio.sleep(1e9)

    with pytest.raises(KeyError, match="absent"):
        clock.run(main())
