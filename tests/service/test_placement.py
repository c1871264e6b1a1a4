import pytest

from mindspeed_asyncflow.config.schema import AlgorithmConfig, Config
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.service import placement
from mindspeed_asyncflow.service.inherited import worth_telling
from mindspeed_asyncflow.service.placement import Cluster, check_feasible, demands


def config(trainers, replicas, rollout_tp=1):
    return Config.model_validate(
        {"trainer": {"data_parallel": trainers}, "rollout": {"replicas": replicas, "tensor_parallel": rollout_tp}}
    )


def test_devices_that_cannot_come_are_refused_at_once_with_wanted_available_and_keys():
    """B93: four devices asked on a cluster with two."""
    with pytest.raises(PlatformError) as caught:
        check_feasible(demands(config(2, 1, rollout_tp=2)), {"CPU": 64.0, "NPU": 2.0})
    message = str(caught.value)
    assert "wants 4 NPUs" in message and "has 2" in message
    assert "trainer.tensor_parallel" in message and "rollout.replicas" in message


def test_a_critic_wants_as_many_devices_as_the_trainer():
    with_critic = config(2, 1).model_copy(update={"algorithm": AlgorithmConfig(advantage="gae")})
    check_feasible(demands(with_critic), {"NPU": 5.0})
    with pytest.raises(PlatformError, match=r"critic: 2 x 1 \(algorithm.advantage gae"):
        check_feasible(demands(with_critic), {"NPU": 4.0})


def test_a_cluster_without_the_resource_has_none():
    with pytest.raises(PlatformError, match="has 0"):
        check_feasible(demands(config(1, 1)), {"CPU": 4.0})


def test_exactly_enough_devices_is_enough():
    check_feasible(demands(config(2, 2)), {"NPU": 4.0})


def test_of_a_dead_workers_output_only_what_not_every_worker_writes_is_told():
    noise = """:job_id:01000000
:actor_name:Host
/site-packages/megatron/core/optimizer/__init__.py:26: UserWarning: Apex is not installed. Falling back to Torch
  warnings.warn(
"""
    assert worth_telling(noise) == []
    assert worth_telling(noise + "\x1b[33mterminate called\x1b[0m: bad_alloc\n\n") == ["terminate called: bad_alloc"]


def failing_init(*args, **kwargs):
    raise RuntimeError("The current node timed out during startup.")


def test_a_ray_that_does_not_start_is_an_error_with_its_reason_and_what_to_turn(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placement.ray, "init", failing_init)
    cluster = Cluster(config(1, 1), "cpu")
    cluster.folder = tmp_path
    with pytest.raises(
        PlatformError, match=r"Ray did not start \(RuntimeError after \d+ s: The current node timed out"
    ):
        cluster.start()


def test_a_running_ray_that_cannot_be_joined_is_named(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(placement.ray, "init", failing_init)
    with pytest.raises(PlatformError, match=r"Ray at 10\.0\.0\.1:6379 \(RAY_ADDRESS\) cannot be joined"):
        Cluster(config(1, 1), "cpu").start()
