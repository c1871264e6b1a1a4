"""What a critic rank reads of the dock and writes to it."""

import itertools

import numpy as np
import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.records import PromptRow
from mindspeed_asyncflow.workflow.critic_worker import CriticWorker
from mindspeed_asyncflow.workflow.train_worker import ChunkRules
from tests.workflow.critic_engine import FakeCritic, serving
from tests.workflow.partial_engine import QUIET

LENGTHS, REWARDS = [3, 1, 2], [1.0, 0.0, 0.5]
names = itertools.count()


@pytest.fixture(scope="module")
def dock():
    with serving() as client:
        yield client


@pytest.fixture(scope="module")
def kl_dock():
    with serving(kl=True) as client:
        yield client


def scored(dock, finish=(0, 0, 0), mask=None, kl=False):
    """One group of answers to a prompt of two tokens, claimed for the critic."""
    part, count = f"part {next(names)}", len(LENGTHS)
    dock.put_groups(part, [[PromptRow(4, m, count, np.array([1, 2], np.int32), "x") for m in range(count)]])
    got = dock.claim("rollout", count, partition=part, worker="w", unit="rows", timeout_s=0.0)
    order = np.argsort(got.members)
    values = {
        "response_ids": [np.arange(n, dtype=np.int32) for n in LENGTHS],
        "rollout_logprobs": [np.full(n, -1.0, np.float32) for n in LENGTHS],
        "response_spans": [np.array([[0, 0, 1], [3, 1, n]], np.int32) for n in LENGTHS],
        "finish": np.array(finish, np.uint8),
    }
    if mask is not None:
        values["response_mask"] = [np.array(m, np.uint8) for m in mask]
    dock.write(got.rows[order], values, claim_id=got.claim_id, versions=([0] * count, [3] * count), done=True)
    if kl:
        ref = dock.claim("reference", count, partition=part, worker="r", unit="rows", timeout_s=0.0)
        of_members = [np.full(LENGTHS[m], -1.5, np.float32) for m in ref.members]
        dock.write(ref.rows, {"ref_logprobs": of_members}, claim_id=ref.claim_id, done=True)
    got = dock.claim("reward", count, partition=part, worker="s", unit="rows", timeout_s=0.0)
    rewards = np.array([REWARDS[m] for m in got.members], np.float32)
    dock.write(got.rows, {"score": rewards, "reward": rewards}, claim_id=got.claim_id, done=True)
    claim = dock.claim("value", 1, partition=part, worker="c", unit="groups", timeout_s=0.0)
    rows = claim.rows[np.argsort(claim.members)].tolist()
    return part, claim.claim_id, rows


def worker(dock, engine, **algorithm):
    sections = {"algorithm": {"advantage": "gae"} | {k: v for k, v in algorithm.items() if k != "how"}}
    config = Config.model_validate(sections)
    how = {"replica": 0, "leads": True} | algorithm.get("how", {})
    return CriticWorker(engine, dock, config.algorithm, name="critic0", tracer=QUIET, **how)


def groups_of(rows):
    return {row: (4, member) for member, row in enumerate(rows)}


def test_values_stand_before_the_token_that_they_speak_of_and_advantages_follow(dock):
    part, claim, rows = scored(dock)
    critic = worker(dock, FakeCritic(), gamma=0.5, gae_lambda=0.0)
    critic.value(claim, [[[rows[0], rows[2]], [rows[1]]]], groups_of(rows))
    dock.done(claim)
    read = dock.read(np.array(rows), ["values", "token_advantages", "returns"])
    np.testing.assert_allclose(read["values"][0], [0.1, 0.2, 0.3])  # the last prompt token is at position 1
    np.testing.assert_allclose(read["token_advantages"][0], [0.5 * 0.2 - 0.1, 0.5 * 0.3 - 0.2, 1 - 0.3], atol=1e-6)
    np.testing.assert_allclose(read["returns"][0], [0.1, 0.15, 1.0], atol=1e-6)
    np.testing.assert_allclose(read["token_advantages"][1], [-0.1], atol=1e-6)
    claimed = dock.claim("train", 1, partition=part, worker="t", unit="groups", timeout_s=0.0)
    assert sorted(claimed.rows.tolist()) == sorted(rows), "they may be trained now"


