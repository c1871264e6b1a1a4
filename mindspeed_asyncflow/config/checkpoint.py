"""Checkpoints, and which settings a run that goes on from one may have changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from mindspeed_asyncflow.config.section import Section

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import Config

# What decides where and how fast a run goes, and not what it computes: whole sections, and keys of the others.
FREE_SECTIONS = frozenset(
    "evaluation placement dock observe cluster workload simulation checkpoint faults".split()  # noqa: SIM905
)
FREE_KEYS = {
    "run": {"name", "folder", "platform", "ray_cpus"},
    "model": {"cache"},
    "data": {"epochs"},
    "trainer": {
        *("steps", "tensor_parallel", "pipeline_parallel", "virtual_pipeline", "pipeline_layers", "data_parallel"),
        *("context_parallel", "expert_parallel", "sequence_parallel", "distributed_optimizer", "recompute"),
        *("micro_batch_tokens", "max_bad_steps", "threads", "save_every", "mindspeed", "moe_grouped_gemm"),
    },
    "critic": {"threads"},
    "rollout": {
        *("engine", "engine_options", "replicas", "min_replicas", "tensor_parallel", "max_running", "kv_cache_mb"),
        *("timeout_s", "threads", "ascend"),
    },
    "reward": {"workers", "timeout_s"},
    "workflow": {
        *("schedule", "lend", "update", "keep_versions", "relay", "relay_delta", "lanes", "repack_below", "overlap"),
        *("probe_answers", "watchdog_s", "start_timeout_s"),
    },
    "service": {
        *("weight_sync", "client_timeout_s", "call_timeout_s", "linger_s", "max_queued", "tenant_rows", "tenant_mb"),
        *("max_body_mb", "completions_share", "completions_waiting"),
    },
}


class CheckpointConfig(Section):
    keep: int = Field(2, ge=1, description="Newest complete checkpoints that are kept; older ones are removed.")
    hf: bool = Field(
        False,
        description="Every checkpoint also holds the policy as a Hugging Face folder; the last one always does.",
    )
    timeout_s: float = Field(
        600.0, gt=0, description="Deadline of each part of a checkpoint: copies, the cut of the dock, files."
    )


def changed(before: Config, now: Config) -> list[str]:
    """Settings, by name with both values, that differ and that a run may not change on its way."""
    return [
        f"{name}: {old!r} -> {new!r}"
        for section, was in before
        if section not in FREE_SECTIONS
        for name, old, new in _differences(section, was, getattr(now, section))
    ]


def _differences(section: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    free = FREE_KEYS.get(section, set())
    for key, old in before:
        new = getattr(now, key)
        if key not in free and old != new:
            yield f"{section}.{key}", old, new
