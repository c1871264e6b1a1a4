"""Answers in which an environment replies: ids, masks, spans and budgets, whatever happens in between."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from mindspeed_asyncflow.config.schema import AlgorithmConfig, Config, RolloutConfig, TurnsConfig
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.environments.base import MODEL, REPLY, Turn
from mindspeed_asyncflow.environments.pool import EnvironmentPool, Reply
from mindspeed_asyncflow.errors import DeadlineExceeded, EngineError
from mindspeed_asyncflow.records import GenRequest, PromptRow, SamplingSpec, VersionSpan
from mindspeed_asyncflow.rewards.pool import Score
from mindspeed_asyncflow.workflow.conversing import Tally, turns_of
from mindspeed_asyncflow.workflow.score_worker import ScoreWorker
from mindspeed_asyncflow.workflow.train_worker import ChunkRules, TrainWorker
from mindspeed_asyncflow.workflow.workers import RolloutWorker, RowBatch
from tests.engines.bench import VOCAB, make_engine, make_model
from tests.engines.megatron.rank_group import RankGroup
from tests.workflow import turn_gradients
from tests.workflow.partial_engine import BASE, QUIET, Replica, manifest
from tests.workflow.turn_engine import EOS, WRITTEN, Partner, conversation, turn_engine

W = WRITTEN


@pytest.fixture
def engine():
    made = turn_engine()
    yield made
    made.close()


def request(name: str, length: int, budget: int = 40) -> GenRequest:
    return GenRequest(name, np.array([length, 1], np.int32), SamplingSpec(budget), seed=7)


def talk(engine, requests, partner, *, timeout_s=5.0, stopped=lambda: False, **how):
    """(answers by request id, tally) of whole conversations."""
    tally = Tally()
    rows = [(f"truth {r.request_id}", {"prompt": "p"}) for r in requests]
    answers = conversation(partner, **how).answers(
        engine, requests, rows, timeout_s=timeout_s, stopped=stopped, tally=tally
    )
    return {a.request_id: a for a in answers}, tally


@pytest.mark.parametrize("in_rounds", [True, False])
def test_sampled_ids_stay_as_they_are_and_replies_are_masked(engine, in_rounds):
    """B28, B32: the EOS of every turn is kept and trained, replies are not, and ids are never encoded again."""
    partner = Partner()
    answers, tally = talk(engine, [request("a", 3)], partner, in_rounds=in_rounds)
    a = answers["a"]
    assert a.token_ids.tolist() == [10, 11, EOS, W, W + 1, 15, 16, EOS, W, W + 1, 20, 21, EOS]
    assert a.mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1] and a.sampled == 9
    assert a.logprobs[a.mask == 0].tolist() == [0.0] * 4 and (a.logprobs[a.mask == 1] < 0).all()
    assert a.spans == (VersionSpan(0, 0, 13),) and a.finish_reason == "stop"
    assert (tally.turns, tally.replies) == ([3], 2)
    truth, turns, fields = partner.asked[-1]
    assert (truth, fields) == ("truth a", {"prompt": "p"})
    assert turns == [Turn(MODEL, "10 11"), Turn(REPLY, "ok"), Turn(MODEL, "15 16")]


def test_the_budget_is_that_of_the_whole_row():
    """A turn that it cuts ends by length; a reply that leaves no token for the model is not taken."""
    engine = turn_engine()
    try:
        answers, tally = talk(engine, [request("cut", 4, 8), request("full", 3, 5), request("just", 3, 6)], Partner())
    finally:
        engine.close()
    assert answers["cut"].token_ids.tolist() == [10, 11, 12, EOS, W, W + 1, 16, 17]
    assert answers["full"].token_ids.tolist() == [10, 11, EOS]
    assert answers["just"].token_ids.tolist() == [10, 11, EOS, W, W + 1, 15]
    assert {a.finish_reason for a in answers.values()} == {"length"}
    assert tally.cut == 1 and sorted(tally.turns) == [1, 2, 2]


def test_nothing_more_is_said_when_the_environment_ends_it_fails_or_has_no_words(engine):
    says = {"10": None, "10 11": Reply(None, "it broke"), "10 11 12": ""}
    answers, tally = talk(
        engine, [request(n, int(n)) for n in "234"], Partner(lambda turns: says[turns[-1].text]), max_turns=9
    )
    assert [len(answers[n].token_ids) for n in "234"] == [2, 3, 4]
    assert all(a.finish_reason == "stop" and a.mask.all() for a in answers.values())
    assert (tally.failures, tally.replies, tally.turns) == (1, 0, [1, 1, 1])


def test_a_reply_that_the_template_shows_otherwise_is_counted(engine):
    _, tally = talk(engine, [request("a", 2)], Partner(lambda turns: "drift"), max_turns=2)
    assert tally.drifted == 1


def test_one_slow_reply_holds_nobody_up_but_in_rounds_everybody(engine):
    for in_rounds in (False, True):
        partner = Partner(held=["truth slow"])
        requests = [request("slow", 2), *(request(f"r{i}", 3) for i in range(4))]
        tally = Tally()
        rows = [(f"truth {r.request_id}", {}) for r in requests]
        answers = conversation(partner, in_rounds=in_rounds).answers(
            engine, requests, rows, timeout_s=5.0, stopped=lambda: False, tally=tally
        )
        if in_rounds:
            timer = threading.Timer(0.05, partner.release)
            timer.start()
            assert {a.request_id for a in answers} == {r.request_id for r in requests}
            rounds = [len(turns) for _, turns, _ in partner.asked]
            assert rounds == sorted(rounds), "somebody was a round ahead"
        else:
            assert {next(answers).request_id for _ in range(4)} == {f"r{i}" for i in range(4)}
            partner.release()
            assert next(answers).request_id == "slow"
            assert next(answers, None) is None


def test_rounds_give_the_engine_the_same_batches_in_any_order_of_replies(engine):
    """B83: repeatable bit for bit at lag 0."""

    class Late(Partner):
        def __init__(self, delays):
            super().__init__()
            self.delays = delays

        def ask(self, turns, truth, fields):
            future = super().ask(turns, truth, fields)
            late = type(future)()
            threading.Timer(self.delays[int(truth[-1])], lambda: late.set_result(future.result())).start()
            return late

    seen = []
    backend = engine._backend
    for delays in ((0.0, 0.02, 0.01), (0.02, 0.0, 0.01)):
        backend.requests.clear()
        answers, _ = talk(engine, [request(str(i), 2 + i) for i in range(3)], Late(delays), in_rounds=True)
        batches = [(r.request_id, 0 if r.resume_ids is None else len(r.resume_ids), r.seed) for r in backend.requests]
        seen.append((batches, {n: a.token_ids.tolist() for n, a in answers.items()}))
    assert seen[0] == seen[1]


def test_new_weights_between_and_inside_turns_are_in_the_spans(engine):
    """B31: ids, mask, log-probs and versions have one length; a reply has the version of the turn before."""
    backend = engine._backend

    def says(turns):
        engine.update(manifest(len(turns)))  # versions 1 and 3, while nothing is sampled
        return "ok"

    answers, _ = talk(engine, [request("a", 2)], Partner(says))
    a = answers["a"]
    assert a.token_ids.tolist() == [10, EOS, W, W + 1, BASE + 14, EOS, W, W + 1, 3 * BASE + 18, EOS]
    assert a.spans == (VersionSpan(0, 0, 4), VersionSpan(1, 4, 8), VersionSpan(3, 8, 10))
    assert len(a.mask) == len(a.logprobs) == len(a.token_ids) and a.fingerprint == "of 3"
    backend.permits = 5  # one token into the second turn
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(talk, engine, [request("b", 4)], Partner(), max_turns=2)
        Replica.until(lambda: backend.permits == 0)
        engine.update(manifest(4))
        backend.permits = None
        b = running.result(5)[0]["b"]
    assert b.spans == (VersionSpan(3, 0, 7), VersionSpan(4, 7, 10))


def test_who_drops_the_answers_leaves_nothing_running(engine):
    partner = Partner(held=["truth a"])
    requests = [request("a", 2), request("b", 30)]
    answers = conversation(partner).answers(
        engine, requests, [("truth a", {}), ("", {})], timeout_s=5.0, stopped=lambda: False, tally=Tally()
    )
    engine._backend.permits = 5
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(next, answers, None)
        assert partner.waits.wait(5)
        engine._backend.permits = None
        assert running.result(5).request_id == "b"
    answers.close()
    partner.release()
    assert not engine._backend.rows and not [t for t in threading.enumerate() if t.name == "turns" and t.is_alive()]


def test_an_environment_that_never_replies_ends_at_the_deadline_of_the_rollout(engine):
    with pytest.raises(DeadlineExceeded, match="1 conversations wait for a reply of the environment"):
        talk(engine, [request("a", 2)], Partner(held=["truth a"]), timeout_s=0.1)


def test_a_broken_engine_is_told_to_the_caller(engine):
    def says(turns):
        engine.close()
        return "ok"

    with pytest.raises(EngineError):
        talk(engine, [request("a", 2)], Partner(says))


def test_turns_of_an_answer_are_cut_at_its_mask():
    ids, mask = np.array([5, EOS, 7, 8, 6], np.int32), np.array([1, 1, 0, 0, 1], np.uint8)

    def words(texts):
        return [" ".join(str(i) for i in ids.tolist() if i != EOS) for ids in texts]

    assert turns_of(ids, mask, words) == [Turn(MODEL, "5"), Turn(REPLY, "7 8"), Turn(MODEL, "6")]


@pytest.fixture(scope="module")
def dock():
    with (
        DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=2, lease_s=30.0, secret="s") as server,
        DockClient(server.address, "s", wait_s=5.0) as client,
    ):
        yield client


def worker_of(engine, dock, partner, **how) -> RolloutWorker:
    talks = conversation(partner, **how)
    return RolloutWorker(
        engine, dock, SamplingSpec(40), name="rollout0", seed=0, commit_groups=1, timeout_s=5.0, tracer=QUIET,
        conversation=talks,
    )  # fmt: skip


def claim_of(dock, name: str):
    prompt = np.array([3, 1], np.int32)
    dock.put_groups(name, [[PromptRow(0, m, 2, prompt, "t", fields='{"prompt": "p"}') for m in range(2)]])
    return dock.claim("rollout", 2, partition=name, worker="w", unit="rows", policy="oldest", timeout_s=0.0)


def test_masks_are_in_the_dock_and_the_report_tells_of_the_turns(engine, dock):
    partner = Partner()
    claim = claim_of(dock, "whole")
    worker = worker_of(engine, dock, partner)
    report = worker.generate(claim.claim_id, RowBatch(claim.rows, claim.group_ids, claim.members))
    assert (report.samples, report.tokens, report.unfinished) == (2, 18, ())
    assert report.conversations.turns == [3, 3] and report.conversations.replies == 4
    assert partner.asked[0][::2] == ("t", {"prompt": "p"})
    columns = dock.read(claim.rows, ["response_ids", "response_mask", "response_spans"])
    for ids, mask, spans in zip(*columns.values()):
        assert np.asarray(mask).tolist() == (np.asarray(ids) < W).astype(int).tolist()
        assert np.asarray(spans).tolist() == [[0, 0, 13]]


def test_a_stop_in_the_middle_gives_the_rows_back_and_they_start_again(engine, dock):
    """One row is at the environment, one in the engine; neither leaves a part behind."""
    partner = Partner(held=["t"])
    claim = claim_of(dock, "stopped")
    worker = worker_of(engine, dock, partner)
    engine._backend.permits = 2
    batch = RowBatch(claim.rows, claim.group_ids, claim.members)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(worker.generate, claim.claim_id, batch)
        Replica.until(lambda: engine._backend.permits == 0)
        engine._backend.permits = None
        assert partner.waits.wait(5)
        stopping = pool.submit(worker.stop)
        Replica.until(lambda: bool(worker._stopped))
        partner.release()
        report = running.result(5)
        stopping.result(5)
    assert report.samples == 0 and sorted(report.unfinished) == sorted(claim.rows.tolist())
    again = dock.claim("rollout", 2, partition="stopped", worker="w", unit="rows", policy="oldest", timeout_s=0.0)
    report = worker.generate(again.claim_id, RowBatch(again.rows, again.group_ids, again.members))
    assert report.samples == 2 and report.conversations.turns == [3, 3]


# -- through the dock into the trainer ---------------------------------------------------------------------------------


class Recording:
    """A training engine that remembers what it gets."""

    def __init__(self) -> None:
        self.batches = []

    def forward_backward(self, micro_batches):
        self.batches += micro_batches
        return {}


class Uneven:
    def score(self, answers):
        return [Score(float(i)) for i in range(len(answers))]


@pytest.mark.slow
def test_what_the_environment_wrote_gives_no_gradient_from_engine_to_trainer(dock, tmp_path):
    """B28, B32: real reference engine, environment processes, dock, scorer, packing and trainer."""
    folder, longest = make_model(tmp_path / "model", "dense", 0), 24
    engine = make_engine("reference", folder, RolloutConfig(engine="reference"))
    turns = TurnsConfig(environment="python:tests.environments.samples:Counter", max_turns=3)
    spec = SamplingSpec(longest, stop_token_ids=tuple(range(3, VOCAB, 5)))
    pool = EnvironmentPool(turns)
    worker = RolloutWorker(
        engine, dock, spec, name="r", seed=5, commit_groups=1, timeout_s=60.0, tracer=QUIET,
        conversation=conversation(pool, in_rounds=True, first=10),
    )  # fmt: skip
    columns = ["prompt_ids", "response_ids", "response_mask", "rollout_logprobs"]
    seen = []
    try:
        for name in ("once", "twice"):
            claim = claim_of(dock, name)
            worker.generate(claim.claim_id, RowBatch(claim.rows, claim.group_ids, claim.members))
            seen.append({k: [np.array(x) for x in v] for k, v in dock.read(claim.rows, columns).items()})
        answers = zip(*(seen[1][name] for name in columns))
        for prompt, ids, mask, logprobs in answers:  # the engine's own view of the whole answer
            again = engine.score([(prompt, ids)])[0]
            np.testing.assert_allclose(again[mask == 1], logprobs[mask == 1], atol=1e-4)
    finally:
        engine.close()
        pool.close()
    for name in columns:
        assert all(np.array_equal(a, b) for a, b in zip(seen[0][name], seen[1][name])), "not repeatable"
    config = Config(turns=turns, algorithm=AlgorithmConfig(group_size=2))
    scored = dock.claim("reward", 1, partition="twice", worker="s", unit="groups", timeout_s=0.0)
    scorer = ScoreWorker(Uneven(), dock, lambda texts: [""] * len(texts), config, name="s", tracer=QUIET)
    scorer.score(scored.claim_id, RowBatch(scored.rows, scored.group_ids, scored.members))
    recording = Recording()
    trainer = TrainWorker(
        recording, dock, config.algorithm, name="t", replica=0, publisher=None, tracer=QUIET, conversations=True
    )
    rows = claim.rows.tolist()
    trainer.train([[rows]], dict.fromkeys(rows, (0, 0)), {r: (0, i) for i, r in enumerate(rows)}, ChunkRules(0))
    (batch,) = recording.batches
    sampled = np.concatenate(seen[1]["response_mask"])
    assert (written := int((sampled == 0).sum())) > 0 and batch.num_valid_tokens == sampled.sum()
    answer = np.zeros(len(batch.targets), bool)
    for end, ids in zip(batch.cu_seqlens[1:], seen[1]["response_ids"]):
        answer[end - len(ids) : end] = True
    masked = answer & (batch.loss_mask == 0)
    assert masked.sum() == written
    other = replace(batch, targets=np.where(masked, (batch.targets + 1) % VOCAB, batch.targets))
    unmasked = replace(batch, loss_mask=answer.astype(np.float32), advantages=answer.astype(np.float32))
    group = RankGroup(1)
    try:
        true, replaced, all_trained = group.run(
            turn_gradients.gradients, folder=folder, batches=[batch, other, unmasked]
        )[0]
    finally:
        group.close()
    assert any(np.abs(g).max() > 0 for g in true.values())
    assert all(np.array_equal(true[n], replaced[n]) for n in true)
    assert any(not np.allclose(true[n], all_trained[n]) for n in true)
