"""Which versions of the Ascend software go together, and what is wrong with those found. Pure.

Trainer and rollout may live in two Python environments on one CANN. Every row names where it was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Said = tuple[Literal["error", "warning"], str]


@dataclass(frozen=True, slots=True)
class TrainerRow:
    mindspeed: str  # branch; it says nothing of itself that a program could read
    megatron_core: str
    torch_npu: str
    cann: tuple[str, ...]
    python: tuple[str, str]  # oldest, newest
    needs: tuple[str, ...]  # distributions that its adaptor imports and does not ask pip for
    source: str


@dataclass(frozen=True, slots=True)
class RolloutRow:
    vllm_ascend: str
    vllm: str
    torch_npu: str  # its first three numbers are torch's
    triton_ascend: str
    cann: str
    python: tuple[str, str]
    source: str


_BRANCH = "README of the branch, July 2026: torch 2.7.1 on CANN 9.0.0; CANN 9.1.0 by torch_npu's own table"
TRAINER = (
    TrainerRow(
        *("core_r0.16.0", "0.16", "2.7.1.post8", ("9.1.0", "9.0.0"), ("3.10", "3.11")),
        *(("triton-ascend", "scipy"), f"{_BRANCH}; its imports"),
    ),
    TrainerRow("26.1.0_core_r0.12.1", "0.12", "2.7.1.post8", ("9.1.0", "9.0.0"), ("3.10", "3.11"), (), _BRANCH),
)
_TABLE = "vllm-ascend's versioning policy, release table, August 2026"
ROLLOUT = (
    RolloutRow("0.18.0", "0.18.0", "2.9.0.post1", "3.2.0", "8.5.1", ("3.10", "3.11"), _TABLE),
    RolloutRow("0.23.0", "0.23.0", "2.10.0.post4", "3.2.2", "9.1.0", ("3.10", "3.12"), _TABLE),
    RolloutRow("0.27.1", "0.27.1", "2.10.0.post4", "3.2.2", "9.1.0", ("3.10", "3.12"), f"{_TABLE}, row of main"),
)
# CANN -> builds of torch_npu for it. Source: version table in torch_npu's README and its releases, August 2026.
TORCH_NPU = {
    "9.1.0": ("2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0"),
    "9.0.0": ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2"),
    "8.5.0": ("2.7.1.post2", "2.9.0"),
    "8.5.1": ("2.9.0.post1",),  # the pair of vllm-ascend 0.18.0
}
# Below it, graph capture of vllm-ascend runs out of streams; eager mode works. Source: its release notes from 0.18 on.
DRIVER_OF_GRAPHS = "25.5.1"


def numbers(version: str) -> tuple[int, ...]:
    """2.10.0.post4+x -> (2, 10, 0, 4); a pre-release counts as its release; () for what is no version."""
    plain = version.partition("+")[0]
    return tuple(map(int, re.findall(r"\d+", re.sub(r"(?:rc|alpha|beta|a|b|dev)\.?\d+.*", "", plain, flags=re.I))))


def _base(version: str) -> tuple[int, ...]:
    return numbers(version)[:3]


def check_cann(cann: str) -> Iterator[Said]:
    if not cann:
        yield "error", "CANN is not found: install its toolkit and `source` its set_env.sh before this command"
    elif cann not in TORCH_NPU:
        yield "warning", f"CANN {cann} is none of those that this was written for: {', '.join(TORCH_NPU)}"


def check_driver(driver: str, *, eager: bool) -> Iterator[Said]:
    if not driver:
        yield "warning", "the driver's version is not found; `npu-smi info` shows it in its first line"
    elif not eager and numbers(driver) < numbers(DRIVER_OF_GRAPHS):
        yield "error", f"driver {driver}: graph mode wants {DRIVER_OF_GRAPHS} or newer; update it, or use eager mode"


def check_trainer(found: Mapping[str, str], cann: str) -> Iterator[Said]:
    """`found`: distribution -> version of the trainer's environment, with "python"; what is not there is left out."""
    yield from _torch_npu(found, cann)
    fix = "bash scripts/install_mindspeed.sh"
    if "mindspeed" not in found:
        yield "error", f"MindSpeed is not installed; {fix}"
    core = found.get("megatron-core", "")
    row = next((row for row in TRAINER if numbers(core)[:2] == numbers(row.megatron_core)), None)
    if row is None:
        wanted = " or ".join(f"{row.megatron_core} (MindSpeed {row.mindspeed})" for row in TRAINER)
        yield "error", f"megatron-core {core or 'is not installed'}: {wanted} is wanted; {fix}"
    else:
        yield from _python(found, row.python, f"MindSpeed {row.mindspeed}")
        if missing := [name for name in row.needs if name not in found]:
            yield "error", f"MindSpeed {row.mindspeed} imports {' and '.join(missing)}, not installed; pip install them"
        if found.get("torch_npu") and _base(found["torch_npu"]) != _base(row.torch_npu):
            text = f"torch_npu {found['torch_npu']}: MindSpeed {row.mindspeed} is released for {row.torch_npu}"
            yield "warning", f"{text} on CANN {row.cann[0]}"


