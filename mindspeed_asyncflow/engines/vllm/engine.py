"""`VLLMEngine`: the rollout engine of real runs, one class for vLLM on CPU and for vllm-ascend."""

from __future__ import annotations

import os

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.step_backend import StepBackend
from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.engines.vllm import environment, guards
from mindspeed_asyncflow.engines.weights import read_folder
from mindspeed_asyncflow.errors import PlatformError

START_TIMEOUT_S = 240.0


class VLLMEngine(SteppedEngine):
    """One replica. Make it in a process of its own: vLLM keeps its parallel groups in globals.

    `model_folder`: Hugging Face folder with safetensors weights (policy version 0); `max_model_len` counts prompt and
    answer together; `stop_token_ids` end answers whose request names none; `seed` only seeds what requests do not.
    Raises `PlatformError`, `DataError` or `EngineError` when the engine cannot start.
    """

    def __init__(
        self,
        model_folder: str,
        rollout: RolloutConfig,
        *,
        dtype: str,
        max_model_len: int,
        seed: int,
        stop_token_ids: tuple[int, ...],
        npu: bool = False,
        sleep_enabled: bool = False,
    ) -> None:
        weights = read_folder(model_folder)
        environment.prepare(rollout.tensor_parallel, rollout.threads, cpu=not npu)
        if npu:
            guards.check_npu_settings(os.environ, sleep=sleep_enabled, enforce_eager=True)

        def build() -> StepBackend:
            try:
                from mindspeed_asyncflow.engines.vllm.backend import VLLMBackend
            except ImportError as error:
                raise PlatformError(f"vLLM cannot be imported: {error}; or use rollout.engine: reference") from error
            return VLLMBackend(
                model_folder,
                weights,
                rollout,
                dtype=dtype,
                max_model_len=max_model_len,
                seed=seed,
                stop_token_ids=stop_token_ids,
                cpu=not npu,
                sleep_enabled=sleep_enabled,
            )

        super().__init__("vllm", build, start_timeout_s=START_TIMEOUT_S, command_timeout_s=rollout.timeout_s)
