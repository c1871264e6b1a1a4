"""Which settings of the two sides' environments fit together and with the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from mindspeed_asyncflow.config.feasibility import in_place, sharing_replicas
from mindspeed_asyncflow.config.schema import Config

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]

ALLOCATORS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PORTS = "placement.hccl_ports and placement.hccl_port_range say it, so that no two groups of processes meet"
_DEVICES = "each process gets the devices that Ray gives it; limit them in the shell that starts the run"
_FIXED = "the program sets it, and replicas work with no other value"
# Variables that the program sets in the processes of a side: two hands on one of them, and one loses in silence.
BOTH = {
    "HCCL_IF_BASE_PORT": _PORTS,
    "HCCL_HOST_SOCKET_PORT_RANGE": _PORTS,
    "HCCL_NPU_SOCKET_PORT_RANGE": _PORTS,
    "ASCEND_RT_VISIBLE_DEVICES": _DEVICES,
}
OF_VLLM = {
    "VLLM_PORT": _PORTS,
    "HCCL_BUFFSIZE": "rollout.ascend.hccl_buffer_mb sets it for replicas",
    "OMP_NUM_THREADS": "rollout.threads sets it for replicas",
    "VLLM_CPU_OMP_THREADS_BIND": "rollout.threads says how many cores a replica has",
    "TORCH_COMPILE_DISABLE": "rollout.ascend.graphs says whether there is something to compile",
    "VLLM_ENABLE_V1_MULTIPROCESSING": _FIXED,
    "VLLM_WORKER_MULTIPROC_METHOD": _FIXED,
    "VLLM_ASCEND_ENABLE_NZ": f"{_FIXED}: weights in FRACTAL_NZ layout cannot be updated in place",
    "VLLM_ASCEND_ENABLE_FUSED_MC2": "it keeps expert weights in FRACTAL_NZ layout, which cannot be updated in place",
    "VLLM_USE_V2_MODEL_RUNNER": f"{_FIXED}: the second model runner mistakes an answer that goes on for a prompt",
    "DYNAMIC_EPLB": "experts that move would be updated at other places",
    "EXPERT_MAP_RECORD": "it makes experts move, which would be updated at other places",
    "VLLM_NO_USAGE_STATS": _FIXED,
    "DO_NOT_TRACK": _FIXED,
    "HF_HUB_OFFLINE": f"{_FIXED}: models are local folders",
}


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
    experts = c.rollout.engine == "vllm" and c.rollout.ascend.expert_parallel and c.run.platform != "cpu"
    if experts and sharing_replicas(c):
        yield (
            "error",
            ("rollout.ascend.expert_parallel", "workflow.lend" if c.workflow.lend else "workflow.schedule"),
            "replicas on the trainers' devices sleep, and the tables which say where experts are lie in memory that "
            "sleep gives away: set it to false, or take schedule separated without lend",
        )
    if experts and p.hccl_ports != "base_port" and c.cluster.preset == "ascend_910b":
        yield (
            "warning",
            ("placement.hccl_ports", "rollout.ascend.expert_parallel"),
            "on Atlas A2 HCCL takes no port ranges where MC2 operators run, with which vllm-ascend exchanges tokens "
            "between experts: set base_port (separated schedule)",
        )
    for side in ("trainer", "rollout"):
        yield from _variables(c, side)


def _variables(c: Config, side: str) -> Iterator[Raw]:
    key, own = f"placement.{side}_env", BOTH | (OF_VLLM if side == "rollout" and c.rollout.engine == "vllm" else {})
    for name, value in getattr(c.placement, key.partition(".")[2]).items():
        if not name.isidentifier():
            yield "error", (key,), f"{name!r} is no name of an environment variable"
        elif name in own:
            named = tuple(re.findall(r"(?:placement|rollout)\.[\w.]+", own[name]))
            yield "error", (key, *named), f"{name} cannot be given here: {own[name]}"
        elif name in ALLOCATORS and "expandable_segments" in value:
            other = f"placement.{side}_expandable_segments"
            yield "error", (key, other), f"{name} has expandable_segments, which {other} sets: leave that option out"