def test_the_kl_is_taken_off_token_by_token(kl_dock):
    _, claim, rows = scored(kl_dock, kl=True)
    critic = worker(kl_dock, FakeCritic(), kl_coef=0.1, kl_in="reward", kl_type="k1")
    critic.value(claim, [[rows]], groups_of(rows))
    read = kl_dock.read(np.array(rows), ["returns"])
    np.testing.assert_allclose(read["returns"][0], [0.85, 0.9, 0.95], atol=1e-6)


def test_tokens_of_an_environment_have_no_value_and_are_stepped_over(dock):
    """B41: the token before the environment's is followed by the one after it."""
    _, claim, rows = scored(dock, mask=[[1, 0, 1], [1], [1, 0]])
    engine = FakeCritic()
    critic = worker(dock, engine, gamma=0.5, gae_lambda=0.0, how={"conversations": True})
    critic.value(claim, [[rows]], groups_of(rows))
    read = dock.read(np.array(rows), ["values", "token_advantages"])
    np.testing.assert_allclose(read["values"][0], [0.1, 0, 0.3])
    np.testing.assert_allclose(read["token_advantages"][0], [0.5 * 0.3 - 0.1, 0, 0.7], atol=1e-6)
    np.testing.assert_allclose(read["token_advantages"][2], [0.5 - 0.1, 0], atol=1e-6)
    critic.train([[rows]], dict.fromkeys(rows, (0, 3)), groups_of(rows), ChunkRules(3))
    assert engine.trained[0].num_valid_tokens == 2 + 1 + 1


def test_only_the_leader_of_a_replica_writes_and_each_replica_its_own_rows(dock):
    _, claim, rows = scored(dock)
    engines = [FakeCritic() for _ in range(3)]
    plan = [[[rows[0], rows[1]], []], [[rows[2]], []]]
    followers = worker(dock, engines[0], how={"leads": False})
    followers.value(claim, plan, groups_of(rows))
    for replica in (0, 1):
        worker(dock, engines[1 + replica], how={"replica": replica}).value(claim, plan, groups_of(rows))
    assert engines[0].asked == engines[1].asked == [[rows[0], rows[1]], []] and engines[2].asked == [[rows[2]], []]
    dock.done(claim)
    assert [len(v) for v in dock.read(np.array(rows), ["values"])["values"]] == LENGTHS


def test_the_critic_trains_on_the_tokens_of_the_policy(dock):
    """Neither on those that are too old nor on answers that were cut off; a replica without rows joins in."""
    _, claim, rows = scored(dock, finish=(0, 0, 1))
    engine = FakeCritic()
    critic = worker(dock, engine, mask_truncated=True)
    critic.value(claim, [[rows]], groups_of(rows))
    rules = ChunkRules(version=3, oldest_allowed=2)
    report = critic.train([[rows]], dict.fromkeys(rows, (0, 3)), groups_of(rows), rules)
    batch = engine.trained[0]
    assert report.sums == {"critic/tokens_count": 2.0}  # the two newer tokens of the first answer
    at = np.flatnonzero(batch.loss_mask)
    np.testing.assert_allclose(batch.values[at], [0.2, 0.3], atol=1e-6)
    np.testing.assert_allclose(batch.returns[at], [1.0, 1.0], atol=1e-6)
    empty = worker(dock, engine, how={"replica": 1})
    assert empty.value(claim, [[rows], [[]]], groups_of(rows)) >= 0
    assert empty.train([[rows], [[]]], {}, {}, rules).sums == {"critic/tokens_count": 0.0}
    assert critic.finish(4, 2).optim.applied and engine.denominators == [2.0]
