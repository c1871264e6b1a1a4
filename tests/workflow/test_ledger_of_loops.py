"""The ledger that the real loops write: it adds up under every schedule, and a fault of the loops is found in it."""

import asyncio
from itertools import product

import pytest

from mindspeed_asyncflow.errors import ClaimLost, WorkerReplaced
from mindspeed_asyncflow.observe.audit import Rules, audit, open_ledger
from mindspeed_asyncflow.observe.ledger import Ledger
from mindspeed_asyncflow.workflow.feeding import Feeder
from tests.workflow.fakes import FakePool, FakeRollout, FakeTrain, prompts_of, run_loops
from tests.workflow.test_run import config


def audited(tmp_path, settings, *, order=None, before=lambda run: None, **how):
    """Run the loops with a ledger, and what its audit finds; prompts are (epoch, 0), (epoch, 1), ... (epoch, 99)."""
    ledger = Ledger(tmp_path / "ledger.sqlite")

    def told(run):
        run.job.events = ledger
        before(run)

    out = run_loops(settings, tmp_path, prompts_of(100, 4), before=told, **how)
    ledger.close()
    w = settings.workflow
    rules = Rules(settings.algorithm.group_size, w.max_lag, w.take == "issued" and w.oversample == 1)
    prompts = iter(order or product(range(9), range(100)))
    return out, audit(open_ledger(tmp_path / "ledger.sqlite"), rules, prompts)


def heads(folder, step):
    """The first lines of the answers that were written for people."""
    text = next(folder.rglob(f"step_{step:06d}.txt")).read_text()
    return [line for line in text.splitlines() if line.startswith("---")]


@pytest.mark.parametrize(
    "settings",
    [
        config(max_lag=0),
        config(max_lag=2, replicas=2),
        config(max_lag=3, replicas=2, workflow={"take": "ready"}),
        config(max_lag=2, workflow={"oversample": 1.5}),
        config(steps=3, max_lag=0, workflow={"oversample": 1.5}),
        config(max_lag=1, workflow={"stale": "mask"}),
    ],
    ids=["in turn", "asynchronous", "take ready", "oversampled", "surplus dropped", "masked"],
)
def test_the_ledger_of_every_schedule_adds_up_with_the_books_of_the_driver(tmp_path, settings):
    out, found = audited(tmp_path, settings)
    of_first = {line.rpartition(" ")[2] for line in heads(tmp_path, 0)}  # as --prompt wants them
    assert of_first and of_first <= {f"0:{prompt}" for _, prompt in found.prompts.values()}
    window = out.run.window
    assert found.holds, found.wrong
    assert (found.samples, found.trained) == (window.issued, window.trained)
    assert found.dropped == {k: n for k, n in window.dropped.items() if n}
    assert found.worst_lag == max(out.recorder.lags) and found.steps == settings.trainer.steps
    assert 2 * found.open == window.open


def test_groups_dropped_as_stale_come_again_as_groups_that_name_them(tmp_path):
    rollout = FakeRollout()

    class Stale(FakeTrain):
        def optim_step(self, denominator):
            if self.version == 3:
                rollout.stale_answers = 3
            return super().optim_step(denominator)

    _, found = audited(tmp_path, config(steps=8), rollouts=[rollout], train=Stale())
    assert found.holds, found.wrong
    assert found.dropped["stale"] > 0 and found.trained == 64


def test_samples_without_a_score_are_accounted_for_one_by_one(tmp_path):
    pool = FakePool()
    pool.silent_truths = {"1", "2"}
    _, found = audited(tmp_path, config(steps=3), pool=pool)
    assert found.holds and found.dropped == {"unscored": 4} and found.trained == 20


def test_prompts_that_the_stream_has_in_another_order_are_found(tmp_path):
    _, found = audited(tmp_path, config(steps=2), order=product(range(9), (1, 0, *range(2, 100))))
    assert "group 0 is prompt 0:0, the data stream gives prompt 0:1 there" in found.wrong["order"]


def test_a_prompt_that_is_issued_again_without_need_is_found(tmp_path, monkeypatch):
    put = Feeder.put

    async def twice(self, batch, issues, replaces=()):
        await put(self, batch, [issues[0], *issues[:-1]], replaces)

    monkeypatch.setattr(Feeder, "put", twice)
    _, found = audited(tmp_path, config(steps=2))
    assert "prompt 0:0 was issued 1 times more than the stream has it" in found.wrong["order"]
    assert "prompt 0:3 was not issued" in found.wrong["lost"]


class Forgetful:
    """A worker whose first call of `method` does its work and is never heard of again, long enough for others to go on
    with what it wrote."""

    def __init__(self, worker, method, error):
        self._worker, self._method, self._error, self._calls = worker, method, error, 0

    def __getattr__(self, name):
        found = getattr(self._worker, name)
        return self._once if name == self._method else found

    async def _once(self, *args):
        report = await getattr(self._worker, self._method)(*args)
        self._calls += 1
        if self._calls == 1:
            await asyncio.sleep(0.1)
            raise self._error
        return report


def test_what_a_lost_scorer_had_written_is_trained_only_when_its_scores_are_known(tmp_path):
    def lose(run):
        run.job.crew.scorer = Forgetful(run.job.crew.scorer, "score", WorkerReplaced("the scorer died"))

    _, found = audited(tmp_path, config(steps=3), before=lose)
    assert found.holds, found.wrong
    assert found.trained == 24


def test_answers_of_a_replica_that_was_lost_with_its_report_are_accounted_for(tmp_path):
    def lose(run):
        run.job.crew.rollouts[0] = Forgetful(run.job.crew.rollouts[0], "generate", ClaimLost("the pair went away"))

    _, found = audited(tmp_path, config(steps=3), before=lose)
    assert found.holds, found.wrong
    assert found.trained == 24


def test_a_drop_that_nobody_notes_is_a_loss(tmp_path, monkeypatch):
    note = Ledger.note
    monkeypatch.setattr(Ledger, "note", lambda self, kind, **f: kind == "dropped" or note(self, kind, **f))
    pool = FakePool()
    pool.silent_truths = {"1"}
    _, found = audited(tmp_path, config(steps=2), pool=pool)
    assert any(words.startswith("group 1 is open at the end") for words in found.wrong["lost"])
