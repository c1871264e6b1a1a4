"""What `audit` finds in a ledger: made by hand, each with one thing wrong."""

import contextlib
import math
import sqlite3
from itertools import product
from types import SimpleNamespace

import pytest

from mindspeed_asyncflow.errors import LedgerError
from mindspeed_asyncflow.observe.audit import Rules, audit, open_ledger
from mindspeed_asyncflow.observe.ledger import Ledger
from mindspeed_asyncflow.observe.story import story

SIZE = 2
LATER = "INSERT INTO note VALUES (90, 0, 'trained', NULL); INSERT INTO trained VALUES (90, 0, 0, 7, 7, 7, NULL, 1);"
RULES = Rules(SIZE, max_lag=1, leaves_none=True)


class Story:
    """Notes of a run of groups of two samples whose stream gives the prompts 0:0, 0:1, ... in this order."""

    def __init__(self, path):
        self.path = path / "ledger.sqlite"
        self.ledger = Ledger(self.path)

    def issue(self, group, prompt=None, batch=0, replaces=()):
        prompts = [[0, group if prompt is None else prompt]]
        self.ledger.note("issued", batch=batch, groups=[group], prompts=prompts, replaces=list(replaces))

    def answer(self, group, members=range(SIZE), replica=0, since=0):
        self.ledger.note("answering", replica=replica, since=since, rows=[[group, member] for member in members])

    def score(self, group, members=range(SIZE), scores=(1.0, 1.0)):
        self.ledger.note("scored", rows=[[group, member] for member in members], scores=scores)

    def train(self, group, step=0, oldest=None, members=range(SIZE), bound=None, made=True):
        """`made`: it was answered and scored before."""
        rows = [10 * group + member for member in members]
        if made:
            self.answer(group)
            self.score(group)
        self.ledger.note(
            "trained",
            step=step,
            plan=[[rows]],
            groups={row: (group, row % 10) for row in rows},
            versions=dict.fromkeys(rows, (step if oldest is None else oldest, step)),
            rewards=dict.fromkeys(rows, 0.5),
            rules=SimpleNamespace(oldest_allowed=bound),
        )

    def drop(self, group, reason="stale", **samples):
        self.ledger.note("dropped", group=group, reason=reason, **samples)

    def finish(self, version):
        self.ledger.note("finished", version=version, optim=SimpleNamespace(applied=True))

    def resume(self, position, still_open, rows=()):
        """`rows`: those of the checkpoint that have scores."""
        self.ledger.note("resumed", ledger=position, version=0)
        self.ledger.note("restored", open=still_open, rows=rows, scores=[1.0] * len(rows))

    def audit(self, rules=RULES):
        self.ledger.settle()
        return audit(open_ledger(self.path), rules, iter(product(range(1), range(100))))

    def wrong(self, rules=RULES):
        return {law: words for law, words in self.audit(rules).wrong.items() if words}


def test_a_run_that_goes_on_is_audited_as_it_stood(run):
    """What is written while the audit reads is not half of what it finds."""
    run.issue(0)
    run.train(0)
    run.finish(1)
    run.ledger.settle()

    def prompts():
        for prompt in range(100):
            writer = sqlite3.connect(run.path, timeout=0)
            with contextlib.suppress(sqlite3.OperationalError):  # it waits for whoever reads
                writer.executescript(LATER)
            writer.close()
            yield 0, prompt

    found = audit(open_ledger(run.path), RULES, prompts())
    assert found.holds and found.steps == 1
    sqlite3.connect(run.path).executescript(LATER)  # nobody reads any more
    assert run.audit().wrong["steps"]


@pytest.fixture
def run(tmp_path):
    made = Story(tmp_path)
    yield made
    made.ledger.close()


def test_a_run_without_fault_is_counted_and_nothing_is_wrong(run):
    run.issue(0)
    run.issue(1)
    run.drop(0)
    run.issue(2, prompt=0, replaces=[0])
    run.train(1, oldest=0)
    run.drop(2, reason="unscored", samples=1)
    run.train(2, members=[1])
    run.finish(1)
    run.issue(3, prompt=2, batch=1)
    run.train(3, step=1, oldest=0)
    found = run.audit()
    assert found.holds, found.wrong
    assert (found.groups, found.samples, found.trained, found.open) == (4, 8, 5, 0)
    assert found.dropped == {"stale": 2, "unscored": 1}
    assert (found.steps, found.in_step, found.worst_lag) == (1, 2, 1)


def test_a_prompt_out_of_order_is_named_and_so_is_the_one_that_is_missing(run):
    run.issue(0)
    run.issue(1, prompt=2)
    assert run.wrong() == {
        "order": ["group 1 is prompt 0:2, the data stream gives prompt 0:1 there",
                  "prompt 0:2 was issued 1 times more than the stream has it"],
        "lost": ["prompt 0:1 was not issued"],
    }  # fmt: skip


@pytest.mark.parametrize("members, step", [([0, 1], 1), ([0], 0)])
def test_a_sample_trained_twice_is_found_in_one_step_and_over_steps(run, members, step):
    run.issue(0)
    run.train(0)
    if step:
        run.finish(1)
    run.train(0, step=step, members=members)
    assert list(run.wrong()) == ["twice"]


def test_a_sample_that_is_trained_was_given_to_a_replica_has_tokens_and_a_score(run):
    for group in range(4):
        run.issue(group)
    run.score(0)
    run.answer(1)
    run.score(1, scores=(0.5, math.nan))
    run.answer(2, members=[0])
    run.answer(2, members=[1])
    run.score(2)
    for group in range(3):
        run.train(group, made=False)
    run.train(3, oldest=-1)
    assert run.wrong() == {
        "made": [
            "sample 0/0 was given to no replica, and was trained in step 0",
            "sample 0/1 was given to no replica, and was trained in step 0",
            "sample 1/1 has no score, and was trained in step 0",
            "sample 3/0 has no tokens, and was trained in step 0",
            "sample 3/1 has no tokens, and was trained in step 0",
        ]
    }


