"""The cluster, lengths of prompts and answers, the simulated run: settings of `check`, `plan`, `simulate`. A real run
reads none of them. Every number that a preset brings has its source beside it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pydantic import Field

from mindspeed_asyncflow.config.section import Section


@dataclass(frozen=True, slots=True)
class Device:
    """One device and its connections. Speeds are peaks of one device in one direction."""

    tflops: float  # dense bfloat16 matrix products, 1e12 operations/s
    memory_gb: float  # 1e9 bytes
    memory_gbs: float  # 1e9 bytes/s
    host_gbs: float  # device <-> host memory
    node_gbs: float  # to other devices of the node
    network_gbs: float  # to devices of other nodes
    devices_per_node: int
    host_memory_gb: float  # of a node


PRESETS = {
    # Atlas 800T A2. tflops, memory: data sheet of the 910B (313 TFLOPS float16, 64 GB at 1.6 TB/s). node: HCCS mesh of
    # 8, 7 links of 28 GB/s in each direction. network: one 200 Gb/s RoCE port per NPU. host: PCIe 4.0 x16. host memory:
    # as it is usually equipped.
    "ascend_910b": Device(313, 64, 1600, 32, 196, 25, 8, 1536),
    # One die of a 910C; frameworks see each die as a device. tflops (376 bfloat16), memory (64 GB at 1.6 TB/s), node
    # (unified bus, 196 GB/s in one direction) and network (200 Gb/s RDMA per die) of "Serving Large Language Models on
    # Huawei CloudMatrix384", arXiv 2506.12708, section 3. host memory: 16 NPUs and 2880 GB per node as in arXiv
    # 2507.01663, section 6.1. host: PCIe 5.0 x16 shared by the two dies, an assumption.
    "ascend_910c_die": Device(376, 64, 1600, 32, 196, 25, 16, 2880),
    # One core of a server CPU: two 512-bit fused multiply-add units at 2.5 GHz in float32, a share of the memory
    # channels; "devices" are cores. `asyncflow profile` measures what the machine really does.
    "cpu": Device(0.16, 4, 10, 10, 10, 1.25, 2, 8),
}


class ClusterConfig(Section):
    preset: Literal["ascend_910b", "ascend_910c_die", "cpu"] = Field(
        "ascend_910c_die", description="Where every number below that is null comes from."
    )
    devices: int = Field(16, ge=1, le=16384, description="Devices in all; `check` refuses a run that needs more.")
    devices_per_node: int | None = Field(None, ge=1, description="Devices of one node.")
    tflops: float | None = Field(None, gt=0, description="Dense bfloat16 peak of one device in 1e12 operations/s.")
    memory_gb: float | None = Field(None, gt=0, description="Memory of one device in 1e9 bytes.")
    memory_gbs: float | None = Field(None, gt=0, description="Memory bandwidth of one device in 1e9 bytes/s.")
    host_gbs: float | None = Field(None, gt=0, description="Device to host memory, one direction, 1e9 bytes/s.")
    node_gbs: float | None = Field(None, gt=0, description="Device to devices of its node, one direction, 1e9 bytes/s.")
    network_gbs: float | None = Field(None, gt=0, description="Device to other nodes, one direction, 1e9 bytes/s.")
    host_memory_gb: float | None = Field(None, gt=0, description="Host memory of one node in 1e9 bytes.")
    compute_efficiency: float = Field(
        0.45, gt=0, le=1, description="Share of the peak that training and prefill reach inside their matrix products."
    )
    memory_efficiency: float = Field(
        0.6, gt=0, le=1, description="Share of the memory bandwidth that decoding reaches."
    )
    link_efficiency: float = Field(0.7, gt=0, le=1, description="Share of link bandwidths that transfers reach.")
    decode_overhead_s: float = Field(
        0.01, ge=0, description="Host time of one decoding step: scheduling, launches, sampling."
    )
    layer_overhead_s: float = Field(
        0.0002, ge=0, description="Host time of launching one layer for one micro-batch, per pass."
    )
    memory_reserve: float = Field(
        0.1, ge=0, lt=1, description="Share of device memory left to libraries and fragmentation."
    )

    @property
    def device(self) -> Device:
        """The preset with the numbers that are set put over it."""
        known = PRESETS[self.preset]
        given = {field.name: getattr(self, field.name) for field in fields(Device)}
        return Device(**{name: getattr(known, name) if value is None else value for name, value in given.items()})


class WorkloadConfig(Section):
    """Log-normal lengths by mean and 95 % quantile, or a histogram. Both are cut at data.max_prompt_tokens and
    rollout.max_new_tokens: an answer that would be longer ends there, as in a real run."""

    prompt_mean: float = Field(128, gt=0, description="Mean tokens of a prompt, before the cut at the longest.")
    prompt_p95: float = Field(256, gt=0, description="95 % of prompts are shorter.")
    prompt_bins: list[tuple[int, float]] | None = Field(
        None, description="Histogram of prompt lengths, [tokens, weight] each, instead of mean and quantile."
    )
    answer_mean: float = Field(1024, gt=0, description="Mean tokens of an answer, before the cut at the longest.")
    answer_p95: float = Field(3072, gt=0, description="95 % of answers are shorter.")
    answer_bins: list[tuple[int, float]] | None = Field(
        None, description="Histogram of answer lengths, [tokens, weight] each, instead of mean and quantile."
    )


class SimulationConfig(Section):
    steps: int = Field(10, ge=1, description="Steps to simulate.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of lengths, speeds and faults.")
    rollout_scale: float = Field(1.0, gt=0, description="Calibration: factor on every generation time.")
    train_scale: float = Field(1.0, gt=0, description="Calibration: factor on every training time.")
    transfer_scale: float = Field(1.0, gt=0, description="Calibration: factor on every weight transfer.")
    colocated_scale: float = Field(
        1.0, gt=0, description="Calibration: further factor on training under the colocated schedule (another trainer)."
    )
    skip_steps: int = Field(2, ge=0, description="First steps that rates leave out: the pipeline fills.")
    references: int = Field(
        1, ge=1, description="Replicas of the frozen reference policy, where algorithm.kl_coef asks for one."
    )
    reference_devices: int = Field(1, ge=1, description="Devices that share the work of one of them.")
    flat_share: float = Field(
        0.0, ge=0, lt=1, description="Prompts whose answers all get the same reward (see algorithm.dynamic_sampling)."
    )
    sizes: dict[str, dict[str, int | float | str | bool | None]] = Field(
        default_factory=dict,
        description="Settings of other clusters: `asyncflow simulate --devices N` puts those of N over the rest.",
    )
    assumed: dict[str, list[int | float]] = Field(
        default_factory=dict,
        description="Settings that no source states, with the least and the greatest value that they may have; "
        "`asyncflow simulate --sensitivity` tries both.",
    )
    faults: list[str] = Field(
        default_factory=list,
        description="What happens to workers: `slow:INDEX:FACTOR[:SECOND]`, `leave:INDEX:SECOND`, `die:INDEX:SECOND`, "
        "`join:INDEX:SECOND`, `unscored:SHARE`; INDEX is a replica's.",
    )
