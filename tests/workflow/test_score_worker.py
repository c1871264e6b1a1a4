"""Scores to rewards and advantages, in the columns of the dock."""

import contextlib
import itertools

import numpy as np
import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.records import PromptRow
from mindspeed_asyncflow.rewards.pool import Score
from mindspeed_asyncflow.workflow.score_worker import ScoreWorker
from mindspeed_asyncflow.workflow.train_worker import ChunkRules, TrainWorker
from mindspeed_asyncflow.workflow.workers import RowBatch
from tests.workflow.partial_engine import QUIET

LENGTHS = [3, 5, 2, 4]
names = itertools.count()


class Fixed:
    """Gives these scores and remembers what it was asked."""

    def __init__(self, scores) -> None:
        self.scores, self.asked = scores, []

    def score(self, answers):
        self.asked += answers
        return [Score(v, "" if v is not None else "abstained") for v in self.scores]


@contextlib.contextmanager
def serving(token_level):
    tasks = grpo_tasks(token_level, kl_in_reward=token_level, token_level=token_level)
    with (
        DockServer(GRPO_COLUMNS, tasks, arena_mb=2, lease_s=30.0, secret="s") as server,
        DockClient(server.address, "s", wait_s=5.0) as client,
    ):
        client.token_level = token_level
        yield client


@pytest.fixture(scope="module")
def dock():
    with serving(token_level=False) as client:
        yield client


@pytest.fixture(scope="module")
def token_dock():
    """Advantages of tokens, with the KL to a reference in the reward."""
    with serving(token_level=True) as client:
        yield client


def answered(dock, lengths=LENGTHS, finish=None, mask=None):
    """One group of rows with answers, claimed for scoring."""
    name, count = f"part {next(names)}", len(lengths)
    rows = [
        PromptRow(7, m, count, np.array([1, 2], np.int32), "42", fields='{"prompt": "6 x 7?"}') for m in range(count)
    ]
    dock.put_groups(name, [rows])
    got = dock.claim("rollout", count, partition=name, worker="w", unit="rows", timeout_s=0.0)
    values = {
        "response_ids": [np.arange(n, dtype=np.int32) for n in lengths],
        "rollout_logprobs": [np.full(n, -1.0, np.float32) for n in lengths],
        "response_spans": [np.array([[0, 0, n]], np.int32) for n in lengths],
        "finish": np.zeros(count, np.uint8) if finish is None else np.array(finish, np.uint8),
    }
    if mask is not None:
        values["response_mask"] = [np.array(m, np.uint8) for m in mask]
    dock.write(got.rows, values, claim_id=got.claim_id, versions=([0] * count, [0] * count), done=True)
    if dock.token_level:
        got = dock.claim("reference", count, partition=name, worker="r", unit="rows", timeout_s=0.0)
        ref = [np.full(n, -1.5, np.float32) for n in lengths]
        dock.write(got.rows, {"ref_logprobs": ref}, claim_id=got.claim_id, done=True)
    claim = dock.claim("reward", 1, partition=name, worker="s", unit="groups", timeout_s=0.0)
    return name, RowBatch(claim.rows, claim.group_ids, claim.members), claim.claim_id


def settings(**sections):
    return Config.model_validate({"rollout": {"max_new_tokens": 5}} | sections)


def score(dock, config, scores, **how):
    name, batch, claim = answered(dock, **how)
    pool = Fixed(scores)
    worker = ScoreWorker(pool, dock, lambda ids: ["x"] * len(ids), config, name="s", tracer=QUIET)
    return name, batch, pool, worker.score(claim, batch)


def test_scorers_see_the_answer_with_its_prompt_and_columns(dock):
    _, _, pool, _ = score(dock, settings(), [1.0, 0.0, 0.0, 0.0], finish=[0, 1, 0, 0])
    first, second = pool.asked[:2]
    assert (first.text, first.truth, first.prompt, first.tokens, first.finished) == ("x", "42", "6 x 7?", 3, True)
    assert first.fields == {"prompt": "6 x 7?"} and not second.finished


def test_long_answers_are_punished_in_the_reward_and_not_in_the_score(dock):
    """B21: whatever the length of the prompt"""
    config = settings(reward={"overlong_buffer": 2, "overlong_factor": 0.5}, algorithm={"advantage": "dr_grpo"})
    _, batch, _, report = score(dock, config, [1.0, 1.0, 1.0, 1.0])
    read = dock.read(batch.rows, ["score", "reward", "advantage"])
    assert read["score"].tolist() == [1, 1, 1, 1] and report.scores == (1, 1, 1, 1)
    assert read["reward"].tolist() == [1, 0.5, 1, 0.75]
    np.testing.assert_allclose(read["advantage"], np.array([1, 0.5, 1, 0.75]) - 0.8125)


def test_groups_are_flat_by_their_scores_whatever_is_punished(dock):
    config = settings(reward={"overlong_buffer": 2}, algorithm={"dynamic_sampling": True})
    _, _, _, report = score(dock, config, [1.0, 1.0, 1.0, 1.0])
    assert report.flat == (7,)


