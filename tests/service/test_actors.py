"""Which thread of a worker's process serves which call. Real Ray."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.service.actors import BESIDE, Part, short_death, spawn
from mindspeed_asyncflow.service.placement import Cluster

pytestmark = pytest.mark.slow


class Worker:
    """Says in which thread a call runs, and computes until it is asked aside to end."""

    def __init__(self):
        self.thread, self.ended = threading.get_ident(), threading.Event()

    def same_thread(self):
        return threading.get_ident() == self.thread

    def compute(self):
        assert self.ended.wait(20), "the call aside did not come through"
        return self.same_thread()

    def published(self):
        self.ended.set()
        return self.same_thread()

    def count(self, seconds):
        """Computes without a pause."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sum(range(1000))


class Two:
    """A worker that is made of two."""

    def __init__(self):
        self.first, self.second = Worker(), Worker()


@pytest.fixture(scope="module")
def cluster():
    before = dict(os.environ)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where its processes find `Worker`
    made = Cluster(Config(), "cpu")
    made.make_folder()
    try:
        made.start()
        yield
    finally:
        made.stop()
        made.remove_folder()
        os.environ.clear()
        os.environ.update(before)


def test_a_call_aside_runs_beside_the_one_thread_that_serves_all_others(cluster):
    """Devices are bound to threads: what builds the engine and what trains with it is one thread."""

    async def scenario():
        worker = await spawn("trainer0", resources={}, aside=("published",)).build(Worker)
        threads = [await worker.same_thread() for _ in range(5)]
        computing = asyncio.ensure_future(worker.compute())
        began = time.monotonic()
        aside = await worker.published()
        return threads, aside, await computing, time.monotonic() - began

    threads, aside, computed, seconds = asyncio.run(scenario())
    assert all(threads) and computed and not aside
    assert seconds < 10


def test_two_workers_of_one_process_have_threads_of_their_own(cluster):
    """A trainer rank and the replica on its device: answers do not wait for the trainer's thread, nor use it."""

    async def scenario():
        whole = await spawn("device0", resources={}, aside=("published",), beside=2).build(Two)
        first = Part(whole, "first", "trainer0", aside=("published",))
        second = Part(whole, "second", "rollout0", BESIDE)
        computing = asyncio.ensure_future(second.compute())
        same = await first.same_thread(), await second.same_thread()
        await second.published()
        return same, await computing, await whole.get("first.thread") == await whole.get("second.thread")

    assert asyncio.run(scenario()) == ((True, False), False, True)


def test_the_death_of_a_process_is_noticed_while_nobody_calls_it(cluster):
    async def scenario():
        worker = await spawn("rollout0", resources={}).build(Worker)
        watching = asyncio.ensure_future(worker.watch(60))
        assert await worker.same_thread() and not watching.done()
        began = time.monotonic()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=rf"rollout0 \(process {worker.pid}\) died"):
            await asyncio.wait_for(watching, 20)
        return time.monotonic() - began

    assert asyncio.run(scenario()) < 10


def test_a_process_that_is_busy_or_stopped_for_a_moment_goes_on_and_one_that_stays_frozen_is_killed(cluster):
    async def scenario():
        worker = await spawn("rollout0", resources={}).build(Worker)
        watching = asyncio.ensure_future(worker.watch(5))
        await worker.count(3)
        os.kill(worker.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        os.kill(worker.pid, signal.SIGCONT)
        assert await worker.same_thread() and not watching.done()
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=rf"rollout0 \(process {worker.pid}\) froze and was killed: .* for 5 s"):
            await asyncio.wait_for(watching, 30)
        return worker.pid

    pid = asyncio.run(scenario())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("guesses", ["There are some potential root causes. (1)", "Some common causes include: (1)"])
def test_of_rays_paragraph_about_a_death_what_happened_is_told(guesses):
    said = f"""The actor died unexpectedly before finishing this task.
	class_name: Host
	actor_id: 0a4d7b4f6d0e2ad3b1b1e17801000000
	pid: 4711
	name: trainer0
	namespace: 5d8e2d5c-3f3e
	ip: 10.0.0.7
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. {guesses} process is killed by SIGKILL by OOM \
killer due to high memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly."""
    assert short_death(said) == (
        "Worker unexpectedly exits with a connection error code 2. End of file. "
        "It was killed, by hand or for its use of memory, or it crashed."
    )
    assert short_death("The actor died because its node has died.") == "The actor died because its node has died."
    assert len(short_death("word " * 400)) <= 305