@pytest.mark.parametrize("found", [True, False])
def test_scores_that_a_resume_undid_count_only_where_its_checkpoint_has_them(run, found):
    """The dock is cut before the driver: a score may be in it whose note comes after."""
    run.issue(0)
    run.answer(0)
    position = run.ledger.position
    run.score(0)
    run.resume(position, [0], rows=[[0, 0], [0, 1]] if found else [])
    run.train(0, made=False)
    assert list(run.wrong()) == ([] if found else ["made"])


def test_samples_that_are_neither_trained_nor_dropped_are_lost(run):
    run.issue(0)
    run.train(0, members=[0])
    assert run.wrong() == {"lost": ["group 0: 1 of 2 samples are neither trained nor dropped"]}


def test_a_group_that_its_step_left_behind_is_lost_unless_steps_may_leave_some(run):
    run.issue(0)
    run.issue(1)
    run.train(0)
    run.finish(1)
    assert run.wrong() == {"lost": ["group 1 was issued for step 0, which has ended without it"]}
    assert run.wrong(Rules(SIZE, 1, leaves_none=False)) == {}


def test_a_group_that_the_driver_does_not_know_at_the_end_is_lost(run):
    run.issue(0)
    run.issue(1)
    run.ledger.note("ended", open=[0])
    assert run.wrong() == {"lost": ["group 1 is open at the end (note 3), and the run does not know it"]}


def test_a_group_that_is_trained_and_dropped_counts_as_twice(run):
    run.issue(0)
    run.train(0)
    run.drop(0)
    assert run.wrong() == {"twice": ["group 0: 2 samples trained, and 2 dropped"]}


def test_a_replacement_needs_a_dropped_group_with_its_prompt(run):
    run.issue(0)
    run.issue(1, prompt=0, replaces=[0])
    assert run.wrong() == {"order": ["group 0 (prompt 0:0) was not dropped, and group 1 replaces it"]}


def test_a_lag_above_the_law_is_named_unless_older_tokens_were_masked(run):
    for group in range(3):
        run.issue(group, batch=3)
    for version in (1, 2, 3):
        run.finish(version)
    run.train(0, step=3, oldest=1)
    run.train(1, step=3, oldest=1, bound=2)
    run.train(2, step=3, oldest=0, bound=1)
    lines = [
        f"sample {g}/{m}: lag {lag} in step 3, workflow.max_lag is 1" for g, lag in ((0, 2), (2, 3)) for m in (0, 1)
    ]
    assert run.wrong() == {"lag": lines}


def test_a_version_that_is_missing_and_a_step_that_trains_after_its_end_are_found(run):
    run.issue(0)
    run.finish(1)
    run.train(0)
    run.finish(3)
    assert run.wrong()["steps"] == [
        "version 3 was made after version 1",
        "step 0 trained after it had ended (note 5)",
    ]


def test_what_lies_after_a_resumed_checkpoint_is_undone_and_done_again(run):
    run.issue(0)
    run.issue(1, batch=1)
    run.train(0)
    run.finish(1)
    position = run.ledger.position
    run.train(1, step=1)
    run.issue(2, batch=2)
    run.finish(2)
    run.resume(position, [1])
    run.train(1, step=1)
    run.finish(2)
    run.issue(2, batch=2)
    found = run.audit()
    assert found.holds, found.wrong
    assert (found.groups, found.trained, found.open, found.resumes, found.undone) == (3, 4, 1, 1, 2)


def test_a_group_that_a_resume_forgets_is_lost(run):
    run.issue(0)
    position = run.ledger.position
    run.resume(position, [])
    assert run.wrong() == {"lost": ["group 0 is open after the resume (note 3), and the run does not know it"]}


def test_an_older_checkpoint_brings_back_what_a_later_resume_had_undone(run):
    run.issue(0)
    early = run.ledger.position
    run.train(0)
    run.finish(1)
    late = run.ledger.position
    run.resume(early, [0])
    assert run.audit().trained == 0
    run.resume(late, [])
    found = run.audit()
    assert found.holds and (found.trained, found.steps) == (2, 1)


def test_the_story_of_a_prompt_has_its_lags_and_scores_and_says_what_was_undone(run):
    run.issue(0, prompt=7)
    run.answer(0, replica=1, since=2)
    run.score(0, scores=(0.25, math.nan))
    position = run.ledger.position
    run.train(0, step=3, oldest=2, members=[0], made=False)
    run.resume(position, [0])
    run.train(0, step=3, oldest=2, members=[0], made=False)
    run.ledger.settle()
    told = [line.split("  ", 1)[1] for line in story(open_ledger(run.path), 0, 7)]
    trained = "sample 0 trained in step 3 at version 3, tokens of versions 2 to 3 (lag 1), reward 0.5"
    assert told == [
        "group 0 issued for step 0",
        "rollout1, serving version 2, answers samples 0 1",
        "scores 0.25 none",
        f"{trained}  [undone by a resume]",
        trained,
    ]
    assert story(open_ledger(run.path), 0, 8) == []


def test_a_missing_and_a_damaged_ledger_are_refused_by_name(tmp_path):
    with pytest.raises(LedgerError, match=r"there is no ledger .*ledger\.sqlite"):
        open_ledger(tmp_path / "ledger.sqlite")
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite is damaged or no ledger"):
        open_ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(LedgerError, match=r"cannot write the ledger"):
        Ledger(tmp_path / "ledger.sqlite")
