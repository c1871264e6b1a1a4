"""Settings of what the processes of a run live in: Python environments, ports, memory options of devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mindspeed_asyncflow.config.section import Section


class PlacementConfig(Section):
    trainer_python: str | None = Field(
        None,
        description="Python of trainer, critic and reference processes, on every node; default: the one of the run. "
        "All must have the same minor version of Python and the same Ray.",
    )
    rollout_python: str | None = Field(
        None, description="Python of rollout replicas, on every node; torch may be another one than the trainer's."
    )
    trainer_env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of trainer, critic and reference processes; those that the program sets "
        "itself are refused.",
    )
    rollout_env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of rollout replicas, with the same exception."
    )
    hccl_ports: Literal["ranges", "base_port", "auto"] = Field(
        "ranges",
        description="How HCCL finds ports (NPU only). ranges: every group of processes has its own; base_port: their "
        "own on the host, HCCL's default on devices (Atlas A2 with MC2 operators takes no ranges); auto: free ones.",
    )
    hccl_port_range: tuple[int, int] = Field(
        (20000, 32767),
        description="First and last port that this run may use for HCCL and the weight relay on NPU nodes; another run "
        "on the same nodes needs another range.",
    )
    trainer_expandable_segments: bool = Field(
        True, description="NPU: the allocator of trainer processes grows its segments, against fragmentation."
    )
    rollout_expandable_segments: bool | None = Field(
        None,
        description="NPU: the same for replicas; default: on, but off for replicas that sleep, which cannot have it.",
    )
