"""From a winning candidate to settings that a run can start with, and their text. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import yaml

from mindspeed_asyncflow.config import feasibility, keys
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.planner.candidates import changed
from mindspeed_asyncflow.planner.search import Plan, Ranked
from mindspeed_asyncflow.planner.workload import Workload

PATIENCE = 5.0  # deadlines are so many times what is expected
SCORING_SHARE = 0.25  # of a step that scoring may take


def ready(ranked: Ranked, given: Config) -> Config:
    """The candidate with what follows from it: deadlines, the dock's memory, kept versions, scorers."""
    config, workload = ranked.config, Workload.of(ranked.config)
    steps = {name: getattr(given.simulation, name) for name in ("steps", "skip_steps")}
    config = changed(config, "simulation", **steps)  # the search ran shorter ones
    patience = math.ceil(PATIENCE * max(ranked.expected.generate_s, ranked.step_s))
    timeout = max(config.rollout.timeout_s, float(patience))
    config = changed(config, "rollout", timeout_s=timeout)
    config = changed(config, "workflow", watchdog_s=max(config.workflow.watchdog_s, timeout))
    config = changed(config, "workflow", keep_versions=max(config.workflow.keep_versions, config.workflow.max_lag + 1))
    arena = -(-feasibility.arena_bytes(config) // (config.dock.pairs << 20))
    lease = max(config.dock.lease_s, timeout)
    config = changed(config, "dock", lease_s=lease, arena_mb=max(config.dock.arena_mb, arena))
    if config.rollout.engine == "simulated":
        config = changed(config, "rollout", engine="vllm")
    workers = config.reward.workers
    wanted = ranked.costs.score_row_s * workers * workload.samples / (SCORING_SHARE * ranked.step_s)
    if config.cluster.preset != "cpu":  # there cores are what the plan has dealt out
        config = changed(config, "reward", workers=max(workers, min(64, math.ceil(wanted))))
    return config


def reference(config: Config, key: str) -> Any:
    """Value of a dotted key."""
    return operator.attrgetter(key)(config)


def yaml_text(config: Config, head: Sequence[str]) -> str:
    """`config` as YAML, only what differs from the defaults, each key with its meaning; `head` as comments on top."""
    lines = [f"# {line}".rstrip() for line in head]
    opened: list[str] = []
    for doc in keys.describe_keys():
        value = reference(config, doc.path)
        if value == doc.default:
            continue
        *here, name = doc.path.split(".")
        plain = config.model_dump(mode="json")
        for depth, section in enumerate(here):
            if opened[: depth + 1] != here[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
            plain = plain[section]
        opened = here
        inline = yaml.safe_dump(plain[name], default_flow_style=True, width=10**6, allow_unicode=True).strip()
        text = f"{'  ' * len(here)}{name}: {inline.removesuffix('...').strip()}"
        lines.append(f"{text:<36}  # {doc.description}")
    return "\n".join(lines) + "\n"


def sizes(config: Config) -> str:
    """The split and the parallel sizes in one line."""
    t, r = config.trainer, config.rollout
    axes = [("TP", t.tensor_parallel), ("PP", t.pipeline_parallel), ("VPP", t.virtual_pipeline or 1)]
    axes += [("CP", t.context_parallel), ("DP", t.data_parallel), ("EP", t.expert_parallel)]
    cut = " ".join(f"{name}{size}" for name, size in axes if size > 1) or "1 rank"
    stages = f", layers {t.pipeline_layers}" if t.pipeline_layers else ""
    again = ", recompute" if t.recompute else ""
    s = config.simulation
    frozen = ""
    if config.algorithm.kl_coef > 0 and config.workflow.schedule != "colocated":
        frozen = f", reference {s.references} x {s.reference_devices}"
    text = f"train {t.world_size} ({cut}{stages}; {t.micro_batch_tokens} tokens a micro-batch{again})"
    return f"{text}, rollout {r.replicas} x TP{r.tensor_parallel} ({r.max_running} answers at a time){frozen}"


def why_slower(best: Ranked, other: Ranked) -> str:
    """What a candidate loses against the best, in words."""
    more = other.step_s / best.step_s - 1
    busy = {side: 1 - share for side, share in idle_of(other).items() if side in ("trainer", "rollout")}
    slow = max(busy, key=lambda side: busy[side])
    if max(busy.values()) < 0.8:
        return f"{more:+.1%}: neither side is busy, the step waits for {other.expected.limit}"
    work = {"trainer": other.expected.train_s, "rollout": other.expected.generate_s}[slow]
    then = {"trainer": best.expected.train_s, "rollout": best.expected.generate_s}[slow]
    what = "training" if slow == "trainer" else "generation"
    return f"{more:+.1%}: {what} limits ({busy[slow]:.0%} busy), {work:.3g} s of work a step against {then:.3g} s"


def idle_of(ranked: Ranked) -> dict[str, float]:
    return dict(ranked.outcome.idle) if ranked.outcome is not None else ranked.expected.idle


def summary(plan: Plan, config: Config, devices: int, usable_bytes: float) -> dict[str, Any]:
    """All that is said about a plan, as plain values."""
    workload = Workload.of(config)

    def said(ranked: Ranked) -> dict[str, Any]:
        return {
            "sizes": sizes(ranked.config),
            "step_s": ranked.step_s,
            "tokens_per_s": workload.step_tokens / ranked.step_s,
            "bound_s": ranked.bound_s,
            "idle": idle_of(ranked),
            "memory_gb": {s: {k: v / 1e9 for k, v in kinds.items()} for s, kinds in ranked.memory.items()},
        }

    return {
        "label": "simulated, not run on NPUs" if config.cluster.preset != "cpu" else "simulated",
        "devices": devices,
        "devices_used": plan.best.devices,
        "usable_gb": usable_bytes / 1e9,
        "best": said(plan.best),
        "next": [said(o) | {"why": why_slower(plan.best, o)} for o in plan.others[:3]],
        "rejected": dict(plan.rejected.most_common()),
        "simulated": plan.simulated,
        "seconds": plan.seconds,
    }
