"""What vLLM reads from its process is set before it is imported."""

from __future__ import annotations

import os

import pytest

from mindspeed_asyncflow.config.ascend_rollout import AscendRolloutConfig
from mindspeed_asyncflow.config.rules_placement import OF_VLLM
from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.vllm.environment import prepare, worker_cores
from mindspeed_asyncflow.errors import PlatformError


def test_one_worker_is_not_bound_and_several_get_their_own_cores() -> None:
    assert worker_cores([0, 1], tensor_parallel=1, threads=4) == "nobind"
    assert worker_cores([2, 5], tensor_parallel=2, threads=1) == "2|5"
    assert worker_cores([0, 1, 2, 3, 6], tensor_parallel=2, threads=2) == "0,1|2,3"


def test_too_few_cores_are_named() -> None:
    with pytest.raises(PlatformError, match="needs 4 cores, this process may use 3"):
        worker_cores([0, 1, 2], tensor_parallel=2, threads=2)


def test_the_engine_stays_in_this_process_and_nothing_reports_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/bin"})
    prepare(RolloutConfig(threads=3), cpu=False)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_NO_USAGE_STATS"] == os.environ["DO_NOT_TRACK"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert os.environ["PATH"] == "/bin"
    assert not [name for name in os.environ if name.startswith(("HCCL_", "ASCEND_"))]


@pytest.mark.parametrize(("graphs", "cpu", "off"), [(False, False, True), (True, True, True), (True, False, False)])
def test_the_compiler_is_off_unless_graphs_need_it(
    monkeypatch: pytest.MonkeyPatch, graphs: bool, cpu: bool, off: bool
) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare(RolloutConfig(ascend=AscendRolloutConfig(graphs=graphs)), cpu=cpu)
    assert ("TORCH_COMPILE_DISABLE" in os.environ) == off


def test_an_npu_replica_gets_the_first_model_runner_and_its_own_hccl_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known issue 17."""
    monkeypatch.setattr(os, "environ", {})
    prepare(RolloutConfig(ascend=AscendRolloutConfig(hccl_buffer_mb=512)), cpu=False)
    assert os.environ["HCCL_BUFFSIZE"] == "512"
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0"


@pytest.mark.parametrize("name", ["VLLM_ASCEND_ENABLE_NZ", "VLLM_USE_V2_MODEL_RUNNER"])
def test_an_environment_that_switches_on_what_breaks_updates_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known issues 1 and 17."""
    monkeypatch.setattr(os, "environ", {name: "1"})
    with pytest.raises(PlatformError, match=f"{name}=1 in the environment must be 0"):
        prepare(RolloutConfig(), cpu=False)
    prepare(RolloutConfig(), cpu=True)
    monkeypatch.setattr(os, "environ", {name: ""})
    prepare(RolloutConfig(), cpu=False)
    assert os.environ[name] == "0"


def test_what_is_put_over_a_replicas_variables_is_refused_in_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare(RolloutConfig(ascend=AscendRolloutConfig(hccl_buffer_mb=512)), cpu=False)
    prepare(RolloutConfig(), cpu=True)
    left = {"VLLM_LOGGING_LEVEL", "TORCH_CPP_LOG_LEVEL"}  # where they are given
    assert os.environ.keys() - left <= OF_VLLM.keys()
