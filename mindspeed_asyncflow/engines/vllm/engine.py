"""`VLLMEngine`: the rollout engine of real runs, one class for vLLM on CPU and for vllm-ascend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.step_backend import StepBackend
from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.engines.vllm import environment
from mindspeed_asyncflow.engines.vllm.native import Rendezvous
from mindspeed_asyncflow.engines.weights import read_folder
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.records import UpdateReport, WeightManifest

START_TIMEOUT_S = 240.0


class VLLMEngine(SteppedEngine):
    """One replica. Make it in a process of its own: vLLM keeps its parallel groups in globals.

    `model_folder`: Hugging Face folder with safetensors weights (policy version 0); `max_model_len` counts prompt and
    answer together; `stop_token_ids` end answers whose request names none; `seed` only seeds what requests do not.
    `native`: weights come by vllm-ascend's own transfer ("hccl" or "npu_ipc", and the bytes of a bucket) from a sender
    that is met by `join`, in place of the relay.
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
        native: tuple[str, int] | None = None,
    ) -> None:
        weights = read_folder(model_folder)
        environment.prepare(rollout, cpu=not npu)
        self._workers = rollout.tensor_parallel

        def build() -> StepBackend:
            try:
                from mindspeed_asyncflow.engines.vllm.backend import VLLMBackend
            except ImportError as error:
                raise PlatformError(f"vLLM cannot be imported: {error}; or use rollout.engine: reference") from error
            self._vllm = VLLMBackend(
                model_folder,
                weights,
                rollout,
                dtype=dtype,
                max_model_len=max_model_len,
                seed=seed,
                stop_token_ids=stop_token_ids,
                cpu=not npu,
                sleep_enabled=sleep_enabled,
                native=native,
            )
            return self._vllm

        super().__init__("vllm", build, start_timeout_s=START_TIMEOUT_S, command_timeout_s=rollout.timeout_s)

    def join(self, address: str = "", port: int = 0) -> None:
        """Meet the sender of native transfers, once; it must be there within rollout.timeout_s.

        It listens at `address`:`port` (hccl); a sender of npu_ipc is not met anywhere.
        """
        rendezvous = Rendezvous(address, port, self._workers) if address else None
        self._call("rendezvous with the sender of weights", lambda: self._vllm.join(rendezvous))

    def update_from(self, manifest: WeightManifest, chunks: Iterable[dict[str, Any]]) -> UpdateReport:
        """As `update`, from the messages of an npu_ipc sender, which keeps the memory of one until the next is read."""

        def update() -> UpdateReport:
            self._vllm.chunks = chunks
            try:
                return self._update(manifest)
            finally:
                self._vllm.chunks = None

        return self._call("update", update)
