"""Process settings that vLLM reads when it is imported. This is the one module that writes them."""

from __future__ import annotations

import os

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.communicators import BUFFER_ENV


def worker_cores(cores: list[int], tensor_parallel: int, threads: int) -> str:
    """vLLM's rule for binding workers to cores: "nobind", or one group of cores per tensor-parallel worker.

    vLLM on CPU asserts one memory domain per worker unless the groups are spelled out.
    """
    if tensor_parallel == 1:
        return "nobind"
    if len(cores) < tensor_parallel * threads:
        raise PlatformError(
            f"rollout.tensor_parallel={tensor_parallel} with rollout.threads={threads} needs "
            f"{tensor_parallel * threads} cores, this process may use {len(cores)}"
        )
    groups = [cores[i * threads : (i + 1) * threads] for i in range(tensor_parallel)]
    return "|".join(",".join(map(str, group)) for group in groups)


def prepare(rollout: RolloutConfig, cpu: bool) -> None:
    """Set what vLLM and its worker processes read, before the first `import vllm`."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine core lives in this process; we drive its steps
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",  # models are local folders
        OMP_NUM_THREADS=str(rollout.threads),
    )
    if cpu or not rollout.ascend.graphs:  # graphs are cut by the compiler
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # else the sampler is compiled at its first call, for 20 s
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if cpu:
        cores = sorted(os.sched_getaffinity(0))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = worker_cores(cores, rollout.tensor_parallel, rollout.threads)
    else:
        _prepare_npu(rollout)


# What vllm-ascend must find off, and why. It is set before guards.py looks, so another value is refused here.
_OFF = {
    "VLLM_ASCEND_ENABLE_NZ": "weights in FRACTAL_NZ layout cannot be updated in place",
    "VLLM_USE_V2_MODEL_RUNNER": "the second model runner mistakes an answer that goes on for a prompt",
}


def _prepare_npu(rollout: RolloutConfig) -> None:
    for name, harm in _OFF.items():
        if os.environ.get(name, "") not in ("", "0"):
            raise PlatformError(f"{name}={os.environ[name]} in the environment must be 0 or left out: {harm}")
        os.environ[name] = "0"
    if rollout.ascend.hccl_buffer_mb is not None:
        os.environ[BUFFER_ENV] = str(rollout.ascend.hccl_buffer_mb)