def test_the_kl_of_each_token_is_taken_off_and_returns_are_summed_to_the_end(token_dock):
    config = settings(algorithm={"advantage": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward", "kl_type": "k1"})
    _, batch, _, _ = score(token_dock, config, [1.0, 0.0, 1.0, 0.0])
    read = token_dock.read(batch.rows, ["reward", "token_advantages"])
    np.testing.assert_allclose(read["reward"], [1 - 0.15, -0.25, 1 - 0.1, -0.2], atol=1e-6)
    np.testing.assert_allclose(read["token_advantages"][0], [0.85, 0.9, 0.95], atol=1e-6)
    np.testing.assert_allclose(read["token_advantages"][2], [0.9, 0.95], atol=1e-6)


def test_of_a_conversation_the_last_turn_is_scored_and_all_turns_are_a_field(dock):
    config = settings(turns={"environment": "calculator"})
    masks = [[1, 0, 1], [1] * 5, [1, 1], [1, 0, 0, 1]]
    _, batch, claim = answered(dock, lengths=[3, 5, 2, 4], mask=masks)
    pool = Fixed([1.0, 0.0, 1.0, 0.0])

    def words(texts):
        return [" ".join(str(int(i)) for i in ids) for ids in texts]

    ScoreWorker(pool, dock, words, config, name="s", tracer=QUIET).score(claim, batch)
    assert [a.text for a in pool.asked] == ["2", "0 1 2 3 4", "0 1", "3"]
    assert pool.asked[3].fields["turns"] == [
        {"role": "assistant", "text": "0"},
        {"role": "environment", "text": "1 2"},
        {"role": "assistant", "text": "3"},
    ]


def test_tokens_of_an_environment_have_no_part_in_the_kl(token_dock):
    config = settings(
        algorithm={"advantage": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward", "kl_type": "k1"},
        turns={"environment": "calculator"},
    )
    mask = [[1, 0, 1], [1, 1, 1, 1, 1], [1, 0], [1, 1, 1, 1]]
    _, batch, _, _ = score(token_dock, config, [1.0, 0.0, 1.0, 0.0], mask=mask)
    read = token_dock.read(batch.rows, ["reward", "token_advantages"])
    np.testing.assert_allclose(read["reward"], [1 - 0.1, -0.25, 1 - 0.05, -0.2], atol=1e-6)
    np.testing.assert_allclose(read["token_advantages"][2], [0.95, 0.0], atol=1e-6)


class Recording:
    def __init__(self) -> None:
        self.batches = []

    def forward_backward(self, micro_batches):
        self.batches += micro_batches
        return {"actor/tokens_count": sum(b.num_valid_tokens for b in micro_batches)}


def train(dock, config, scores, rules=None, **how):
    """What a trainer rank packs of the scored rows, and the moments that it finds."""
    name, *_ = score(dock, config, scores, **how)
    claim = dock.claim("train", 1, partition=name, worker="t", unit="groups", timeout_s=0.0)
    rows = claim.rows.tolist()
    engine = Recording()
    worker = TrainWorker(
        engine, dock, config.algorithm, config.correction, name="t", replica=0, publisher=None, tracer=QUIET,
        conversations=config.turns.environment is not None,
    )  # fmt: skip
    rules = rules or ChunkRules(3)
    tokens, rewards = worker.moments(rows, rules)
    order = np.argsort(claim.members)
    plan = [[[rows[i] for i in order]]]
    report = worker.train(
        plan, dict.fromkeys(rows, (0, 0)), {r: (7, int(m)) for r, m in zip(rows, claim.members)}, rules
    )
    return engine.batches[0], tokens, rewards, report


def test_moments_count_trained_tokens_and_advantages_are_moved_by_them(dock):
    """B20: tokens that are cut off, or that an environment wrote, are not counted."""
    config = settings(
        algorithm={"advantage": "reinforce_pp_baseline", "mask_truncated": True}, turns={"environment": "calculator"}
    )
    mask = [[1, 0, 1], [1] * 5, [1, 0], [1] * 4]
    batch, tokens, rewards, report = train(
        dock, config, [1.0, 0.0, 0.0, 1.0], ChunkRules(3, shift=0.25, factor=2.0), mask=mask, finish=[0, 1, 0, 0]
    )
    assert tokens.count == 2 + 1 + 4 and rewards.count == 4 and rewards.mean == 0.5
    assert tokens.mean == pytest.approx((0.5 * 2 - 0.5 + 0.5 * 4) / 7)
    assert batch.loss_mask[batch.sample_index == 1].sum() == 0 and batch.num_valid_tokens == 7
    assert set(batch.advantages[batch.loss_mask > 0].tolist()) == {0.5, -1.5}
    assert len(report.oldest_trained) == 3 and report.masked_tokens == 0  # none is too old


def test_the_trainer_gets_lags_where_the_mathematics_asks_for_them(dock):
    plain, *_ = train(dock, settings(), [1.0, 0.0, 0.0, 1.0])
    assert plain.lags is None
    by_lag, *_ = train(dock, settings(algorithm={"proximal": "log_linear"}), [1.0, 0.0, 0.0, 1.0])
    assert set(by_lag.lags[by_lag.loss_mask > 0].tolist()) == {3.0}


def test_token_advantages_are_packed_token_by_token(token_dock):
    config = settings(algorithm={"advantage": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward", "kl_type": "k1"})
    batch, tokens, *_ = train(token_dock, config, [1.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(batch.advantages[batch.sample_index == 2][1:], [0.9, 0.95], atol=1e-6)
    assert tokens.count == sum(LENGTHS) and batch.ref_logprobs is None
