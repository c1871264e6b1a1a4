"""Settings and events that give wrong weights, wrong log-probabilities or crashes on NPU. Pure checks, so that they are
tested without one. What vllm-ascend does by itself, or what cannot be set here, has no check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.vllm.native import NativeTransfer
from mindspeed_asyncflow.engines.vllm.versions import AscendShape
from mindspeed_asyncflow.errors import EngineError, PlatformError, WeightSyncError
from mindspeed_asyncflow.platforms.devices import VISIBLE_ENV as VISIBLE
from mindspeed_asyncflow.platforms.devices import visible_ids
from mindspeed_asyncflow.records import WeightManifest

ALLOCATORS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PORTS = ("HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE")
FREED_SHARE = 0.9  # of weights and caches, at least, that a sleep gives back; the rest is rounding of allocators


def check_npu_settings(
    environ: Mapping[str, str],
    rollout: RolloutConfig,
    shape: AscendShape,
    *,
    sleep: bool,
    native: NativeTransfer | None = None,
) -> None:
    """Raise `PlatformError` for a combination that vllm-ascend does not survive. `sleep`: replicas share devices."""
    _check_layout(environ)
    _check_memory(environ, sleep)
    _check_devices(environ, rollout.tensor_parallel)
    ascend = rollout.ascend
    if environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        raise PlatformError(
            "VLLM_USE_V2_MODEL_RUNNER must be 0: the second model runner treats an answer that goes on after an update "
            "as a new prompt"
        )
    if ascend.expert_parallel and sleep:
        raise PlatformError(
            "rollout.ascend.expert_parallel with replicas that sleep: the tables which say where experts are lie in "
            "memory that sleep gives away; set it to false, or take schedule separated without workflow.lend"
        )
    if ascend.graphs and native is not None:
        raise PlatformError(
            f"rollout.ascend.graphs with {native.backend} weight transfer: graphs fail at the next replay; let weights "
            "come through the relay"
        )
    if "rl_config" in ascend.additional and not shape.rl_config:
        raise PlatformError(
            "rollout.ascend.additional.rl_config is unknown to this vllm-ascend; it takes 0.27 or newer"
        )


def _check_layout(environ: Mapping[str, str]) -> None:
    if environ.get("VLLM_ASCEND_ENABLE_NZ", "1") != "0":
        raise PlatformError("VLLM_ASCEND_ENABLE_NZ must be 0: weights in FRACTAL_NZ layout cannot be updated in place")
    if environ.get("VLLM_ASCEND_ENABLE_FUSED_MC2", "0") != "0":
        raise PlatformError("VLLM_ASCEND_ENABLE_FUSED_MC2 must be 0: it keeps expert weights in FRACTAL_NZ layout")


def _check_memory(environ: Mapping[str, str], sleep: bool) -> None:
    for name in ALLOCATORS:
        if sleep and "expandable_segments:true" in environ.get(name, "").lower().replace(" ", ""):
            raise PlatformError(
                f"{name} has expandable_segments:True, which sleep mode cannot use: unset it or do not use sleep"
            )


def _check_devices(environ: Mapping[str, str], tensor_parallel: int) -> None:
    """Workers count the visible devices from 0, so that a replica needs as many of them as it has workers."""
    visible = visible_ids(environ.get(VISIBLE))
    if visible is not None:
        if len(visible) < tensor_parallel:
            raise PlatformError(
                f"rollout.tensor_parallel={tensor_parallel} with {VISIBLE}={environ[VISIBLE]}: {len(visible)} devices "
                "are visible to this replica"
            )
        if [int(part) for part in environ[VISIBLE].split(",")] != visible:
            raise PlatformError(
                f"{VISIBLE}={environ[VISIBLE]} is not ascending: vllm-ascend takes it as it is written, the runtime "
                "sorts it, and a worker would name another device than it uses"
            )
    if not any(environ.get(name) for name in PORTS):
        raise PlatformError(
            f"none of {', '.join(PORTS)} is set: this replica would listen where every other HCCL job of the node does "
            "(placement.hccl_ports gives each its own)"
        )


def check_freed(held: Sequence[int], before: Sequence[int], after: Sequence[int]) -> None:
    """Raise `EngineError` where a worker's sleep gave back much less than it held. All in bytes, one per worker."""
    for rank, (size, free_before, free_after) in enumerate(zip(held, before, after, strict=True)):
        if free_after - free_before < FREED_SHARE * size:
            raise EngineError(
                f"sleep gave back {free_after - free_before} of {size} bytes of worker {rank}: its weights are not in "
                "the sleeping memory pool (expandable_segments in this process, or vllm-ascend without its kernels)"
            )


def check_addresses(moved: Sequence[Sequence[str]]) -> None:
    """Raise `WeightSyncError` where an update moved tensors (of each worker) that captured graphs read."""
    names = sorted({name for of_worker in moved for name in of_worker})
    if names:
        raise WeightSyncError(
            f"the update moved {len(names)} tensors ({', '.join(names[:3])}) and captured graphs still read the old "
            "ones: set rollout.ascend.graphs to false for this model"
        )


def check_bucket(manifest: WeightManifest, bucket_bytes: int) -> None:
    """Raise `WeightSyncError` for a tensor that one bucket of npu_ipc cannot hold."""
    sizes = {param.name: sum(shard.nbytes for shard in param.shards) for param in manifest.params}
    name, size = max(sizes.items(), key=lambda item: item[1])
    if size > bucket_bytes:
        raise WeightSyncError(
            f"weight {name!r} of {size} bytes does not fit a bucket of {bucket_bytes}: buckets need {size} or more"
        )
