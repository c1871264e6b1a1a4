"""Which thread of a worker's process serves which call. Real Ray."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.service.actors import spawn
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


@pytest.fixture
def cluster(monkeypatch):
    before = dict(os.environ)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where its processes find `Worker`
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
