"""The critic's loop and its steps, in the real loops over fake engines."""

import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import EngineError
from tests.workflow.critic_engine import FakeCritic
from tests.workflow.fakes import FakePool, FakeTrain, prompts_of, run_loops
from tests.workflow.test_run import metrics_of


def config(steps=4, max_lag=0, group_size=2, **more):
    sections = {
        "trainer": {"steps": steps},
        "algorithm": {"advantage": "gae", "group_size": group_size},
        "workflow": {"groups_per_step": 4, "max_lag": max_lag, "watchdog_s": 5.0},
        "rollout": {"max_new_tokens": 2},
    }
    for name, values in more.items():
        sections.setdefault(name, {}).update(values)
    return Config.model_validate(sections)


def versions(critic, step, rows=8):
    """Versions of the critic that valued what it trained as batch number `step`."""
    batches = critic.trained
    seen, found = 0, set()
    for batch in batches:
        at = batch.positions / 10
        if step * rows <= seen < (step + 1) * rows:
            found |= {round(float(v)) for v, p, m in zip(batch.values, at, batch.loss_mask) for v in [v - p] if m}
        seen += int((batch.rows >= 0).sum())
    return found


@pytest.mark.parametrize("group_size", [1, 2])
def test_without_lag_a_step_is_valued_by_the_critic_that_the_step_before_has_left(tmp_path, group_size):
    """One answer per prompt is enough: no group is compared."""
    critics = [FakeCritic(), FakeCritic()]
    out = run_loops(config(group_size=group_size), tmp_path, prompts_of(100, 4), critics=critics)
    rows = 4 * group_size
    assert [versions(critics[0], step, rows) for step in range(4)] == [{0}, {1}, {2}, {3}]
    assert critics[0].asked == critics[1].asked, "all ranks do the same in the same order"
    assert critics[0].denominators == out.train.denominators[:4] == [2.0 * rows] * 4
    assert (out.run.window.trained, out.run.window.open, out.dock_used_bytes) == (4 * rows, 0, 0)


def test_without_lag_chunks_of_values_are_the_same_in_every_run(tmp_path):
    def asked(folder):
        critic = FakeCritic()
        run_loops(config(trainer={"stream_groups": 2}), folder, prompts_of(100, 4), critics=[critic])
        return [len(rows) for rows in critic.asked]

    assert asked(tmp_path / "a") == asked(tmp_path / "b") == [4] * 8


@pytest.mark.parametrize("update", ["delayed", "in_flight"])
def test_with_lag_the_critic_values_and_trains_everything_once(tmp_path, update):
    critic = FakeCritic()
    settings = config(steps=6, max_lag=2, workflow={"update": update}, algorithm={"whiten": False})
    out = run_loops(settings, tmp_path, prompts_of(100, 4), critics=[critic])
    assert sorted(r for b in critic.trained for r in b.rows.tolist()) == sorted(r for s in out.train.rows for r in s)
    assert out.run.window.trained == 48 and critic.denominators == [16.0] * 6


def test_groups_without_a_score_are_not_waited_for(tmp_path):
    pool = FakePool()
    pool.silent_truths = {"1", "6", "7"}
    critic = FakeCritic()
    out = run_loops(config(), tmp_path, prompts_of(100, 4), critics=[critic], pool=pool)
    assert out.run.window.dropped["unscored"] == 6 and critic.denominators == [12.0, 8.0, 16.0, 16.0]


def test_in_the_first_steps_only_the_critic_learns(tmp_path):
    critic, train = FakeCritic(), FakeTrain()
    settings = config(critic={"warmup_steps": 2})
    out = run_loops(settings, tmp_path, prompts_of(100, 4), critics=[critic], train=train)
    assert train.denominators == [0.0, 0.0, 16.0, 16.0] and critic.denominators == [16.0] * 4
    assert out.run.window.version == 4


def test_metrics_tell_of_the_critic(tmp_path):
    run_loops(config(), tmp_path, prompts_of(100, 4), critics=[FakeCritic()])
    for row in metrics_of(tmp_path):
        assert row["critic/grad_norm"] == 0.5 and row["critic/lr"] == 0.01 and row["critic/tokens_count"] == 16
        assert row["timing_s/values"] > 0


def test_bad_gradients_of_the_critic_stop_the_run_with_the_tensor_named(tmp_path):
    """B26"""
    critic = FakeCritic()
    critic.bad_from = 1
    settings = config(steps=8, trainer={"max_bad_steps": 3})
    with pytest.raises(EngineError, match=r"critic's gradient of value_head.weight .* 3 steps in a row"):
        run_loops(settings, tmp_path, prompts_of(100, 4), critics=[critic])
    assert len(critic.denominators) == 4
