"""Shares of the devices: all are used, a trainer that waits gets fewer, one that never does more."""

import pytest

from mindspeed_asyncflow.cli.plan import model_work
from mindspeed_asyncflow.config.load import parse_config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.simulation.split import best_split, expected_best, rebalanced, shares

PLACED = """
model: {source: configs/models/qwen2.5-7b, dtype: bfloat16}
cluster: {devices: 32}
algorithm: {group_size: 4, kl_coef: 0.001}
data: {max_prompt_tokens: 512}
workload: {prompt_mean: 110, prompt_p95: 250, answer_mean: 850, answer_p95: 1700}
rollout: {engine: simulated, replicas: 4, max_new_tokens: 2048, max_running: 64}
trainer: {tensor_parallel: 4, data_parallel: 6, micro_batch_tokens: 16384}
workflow: {groups_per_step: 64, max_lag: 1}
simulation: {steps: 4, references: 4}
"""


@pytest.fixture
def config(repository):
    return parse_config(PLACED, [f"model.source={repository}/configs/models/qwen2.5-7b"])


@pytest.fixture
def repository(request):
    return request.config.rootpath


@pytest.mark.slow
def test_the_split_tried_uses_all_devices_and_beats_a_bad_one(config):
    work = model_work(config)
    chosen, result = best_split(config, work, tries=3)
    _, first = best_split(config, work, tries=1)
    assert sum(shares(chosen).values()) == 32
    assert result.tokens_per_s >= first.tokens_per_s


def test_devices_follow_the_work_that_each_side_did(config):
    assert shares(config) == {"rollout": 4, "reference": 4, "trainer": 24}
    # Work of 4, 2 and 12 devices: of 32 these are 7.1, 3.6 and 21.3, the trainer in fours.
    after = rebalanced(config, {"rollout": 0.0, "reference": 0.5, "trainer": 0.5})
    assert shares(after) == {"rollout": 8, "reference": 4, "trainer": 20}


def test_a_trainer_that_never_waits_gets_one_replica_more(config):
    start = rebalanced(config, {"rollout": 0.0, "reference": 0.5, "trainer": 0.5})
    after = rebalanced(start, {"rollout": 0.0, "reference": 0.0, "trainer": 0.0})
    assert shares(after)["trainer"] == 24
    assert sum(shares(after).values()) == 32


def test_a_cluster_without_room_for_all_sides_is_refused(config):
    small = config.model_copy(update={"cluster": config.cluster.model_copy(update={"devices": 5})})
    with pytest.raises(ConfigError, match="no split of 5 devices has room"):
        expected_best(small, model_work(config))
