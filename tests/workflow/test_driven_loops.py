"""The loops of a run that somebody drives from outside: prompts that come late, answers that come with them, a gate."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ClientSilent, WeightSyncError
from mindspeed_asyncflow.records import Completion, VersionSpan
from mindspeed_asyncflow.service.intake import ClientPrompts
from mindspeed_asyncflow.service.outside import Gate, Outside
from mindspeed_asyncflow.service.presence import Presence
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.given import Given
from tests.workflow.fakes import FakePool, FakeRollout, FakeTrain, run_loops


def config(steps=4, max_lag=1, **more):
    sections = {
        "trainer": {"steps": steps},
        "algorithm": {"group_size": 2},
        "workflow": {"groups_per_step": 4, "max_lag": max_lag, "watchdog_s": 2.0},
        "rollout": {"max_new_tokens": 2},
        "service": {"prompts": "client"},
    }
    for name, values in more.items():
        sections.setdefault(name, {}).update(values)
    return Config.model_validate(sections)


def issue(number, version=None):
    """A prompt; with its answers, where `version` has sampled them elsewhere."""
    if version is None:
        return Issue(0, -1, np.array([number, 1], np.int32), str(number))
    spans, logprobs = (VersionSpan(version, 0, 2),), -np.array([version, version], np.float32)
    answer = Completion("", np.array([number, version + 10], np.int32), logprobs, "stop", spans)
    return Issue(0, -1, np.array([number, 1], np.int32), str(number), "{}", Given((answer, answer)))


class Driven:
    """`run_loops` with a client: `feed(run, stream)` runs beside the loops."""

    def __init__(self, tmp_path, feed, limit_s=60.0, gate=None):
        self.presence = Presence(limit_s, lambda: self.run.job.progressed())
        self.stream = ClientPrompts(tmp_path / "prompts.jsonl", 4, self.presence.wait)
        self.feed, self.gate = feed, gate

    def batches(self):
        batch = next(self.stream, None)
        return None if batch is None else [issue for _, _, issue in batch]

    def before(self, run):
        self.run = run
        run.feeder.ready = self.stream.ready
        if self.gate is not None:
            run.training.permitted = self.gate(run, self.presence).passed
        run.job.spawn(self.feed(run, self.stream))


def drive(tmp_path, settings, feed, gate=None, limit_s=60.0, **how):
    client = Driven(tmp_path, feed, limit_s, gate)
    return run_loops(settings, tmp_path, client.batches, before=client.before, **how)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_prompts_that_come_one_by_one_are_trained_in_their_order_and_the_rest_at_the_end(tmp_path, max_lag):
    async def feed(run, stream):
        for number in range(14):
            stream.add([issue(number)], last=number == 13)
            await asyncio.sleep(0.002)

    out = drive(tmp_path, config(steps=9, max_lag=max_lag), feed)
    trained = {step: sorted(index for _, index in of_step) for step, of_step in out.notes.trained().items()}
    assert trained == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9, 10, 11], 3: [12, 13]}
    assert (out.run.window.issued, out.run.window.trained, out.run.window.open) == (28, 28, 0)
    assert "the client's prompts end after 4 steps" in out.recorder.note


def test_a_stop_trains_what_is_issued_and_leaves_the_queue(tmp_path):
    async def feed(run, stream):
        stream.add([issue(number) for number in range(40)], last=False)
        await run.window.wait_published(2)
        stream.close()

    out = drive(tmp_path, config(steps=9), feed)
    steps = len(out.notes.trained())
    assert 2 <= steps < 9 and out.run.window.trained == out.run.window.issued == 8 * steps


def test_a_run_that_waits_for_its_client_is_no_hang_and_a_silent_client_ends_it(tmp_path):
    async def patient(run, stream):
        await asyncio.sleep(0.6)  # beyond the watchdog's deadline
        stream.add([issue(number) for number in range(4)], last=True)

    async def silent(run, stream): ...

    hasty = {"workflow": {"watchdog_s": 0.4}}
    assert drive(tmp_path, config(**hasty), patient).run.window.trained == 8
    (tmp_path / "again").mkdir()
    with pytest.raises(ClientSilent, match=r"4 prompts for the next batch \(0 are there\)"):
        drive(tmp_path / "again", config(**hasty), silent, limit_s=0.1)


def test_answers_from_outside_are_trained_and_no_replica_answers_their_prompts(tmp_path):
    async def feed(run, stream):
        stream.add([issue(0), issue(1, 0), issue(2), issue(3, 0)], last=False)
        await run.window.wait_published(1)
        stream.add([issue(4, 1), issue(5, 0), issue(6, 1), issue(7, 0)], last=True)

    rollout = FakeRollout()
    out = drive(tmp_path, config(), feed, rollouts=[rollout])
    assert rollout.answered == 4  # two answers to each of two prompts
    assert out.run.window.trained == 16 and not out.run.window.dropped and max(out.recorder.lags) == 1
    outside = [note for note in out.notes.of("answering") if note["replica"] < 0]
    assert sorted(note["since"] for note in outside) == [0, 0, 0, 0, 1, 1]


def test_answers_from_outside_that_become_too_old_are_dropped_and_the_run_answers_itself(tmp_path):
    async def feed(run, stream):
        stream.add([issue(number) for number in range(12)], last=False)
        stream.add([issue(12, 0), *(issue(number) for number in range(13, 16))], last=True)

    rollout = FakeRollout()
    out = drive(tmp_path, config(), feed, rollouts=[rollout], train=FakeTrain(delay_s=0.01))
    assert out.run.window.trained == 32 and max(out.recorder.lags) <= 1
    assert rollout.answered == 32  # also the prompt whose answers had version 0, in step 3


def test_replicas_serve_no_version_that_the_client_has_not_asked_for(tmp_path):
    asked, seen = [0], []

    class Watching(Gate):
        def __init__(self, run, presence):
            super().__init__(presence, lambda: run.window.version >= 4)
            self.run = run

        async def passed(self, version):
            seen.append((version, run_published := self.run.window.published))
            assert run_published < version
            await super().passed(version)
            assert version <= max(asked) or self.over()

    async def feed(run, stream):
        stream.add([issue(number) for number in range(16)], last=True)
        for version in (1, 2, 3):
            while run.window.version < version:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert run.window.published < version
            asked.append(version)
            run.training.permitted.__self__.permit(version)
            await run.window.wait_published(version)

    out = drive(tmp_path, config(), feed, gate=Watching)
    assert [version for version, _ in seen] == [1, 2, 3, 4] and out.run.window.published == 4


def real_gate(outsides):
    """The gate of a run whose `Outside` is appended to `outsides`."""

    def gate(run, presence):
        outside = Outside(run.config, None)
        outside.session, outside.prompts = SimpleNamespace(run=run), run.feeder.ready.__self__
        outsides.append(outside)
        return Gate(presence, outside._ends)

    return gate


async def version_made(run, version):
    while run.window.version < version:
        await asyncio.sleep(0.001)


def test_a_stop_needs_no_notification(tmp_path):
    outsides = []

    async def feed(run, stream):
        stream.add([issue(number) for number in range(40)], last=False)
        await version_made(run, 2)  # further it does not get before version 1 is published
        outsides[0].stop(now=False)

    out = drive(tmp_path, config(steps=9), feed, gate=real_gate(outsides), limit_s=1.5)
    steps = len(out.notes.trained())
    assert 2 <= steps < 9 and out.run.window.trained == out.run.window.issued == 8 * steps


def test_the_end_of_the_prompts_needs_no_notification_and_prompts_that_are_left_do(tmp_path):
    published = []

    async def feed(run, stream):
        stream.add([issue(number) for number in range(12)], last=True)
        await version_made(run, 2)
        await asyncio.sleep(0.3)
        published.append(run.window.published)
        run.training.permitted.__self__.permit(1)

    out = drive(tmp_path, config(steps=9), feed, gate=real_gate([]), limit_s=1.5)
    assert published == [0] and len(out.notes.trained()) == 3 and out.run.window.published == 3


def test_what_is_asked_for_is_refused_when_the_loops_end(tmp_path):
    told = []

    async def feed(run, stream):
        async def for_ever(step):
            told.append("begun")
            await asyncio.sleep(60)

        async def never(step):
            told.append("never")

        for work in (for_ever, never):
            run.training.between.ask(work).add_done_callback(lambda asked: told.append(asked.exception().code))
        while not told:
            await asyncio.sleep(0.001)
        raise RuntimeError("a loop breaks")

    with pytest.raises(RuntimeError, match="a loop breaks"):
        drive(tmp_path, config(), feed)
    assert told == ["begun", "recovering", "recovering"]


def test_wrong_weights_that_somebody_outside_finds_end_the_run(tmp_path):
    told = []

    async def feed(run, stream):
        async def work(step):
            raise WeightSyncError("other weights")

        run.training.between.ask(work).add_done_callback(lambda asked: told.append(str(asked.exception())))
        await asyncio.sleep(60)

    with pytest.raises(WeightSyncError, match="other weights"):
        drive(tmp_path, config(), feed)
    assert told == ["other weights"]


def test_a_step_lacks_scores_when_its_answers_wait_for_them(tmp_path):
    may, saw = threading.Event(), []

    class Slow(FakePool):
        def score(self, *asked):
            assert may.wait(20)
            return super().score(*asked)

    async def feed(run, stream):
        assert not run.training.lacks_scores()
        stream.add([issue(number) for number in range(4)], last=True)
        while not run.book.count():
            await asyncio.sleep(0.001)
        saw.append(run.training.lacks_scores())
        may.set()
        await version_made(run, 1)
        saw.append(run.training.lacks_scores())

    drive(tmp_path, config(), feed, pool=Slow())
    assert saw == [True, False]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_what_is_asked_for_between_steps_comes_once_whether_the_run_waits_or_trains(tmp_path, max_lag):
    done = []

    async def feed(run, stream):
        async def work(step):
            done.append((step, run.window.version))
            return step

        assert await run.training.between.ask(work) == 0  # it waits for prompts
        stream.add([issue(number) for number in range(12)], last=False)
        while not run.book.has(0):
            await asyncio.sleep(0.001)
        assert 1 <= await run.training.between.ask(work) <= 3
        while run.window.version < 3:
            await asyncio.sleep(0.001)
        assert await run.training.between.ask(work) == 3
        stream.add([], last=True)

    drive(tmp_path, config(max_lag=max_lag), feed, train=FakeTrain(delay_s=0.005))
    assert [step for step, _ in done] == [version for _, version in done] and len(done) == 3


def test_a_step_goes_short_rather_than_wait_for_prompts_of_a_client_who_waits_for_the_step(tmp_path):
    """Dynamic sampling drops the groups whose rewards are all equal, here all."""

    async def feed(run, stream):
        stream.add([issue(number) for number in range(6)], last=False)
        while run.window.version < 1:
            await asyncio.sleep(0.001)
        assert run.window.dropped["zero_variance"] == 12 and stream.queued == 0
        stream.add([issue(number) for number in range(6, 10)], last=True)

    out = drive(tmp_path, config(algorithm={"dynamic_sampling": True}), feed)
    assert "the client had no prompts waiting" in out.recorder.note
    assert out.run.window.issued == 20 and out.run.window.open == 0
