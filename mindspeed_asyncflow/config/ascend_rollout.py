"""Settings of rollout replicas on NPUs (vllm-ascend). But for the transfer of weights they have no effect on CPU, of
which `asyncflow check` warns."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from mindspeed_asyncflow.config.section import Section

# Options of vllm-ascend that give wrong weights or log-probabilities without an error, when they are not off.
HARMFUL = {
    "weight_nz_mode": "weights in FRACTAL_NZ layout cannot be updated in place",
    "enable_fused_mc2": "it keeps expert weights in FRACTAL_NZ layout, which cannot be updated in place",
    "enable_reduce_sample": "it computes log-probabilities over a part of the vocabulary",
}


class AscendRolloutConfig(Section):
    transfer: Literal["relay", "hccl"] = Field(
        "relay",
        description="How weight versions come into replicas. relay: a replica reads them from host memory, on other "
        "nodes through a mirror; hccl: a process beside a trainer rank broadcasts them to the devices of the replica "
        "with vllm-ascend's own engine (on CPUs over gloo).",
    )
    bucket_mb: int = Field(
        256,
        ge=1,
        description="Tensors of one broadcast of transfer hccl in MiB; the last one of a bucket may exceed it. Sender "
        "and receivers hold two buckets on their devices.",
    )
    graphs: bool = Field(
        False,
        description="Replay ACL graphs in place of eager mode, where relay updates leave every weight at its address; "
        "an update that does not stops the run. Try it per model as docs/ascend.md says.",
    )
    expert_parallel: bool = Field(
        False,
        description="Each device of a replica holds whole experts, rollout.tensor_parallel shares of them, in place of "
        "a slice of every expert. Not with replicas that share devices with a trainer.",
    )
    hccl_buffer_mb: int | None = Field(
        None, ge=1, description="HCCL_BUFFSIZE of replicas in MiB, which bounds what experts exchange; default: HCCL's."
    )
    additional: dict[str, Any] = Field(
        default_factory=dict, description="Further options of vllm-ascend, its additional_config."
    )

    @field_validator("additional")
    @classmethod
    def _nothing_harmful(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, harm in HARMFUL.items():
            if given.get(name):
                raise ValueError(f"{name} must stay off: {harm}")
        for name in ("dynamic_eplb", "expert_map_record_path"):  # with a path to record to, it switches the first on
            if _part(given, "eplb_config").get(name) not in (None, False):
                raise ValueError(f"eplb_config.{name} must stay off: an update would find experts at other places")
        if _part(given, "xlite_graph_config").get("enabled"):
            raise ValueError(
                "xlite_graph_config.enabled must stay off: its graphs replay the weights of before an update"
            )
        return given


def _part(given: dict[str, Any], name: str) -> dict[str, Any]:
    part = given.get(name)
    return part if isinstance(part, dict) else {}
