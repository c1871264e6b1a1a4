"""What vLLM is told, for CPU and for an NPU; importing vLLM takes seconds."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_asyncflow.config.ascend_rollout import AscendRolloutConfig
from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.vllm.arguments import engine_args

pytestmark = pytest.mark.slow


def arguments(cpu: bool = False, sleep: bool = False, cache_parts: int = 8, **rollout: Any) -> Any:
    return engine_args(
        "folder",
        RolloutConfig(**rollout),
        dtype="bfloat16",
        max_model_len=64,
        seed=0,
        cpu=cpu,
        sleep=sleep,
        transfer="hccl",
        cache_parts=cache_parts,
    )


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "npu"])
def test_log_probabilities_are_those_of_the_distribution_that_was_sampled(cpu: bool) -> None:
    assert arguments(cpu).logprobs_mode == "processed_logprobs"


def test_the_nz_layout_is_off_in_the_options_as_well() -> None:
    """Known issue 1: waking reads the option, the start of an update the environment."""
    assert arguments().additional_config["weight_nz_mode"] == 0


def test_log_probabilities_come_from_the_whole_vocabulary() -> None:
    """Known issue 10."""
    assert arguments().additional_config["enable_reduce_sample"] is False


def test_a_step_is_complete_when_it_returns() -> None:
    """Known issues 9 and 13: no frame is in flight when a pause cuts, and noise is read before the next is drawn."""
    assert arguments().async_scheduling is False


def test_a_replica_is_one_engine_and_captures_no_routes() -> None:
    """Known issues 15 and 18: no dummy batches of data-parallel engines, nothing that preempted answers lose."""
    args = arguments()
    assert args.data_parallel_size == 1 and not args.enable_return_routed_experts


def test_graphs_and_expert_parallelism_are_chosen_by_settings_on_npu_only() -> None:
    chosen = AscendRolloutConfig(graphs=True, expert_parallel=True, additional={"enable_cpu_binding": False})
    args = arguments(ascend=chosen)
    assert (args.enforce_eager, args.enable_expert_parallel) == (False, True)
    assert args.additional_config["enable_cpu_binding"] is False
    assert arguments().enforce_eager and not arguments().enable_expert_parallel
    on_cpu = arguments(cpu=True, ascend=chosen)
    assert on_cpu.enforce_eager and not on_cpu.enable_expert_parallel and not on_cpu.additional_config


@pytest.mark.parametrize(("workers", "parts", "share"), [(1, 8, 64), (4, 8, 16), (4, 2, 32), (4, 1, 64)])
def test_the_cache_of_a_replica_is_cut_where_its_heads_can_be(workers: int, parts: int, share: int) -> None:
    args = arguments(kv_cache_mb=64, tensor_parallel=workers, cache_parts=parts)
    assert args.kv_cache_memory_bytes == share * 2**20


def test_sleep_is_for_devices() -> None:
    assert arguments(sleep=True).enable_sleep_mode and not arguments(cpu=True, sleep=True).enable_sleep_mode