def check_rollout(found: Mapping[str, str], cann: str) -> Iterator[Said]:
    """As `check_trainer`, for the environment of the replicas."""
    yield from _torch_npu(found, cann)
    version = found.get("vllm-ascend", "")
    if not version:
        yield "error", f"vllm-ascend is not installed; take one of {', '.join(r.vllm_ascend for r in ROLLOUT)}"
        return
    fitting = [row for row in ROLLOUT if _base(row.vllm_ascend) <= _base(version)]
    row = fitting[-1] if fitting else ROLLOUT[0]
    exact = _base(row.vllm_ascend) == _base(version)
    if not exact:
        level: Literal["error", "warning"] = "warning" if fitting else "error"
        yield level, f"vllm-ascend {version} is none of those known, {', '.join(r.vllm_ascend for r in ROLLOUT)}"
    vllm = found.get("vllm", "")
    if not vllm:
        yield "error", f"vllm is not installed; vllm-ascend {version} wants the vLLM of its own number"
    elif _base(vllm) != _base(version):
        yield "error", f"vllm {vllm} beside vllm-ascend {version}: install both of one number"
    if exact:
        yield from _python(found, row.python, f"vllm-ascend {version}")
        if found.get("torch_npu") and _base(found["torch_npu"]) != _base(row.torch_npu):
            yield "error", f"torch_npu {found['torch_npu']}: vllm-ascend {version} is built for {row.torch_npu}"
        if cann and cann != row.cann:
            yield "warning", f"CANN {cann}: vllm-ascend {version} was released for CANN {row.cann}"


def _torch_npu(found: Mapping[str, str], cann: str) -> Iterator[Said]:
    version, torch = found.get("torch_npu", ""), found.get("torch", "")
    if not version:
        yield (
            "error",
            "torch_npu is not installed; install the build for your CANN"
            + (f" ({', '.join(TORCH_NPU[cann])})" if cann in TORCH_NPU else ""),
        )
        return
    if torch and _base(torch)[:2] != _base(version)[:2]:
        wanted = ".".join(map(str, _base(version)))
        yield "error", f"torch_npu {version} beside torch {torch}: it loads with torch {wanted} only"
    builds = TORCH_NPU.get(cann, ())
    same = [build for build in builds if _base(build) == _base(version)]
    if builds and not same:
        yield "error", f"torch_npu {version} has no build for CANN {cann}; there are {', '.join(builds)}"
    elif same and numbers(version) < numbers(same[0]):
        yield "warning", f"torch_npu {version} is older than {same[0]}, the build for CANN {cann}"


def _python(found: Mapping[str, str], span: tuple[str, str], what: str) -> Iterator[Said]:
    minor = numbers(found.get("python", ""))[:2]
    if minor and not numbers(span[0]) <= minor <= numbers(span[1]):
        yield "error", f"Python {found['python']}: {what} runs on {span[0]} to {span[1]}"
