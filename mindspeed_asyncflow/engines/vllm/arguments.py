"""What vLLM is told: arguments of the engine and of one answer's sampling."""

from __future__ import annotations

from typing import Any

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.records import SamplingSpec

CPU_BLOCK_TOKENS = 32  # smallest KV block that vLLM's fast CPU attention takes; prefixes are shared in whole blocks
MAX_STEP_TOKENS = 16384  # most tokens of one step; longer prefills are cut
EXTENSION = "mindspeed_asyncflow.engines.vllm.transfer.RelayWorker"  # of vLLM's worker class, imported by its name


def sampling_params(spec: SamplingSpec, stop_token_ids: tuple[int, ...], prompt_logprobs: int | None = None) -> Any:
    """vLLM's form of `spec`. `prompt_logprobs` must be given here: with it vLLM decides to compute every prompt
    position, cached or not."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=0 if spec.top_k < 0 else spec.top_k,
        max_tokens=spec.max_tokens,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,  # answers end at `stop_token_ids` and nowhere else
        detokenize=False,
        logprobs=0,  # the sampled token only
        prompt_logprobs=prompt_logprobs,
        output_kind=RequestOutputKind.FINAL_ONLY,
        seed=0,
    )


def engine_args(
    model_folder: str,
    rollout: RolloutConfig,
    *,
    dtype: str,
    max_model_len: int,
    seed: int,
    cpu: bool,
    sleep: bool,
    transfer: str | None,
    cache_parts: int,
) -> Any:
    """vLLM's `EngineArgs`. `transfer`: name of the weight-transfer engine, None where the release has none;
    `cache_parts`: into how many devices' shares a key/value cache can be cut."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    length = max_model_len + 1  # scoring a full sequence samples one token more
    extra: dict[str, Any] = {"block_size": CPU_BLOCK_TOKENS} if cpu else npu_arguments(rollout)
    return EngineArgs(
        model=model_folder,
        skip_tokenizer_init=True,
        generation_config="vllm",  # sampling defaults come from us, not from the model folder
        load_format="safetensors",
        use_tqdm_on_load=False,
        dtype=dtype,  # type: ignore[arg-type]
        seed=seed,
        max_model_len=length,
        max_num_seqs=rollout.max_running,
        max_num_batched_tokens=max(length, min(rollout.max_running * length, MAX_STEP_TOKENS)),
        tensor_parallel_size=rollout.tensor_parallel,
        distributed_executor_backend="uni" if rollout.tensor_parallel == 1 else "mp",
        kv_cache_memory_bytes=rollout.kv_cache_mb * 2**20 // min(rollout.tensor_parallel, cache_parts),  # of a device
        enable_prefix_caching=True,
        enforce_eager=cpu or not rollout.ascend.graphs,
        async_scheduling=False,  # a step must be complete when it returns: cuts and aborts happen between steps
        enable_sleep_mode=sleep and not cpu,
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
        disable_log_stats=True,
        worker_extension_cls=EXTENSION,
        weight_transfer_config=WeightTransferConfig(backend=transfer) if transfer else None,
        **extra,
    )


def npu_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    """What only vllm-ascend takes."""
    options = {**rollout.ascend.additional, "weight_nz_mode": 0, "enable_reduce_sample": False}
    return {"additional_config": options, "enable_expert_parallel": rollout.ascend.expert_parallel}
