"""Completions of clients at replicas: real engines' threads over a model that counts, no processes."""

import asyncio
import contextlib
import threading
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.errors import ServiceError, WorkerLost
from mindspeed_asyncflow.records import GenRequest, SamplingSpec
from mindspeed_asyncflow.service.completing import request_of
from mindspeed_asyncflow.service.crossing import carried
from mindspeed_asyncflow.service.pool import Pool
from mindspeed_asyncflow.service.verbs import CompletionRequest
from mindspeed_asyncflow.workflow.turns import NoTurns, Turns
from mindspeed_asyncflow.workflow.weight_sync import NOTHING
from mindspeed_asyncflow.workflow.workers import RolloutWorker
from tests.workflow.partial_engine import BASE, QUIET, CountingBackend, draw, manifest, natural_length

LONGEST = 40
SEED = 16  # an answer of 17 tokens


class Replica:
    """A worker in this process, whose methods can be awaited until it is killed."""

    def __init__(self, permits=None):
        self.backend = CountingBackend()
        self.backend.permits = permits
        self.engine = SteppedEngine("r", lambda: self.backend, start_timeout_s=5.0, command_timeout_s=5.0)
        self.worker = RolloutWorker(
            self.engine, None, SamplingSpec(1), name="r", seed=0, commit_groups=1, timeout_s=5.0, tracer=QUIET
        )
        self.completing = self.worker.completing
        self.dead = asyncio.Event()

    def __getattr__(self, method):
        async def call(*args):
            work = asyncio.ensure_future(asyncio.to_thread(attrgetter(method)(self), *args))
            dead = asyncio.ensure_future(self.dead.wait())
            await asyncio.wait([work, dead], return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise WorkerLost("the process died")
            dead.cancel()
            return work.result()

        return call if "." in method else super().__getattribute__(method)

    async def rouse(self):
        await asyncio.to_thread(self.worker.rouse)

    async def rest(self):
        await asyncio.to_thread(self.worker.rest)

    async def stop(self):
        return await asyncio.to_thread(self.worker.stop)


class Sync:
    """All replicas serve version 0; a newer one is loaded on demand."""

    def __init__(self, replicas):
        self.replicas = list(replicas)
        self.served = [0 for _ in replicas]
        self.locks = [asyncio.Lock() for _ in replicas]
        self.newest = 0

    def is_behind(self, index):
        return self.served[index] < self.newest

    def emptied(self, index):
        self.served[index] = NOTHING

    async def bring_up(self, index):
        async with self.locks[index]:
            await asyncio.to_thread(self.replicas[index].worker.load, manifest(self.newest))
            self.served[index] = self.newest


class Serving:
    def __init__(self, *replicas, max_running=16):
        self.config = SimpleNamespace(rollout=SimpleNamespace(max_running=max_running))
        self.sync, self.turns = Sync(replicas), NoTurns()
        self.recorder = SimpleNamespace(busy=lambda side: contextlib.nullcontext())
        spawn = asyncio.ensure_future
        self.run = SimpleNamespace(over=False, job=SimpleNamespace(spawn=spawn))

    def pool(self, share=0.25, waiting=64):
        return Pool(lambda: self, share, waiting)


def request(seed=SEED, most=LONGEST):
    return GenRequest("", np.array([1, 2], np.int32), SamplingSpec(most), seed)


def tokens(parts, place=0):
    return [int(t) for p in parts if p.index == place for t in p.token_ids]


def expected(seed, versions=None):
    count = natural_length(seed)
    return [v * BASE + draw(seed, i) for i, v in zip(range(count), versions or [0] * count)]


async def until(what):
    for _ in range(1000):
        if what():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come")


async def collect(answers):
    return [part async for part in answers]


def run(test):
    asyncio.run(asyncio.wait_for(test, 30))


def test_answers_come_whole_with_log_probabilities_versions_and_reasons():
    async def check():
        pool = Serving(Replica(), Replica()).pool()
        parts = await collect(pool.answers([request(), request(3), request(SEED, 5)], 10))
        assert [tokens(parts, i) for i in range(3)] == [expected(SEED), expected(3), expected(SEED)[:5]]
        ends = {p.index: p.finish_reason for p in parts if p.finish_reason}
        assert ends == {0: "stop", 1: "stop", 2: "length"}
        for part in parts:
            assert part.version == 0 and np.allclose(part.logprobs, -part.token_ids / 7)
        await pool.close()

    run(check())


def test_parts_come_while_the_answer_is_sampled():
    async def check():
        replica = Replica(permits=3)
        answers = Serving(replica).pool().answers([request()], 10)
        first = await anext(answers)
        assert first.finish_reason is None and tokens([first]) == expected(SEED)[: len(first.token_ids)]
        replica.backend.permits = None
        assert tokens([first, *await collect(answers)]) == expected(SEED)

    run(check())


def test_a_part_is_of_one_version_when_weights_change_inside_an_answer():
    async def check():
        replica = Replica(permits=4)
        serving = Serving(replica)
        answers = serving.pool().answers([request()], 10)
        parts = []
        while len(tokens(parts)) < 4:
            parts.append(await anext(answers))
        serving.sync.newest = 1
        await serving.sync.bring_up(0)
        replica.backend.permits = None
        parts += await collect(answers)
        assert tokens(parts) == expected(SEED, [0] * 4 + [1] * 13)
        assert [t // BASE for t in tokens(parts)] == [p.version for p in parts for _ in p.token_ids]

    run(check())


def test_an_idle_replica_loads_the_newest_weights_first_and_one_in_a_batch_goes_on_with_its_own():
    async def check():
        serving = Serving(Replica(), Replica())
        serving.sync.newest = 2
        await serving.sync.locks[0].acquire()  # it answers a batch of training
        parts = await collect(serving.pool(share=0.1).answers([request(), request()], 10))
        assert {p.index: p.version for p in parts} == {0: 2, 1: 0}
        assert serving.sync.served == [0, 2]

    run(check())


def test_a_replica_that_only_clients_keep_busy_comes_to_new_weights_all_the_same():
    async def check():
        replica = Replica(permits=3)
        serving = Serving(replica)
        answers = serving.pool().answers([request()], 10)
        parts = [await anext(answers)]
        while len(tokens(parts)) < 3:
            parts.append(await anext(answers))
        serving.sync.newest = 1
        await until(lambda: serving.sync.served == [1])
        replica.backend.permits = None
        parts += await collect(answers)
        assert tokens(parts) == expected(SEED, [0] * 3 + [1] * 14)

    run(check())


def test_clients_have_their_share_of_a_replica_and_the_others_wait():
    async def check():
        replicas = Replica(permits=0), Replica(permits=0)
        serving = Serving(*replicas, max_running=8)
        pool = serving.pool(share=0.25, waiting=5)
        asking = asyncio.ensure_future(collect(pool.answers([request(i) for i in range(5)], 10)))
        await until(lambda: all(len(r.backend.rows) == 2 for r in replicas))
        assert pool.describe() == {"running": 4, "waiting": 1}
        with pytest.raises(ServiceError, match="completions_waiting") as refused:
            await anext(pool.answers([request()] * 5, 10))
        assert refused.value.status == 429
        for replica in replicas:
            replica.backend.permits = None
        assert [tokens(await asking, i) for i in range(5)] == [expected(i) for i in range(5)]

    run(check())


def test_an_answer_whose_caller_goes_leaves_the_engine():
    async def check():
        replica = Replica(permits=2)
        pool = Serving(replica, max_running=4).pool()  # room for one
        answers = pool.answers([request(), request(5)], 10)
        await anext(answers)
        assert len(replica.backend.rows) == 1
        await answers.aclose()
        await until(lambda: not replica.backend.rows and pool.describe() == {"running": 0, "waiting": 0})
        replica.backend.permits = None
        assert tokens(await collect(pool.answers([request(7)], 10))) == expected(7)

    run(check())


def test_what_a_lost_replica_had_streamed_goes_on_at_another_one_from_there():
    async def check():
        first, second = Replica(permits=5), Replica(permits=None)
        serving = Serving(first, second)
        serving.sync.served = [1, 0]  # the newer weights are asked
        pool = serving.pool()
        answers = pool.answers([request()], 10)
        parts = [await anext(answers)]
        first.dead.set()
        await asyncio.to_thread(first.engine.close)
        serving.sync.replicas[0] = None
        parts += await collect(answers)
        assert tokens(parts) == expected(SEED)
        resumed = second.backend.requests[0]
        assert resumed.resume_ids.tolist() == tokens(parts)[: len(resumed.resume_ids)] and len(resumed.resume_ids) > 0

    run(check())


def test_answers_that_an_engine_ends_go_on_and_an_engine_that_only_fails_is_told_of():
    async def check():
        replica = Replica(permits=3)
        pool = Serving(replica).pool()
        answers = pool.answers([request()], 10)
        parts = [await anext(answers)]
        await asyncio.to_thread(replica.engine.go_back)  # the training group is started again
        replica.backend.permits = None
        assert tokens(parts + await collect(answers)) == expected(SEED)
        replica.backend.broken = True
        with contextlib.suppress(Exception):
            await asyncio.to_thread(replica.engine.update, manifest(1))
        with pytest.raises(ServiceError, match="DIRTY") as told:
            await collect(pool.answers([request()], 10))
        assert told.value.status == 503

    run(check())


@pytest.mark.parametrize("lent", [False, True])
def test_the_trainer_gets_its_device_back_at_once_and_the_answer_goes_on_in_the_next_turn(lent):
    async def check():
        replica, trainer = Replica(permits=6), SimpleNamespace(moves=[])

        async def give():
            trainer.moves.append("give")

        async def take_back():
            trainer.moves.append("take_back")
            assert replica.engine.state == "SLEEPING"

        trainer.give, trainer.take_back = give, take_back
        await replica.rest()
        serving = Serving(replica)
        serving.turns = Turns([trainer], {0: replica}, interrupt=lent, emptied=serving.sync.emptied)
        serving.sync.emptied(0)
        answers = serving.pool().answers([request()], 10)
        parts = [await anext(answers)]
        while len(tokens(parts)) < 6:
            parts.append(await anext(answers))
        async with serving.turns.training():
            assert not replica.backend.rows and trainer.moves == ["give", "take_back"]
            replica.backend.permits, serving.sync.newest = None, 1
            await asyncio.sleep(0.3)
            assert not replica.backend.rows and replica.engine.state == "SLEEPING"
        parts += await collect(answers)
        assert tokens(parts) == expected(SEED, [0] * 6 + [1] * 11) and trainer.moves == ["give", "take_back", "give"]

    run(check())


def test_who_waits_too_long_and_who_asks_without_a_run_is_told():
    async def check():
        replica = Replica(permits=0)
        with pytest.raises(ServiceError, match="1 of 1 completions") as late:
            await collect(Serving(replica).pool().answers([request()], 0.2))
        await until(lambda: not replica.backend.rows)
        assert late.value.status == 504
        with pytest.raises(ServiceError) as none:
            await collect(Pool(lambda: None, 0.25, 4).answers([request()], 5))
        assert none.value.status == 503

    run(check())


def test_an_iterator_crosses_between_event_loops_with_its_items_its_error_and_its_end():
    seen = []

    async def items(fail):
        try:
            for i in range(3):
                yield i
            if fail:
                raise ServiceError(400, "bad", "no more")
            await asyncio.sleep(60)
        finally:
            seen.append("closed")

    async def caller(loop):
        with pytest.raises(ServiceError, match="no more"):
            async for i in carried(loop, items(True)):
                seen.append(i)
        few = carried(loop, items(False))
        assert [await anext(few) for _ in range(3)] == [0, 1, 2]
        await few.aclose()

    async def run_loop():
        here = asyncio.get_running_loop()
        await asyncio.to_thread(lambda: asyncio.run(caller(here)))
        await until(lambda: seen.count("closed") == 2)
        assert [i for i in seen if i != "closed"] == [0, 1, 2]

    run(run_loop())


def test_who_still_waits_when_the_loop_of_the_run_ends_is_told_so():
    began, ended = threading.Event(), threading.Event()

    async def items():
        yield 1
        began.set()
        await asyncio.sleep(60)

    async def run_loop():
        loops.append(asyncio.get_running_loop())
        began.set()
        await asyncio.to_thread(ended.wait, 20)

    async def caller():
        carrying = carried(loops[0], items())
        assert await anext(carrying) == 1
        ended.set()
        with pytest.raises(ServiceError, match="has ended"):
            await anext(carrying)
        thread.join(20)
        with pytest.raises(ServiceError, match="has ended"):
            await anext(carried(loops[0], items()))

    loops = []
    thread = threading.Thread(target=lambda: asyncio.run(run_loop()))
    thread.start()
    assert began.wait(20)
    run(caller())


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [1] * 20}, "20 tokens"),
        ({"prompt_ids": [1, 99]}, "token id 99"),
        ({"prompt_ids": [-1]}, "token id -1"),
        ({"max_tokens": 19}, "max_tokens 19"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
)
def test_a_request_that_no_engine_could_serve_is_refused_by_name(wrong, said):
    values = {"prompt_ids": [1, 2]} | wrong
    asked = CompletionRequest(**{**values, "prompt_ids": np.array(values["prompt_ids"], np.int32)})
    with pytest.raises(ServiceError, match=said) as refused:
        request_of(asked, SamplingSpec(0, 0.7, stop_token_ids=(2,)), 20, 50)
    assert refused.value.status == 400


def test_unset_values_are_those_of_the_run():
    asked = request_of(CompletionRequest(np.array([1], np.int32)), SamplingSpec(0, 0.7, 0.9, 5, (2,)), 20, 50)
    assert asked.sampling == SamplingSpec(19, 0.7, 0.9, 5, (2,)) and 0 <= asked.seed < 1 << 63
    own = CompletionRequest(np.array([1], np.int32), 3, 0.0, 1.0, -1, 8, (7,))
    asked = request_of(own, SamplingSpec(0, 0.7, 0.9, 5, (2,)), 20, 50)
    assert asked.sampling == SamplingSpec(3, 0.0, 1.0, -1, (2, 7)) and asked.seed == 8
