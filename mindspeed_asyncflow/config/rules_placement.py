"""Which settings of the two sides' environments fit together and with the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mindspeed_asyncflow.config.feasibility import in_place, sharing_replicas
from mindspeed_asyncflow.config.schema import Config

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]


def rules(c: Config) -> Iterator[Raw]:
    p = c.placement
    pythons = ("placement.rollout_python", "placement.trainer_python")
    if in_place(c) and p.rollout_python != p.trainer_python:
        yield (
            "error",
            pythons,
            "colocated replicas of the reference engine live in the trainers' processes, which have one Python: name "
            "the same one twice, or none",
        )
    if in_place(c) and p.rollout_env:
        yield "error", ("placement.rollout_env",), "replicas live in the trainers' processes: use placement.trainer_env"
    if sharing_replicas(c) and c.rollout.engine == "vllm" and p.rollout_expandable_segments:
        yield (
            "error",
            ("placement.rollout_expandable_segments",),
            "replicas on the trainers' devices sleep, and the memory pool of sleep mode cannot live in segments that "
            "grow: leave it out or set it to false",
        )
    experts = c.rollout.engine == "vllm" and c.rollout.ascend.expert_parallel
    if experts and p.hccl_ports != "base_port" and c.cluster.preset == "ascend_910b":
        yield (
            "warning",
            ("placement.hccl_ports", "rollout.ascend.expert_parallel"),
            "on Atlas A2 HCCL takes no port ranges where MC2 operators run, with which vllm-ascend exchanges tokens "
            "between experts: set base_port (separated schedule)",
        )
    for side in ("trainer", "rollout"):
        for name in getattr(p, f"{side}_env"):
            if not name.isidentifier():
                yield "error", (f"placement.{side}_env",), f"{name!r} is no name of an environment variable"
