"""NPU settings and events that break weights, log-probabilities or devices are refused without needing an NPU."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_asyncflow.config.ascend_rollout import AscendRolloutConfig
from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.vllm import guards
from mindspeed_asyncflow.engines.vllm.native import NativeTransfer
from mindspeed_asyncflow.engines.vllm.versions import ascend_shape_for
from mindspeed_asyncflow.errors import EngineError, PlatformError, WeightSyncError
from mindspeed_asyncflow.records import ParamMeta, ShardMeta, WeightManifest

GOOD = {"VLLM_ASCEND_ENABLE_NZ": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "HCCL_IF_BASE_PORT": "50000"}


def check(
    environ: dict[str, str], *, sleep: bool = False, release: str = "0.23.0", native: str | None = None, **given: Any
) -> None:
    tensor_parallel = given.pop("tensor_parallel", 1)
    rollout = RolloutConfig(tensor_parallel=tensor_parallel, ascend=AscendRolloutConfig(**given))
    shape = ascend_shape_for(release)
    transfer = NativeTransfer(native, 1 << 20, shape) if native else None
    guards.check_npu_settings(environ, rollout, shape, sleep=sleep, native=transfer)


def test_good_settings_pass() -> None:
    check(GOOD, sleep=True)
    check({**GOOD, "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"})
    check({**GOOD, "ASCEND_RT_VISIBLE_DEVICES": "4,6"}, tensor_parallel=2, graphs=True, expert_parallel=True)
    check(GOOD, native="hccl")
    check(GOOD, release="0.27.1", additional={"rl_config": {"enabled": True}})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"VLLM_ASCEND_ENABLE_NZ": ""}, "VLLM_ASCEND_ENABLE_NZ must be 0"),
        ({"VLLM_ASCEND_ENABLE_NZ": "1"}, "VLLM_ASCEND_ENABLE_NZ must be 0"),
        ({"VLLM_ASCEND_ENABLE_FUSED_MC2": "1"}, "FUSED_MC2 must be 0"),
    ],
)
def test_kernel_layouts_that_updates_cannot_write_are_refused(environ: dict[str, str], said: str) -> None:
    """Known issue 1."""
    with pytest.raises(PlatformError, match=said):
        check({**GOOD, **environ})


def test_the_nz_layout_is_on_by_default() -> None:
    """Known issue 1."""
    with pytest.raises(PlatformError, match="VLLM_ASCEND_ENABLE_NZ must be 0"):
        check({name: value for name, value in GOOD.items() if "NZ" not in name})


@pytest.mark.parametrize("name", ["PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments: true"])
def test_expandable_segments_are_refused_with_sleep(name: str, value: str) -> None:
    """Known issue 7."""
    with pytest.raises(PlatformError, match="expandable_segments"):
        check({**GOOD, name: value}, sleep=True)


def test_a_sleep_that_frees_nothing_is_an_error() -> None:
    """Known issue 7: where the sleeping pool is not used, the first sleep returns and nothing is free."""
    guards.check_freed([1000, 1000], [50, 50], [1050, 1049])
    with pytest.raises(EngineError, match="gave back 0 of 1000 bytes of worker 1"):
        guards.check_freed([1000, 1000], [50, 50], [1050, 50])


def test_experts_spread_over_devices_do_not_sleep() -> None:
    """Known issue 4: tables beside the weights are not restored after a sleep."""
    with pytest.raises(PlatformError, match="expert_parallel with replicas that sleep"):
        check(GOOD, sleep=True, expert_parallel=True)


def test_graphs_go_with_relay_updates_only() -> None:
    """Known issue 6."""
    with pytest.raises(PlatformError, match="graphs with hccl weight transfer"):
        check(GOOD, native="hccl", graphs=True)


def test_an_update_that_moves_what_a_graph_reads_is_an_error() -> None:
    """Known issue 5."""
    guards.check_addresses([[], []])
    with pytest.raises(WeightSyncError, match=r"moved 2 tensors \(layers\.0\.W_UV, layers\.1\.W_UV\)"):
        guards.check_addresses([["layers.1.W_UV"], ["layers.0.W_UV", "layers.1.W_UV"]])


def test_a_replica_without_ports_of_its_own_is_refused() -> None:
    """Known issue 8, B92: HCCL's defaults are the same for every job of a node."""
    environ = {name: value for name, value in GOOD.items() if "PORT" not in name}
    with pytest.raises(PlatformError, match=r"none of HCCL_IF_BASE_PORT.*placement\.hccl_ports"):
        check(environ)
    check({**environ, "HCCL_HOST_SOCKET_PORT_RANGE": "auto"})


def test_a_replica_with_fewer_visible_devices_than_workers_is_refused() -> None:
    """Known issue 16, B90: workers take logical devices 0, 1, ..., whatever their physical numbers are."""
    with pytest.raises(PlatformError, match=r"ASCEND_RT_VISIBLE_DEVICES=8,11: 2 devices"):
        check({**GOOD, "ASCEND_RT_VISIBLE_DEVICES": "8,11"}, tensor_parallel=4)


def test_a_list_of_devices_out_of_order_is_refused() -> None:
    """Known issue 16, B90."""
    check({**GOOD, "ASCEND_RT_VISIBLE_DEVICES": "3,7,11"}, tensor_parallel=2)
    with pytest.raises(PlatformError, match="ASCEND_RT_VISIBLE_DEVICES=11,3,7 is not ascending"):
        check({**GOOD, "ASCEND_RT_VISIBLE_DEVICES": "11,3,7"}, tensor_parallel=2)


@pytest.mark.parametrize("value", ["1", ""])
def test_the_second_model_runner_is_refused(value: str) -> None:
    """Known issue 17: it takes the answer of a preempted request for a part of its prompt."""
    with pytest.raises(PlatformError, match="VLLM_USE_V2_MODEL_RUNNER must be 0"):
        check({**GOOD, "VLLM_USE_V2_MODEL_RUNNER": value})


def test_options_of_newer_releases_are_refused_where_nobody_reads_them() -> None:
    with pytest.raises(PlatformError, match="rl_config is unknown"):
        check(GOOD, release="0.26.0", additional={"rl_config": {"enabled": True}})


def test_a_weight_that_is_larger_than_a_bucket_is_named_with_its_size() -> None:
    """Known issue 19."""
    halves = tuple(ShardMeta((r, r + 1, 0, 8), 32 * r, 32) for r in range(2))
    params = (ParamMeta("norm", "float32", (4,), (ShardMeta((0, 1, 0, 4), 64, 16),)),)
    params += (ParamMeta("embed", "float32", (2, 8), halves),)
    manifest = WeightManifest(3, "", 80, params, (0, 0, 0), "00" * 8)
    guards.check_bucket(manifest, 64)
    with pytest.raises(WeightSyncError, match="'embed' of 64 bytes does not fit a bucket of 63: buckets need 64"):
        guards.check_bucket(manifest, 63)
