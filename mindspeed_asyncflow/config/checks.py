"""What can be known to be wrong before any worker starts: rules between settings, and between settings and machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_asyncflow.config import (
    feasibility,
    host_memory,
    learning,
    mindspeed,
    observe,
    rules_critic,
    rules_data,
    rules_evaluation,
    rules_placement,
    rules_transfer,
    rules_turns,
    rules_unused,
    schedules,
    service,
)
from mindspeed_asyncflow.config.machine import Machine
from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import check_parallel
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError

FEW_KEYS = 2  # that stand before the message


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to mend (`error`: the run would not work) or to know (`warning`)."""

    level: Literal["error", "warning"]
    keys: tuple[str, ...]  # settings to turn
    message: str

    def __str__(self) -> str:
        named = self.message.startswith(self.keys[0])
        if len(self.keys) > FEW_KEYS:  # a reader would meet what it is about behind a line of keys
            return f"{self.level}: {self.message} ({', '.join(self.keys[named:])})"
        return f"{self.level}: {self.message}" if named else f"{self.level}: {', '.join(self.keys)}: {self.message}"


def check(config: Config, machine: Machine, model: Mapping[str, Any] | None = None) -> list[Finding]:
    """All findings, errors first. `model` is the Hugging Face config of `model.source`, where it is known already."""
    rules = (
        *(learning.rules, rules_critic.rules, _batches, rules_data.rules),
        *(_rollout, _trainer, schedules.rules, rules_turns.rules, rules_evaluation.rules),
        *(rules_placement.rules, rules_transfer.rules, rules_unused.rules, mindspeed.rules, service.rules),
    )
    settled = config
    if not feasibility.on_npu(config, machine):  # `auto` is decided by the machine
        settled = config.model_copy(update={"run": config.run.model_copy(update={"platform": "cpu"})})
    found = [Finding(*f) for rule in rules for f in rule(settled)]
    shape = None
    try:
        model = model or feasibility.model_config(config)
        shape = describe(model) if model is not None else None
    except ConfigError as error:
        known = not config.trainer.own or bool(config.critic_size)  # an own engine may know more models
        found.append(Finding("error" if known else "warning", ("model.source",), str(error)))
    found += [Finding(*f) for f in feasibility.findings(config, machine, shape)]
    found += [Finding(*f) for f in host_memory.findings(config, machine, shape)]
    found += [Finding(*f) for f in observe.findings(config, machine)]
    if model is not None and shape is not None and (not config.trainer.own or config.critic_size):
        found += [*_parallel(config, model), *_rotary(model, machine)]
    return sorted(found, key=lambda finding: finding.level != "error")


def refuse_errors(found: list[Finding]) -> list[Finding]:
    """Raise ConfigError that lists every error of `found`; return the warnings."""
    errors = [finding for finding in found if finding.level == "error"]
    if errors:
        lines = [f"{len(errors)} setting{'s' if len(errors) > 1 else ''} cannot work", *(str(e) for e in errors)]
        raise ConfigError("\n  ".join(lines))
    return found


def _parallel(config: Config, model: Mapping[str, Any]) -> list[Finding]:
    try:
        check_parallel(model, config.trainer)
    except ConfigError as error:
        named = tuple(dict.fromkeys(re.findall(r"trainer\.\w+", str(error)))) or ("trainer",)
        return [Finding("error", named, str(error))]
    return []


def _rotary(model: Mapping[str, Any], machine: Machine) -> Iterator[Finding]:
    """What the trainer refuses at its start. Older files name the scaling `rope_scaling`, and its kind `type`."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = kind == "yarn" and model["model_type"] == "deepseek_v3" and rope.get("mscale") == rope.get("mscale_all_dim")
    if kind != "default" and not known:
        text = f"rotary scaling {kind!r} of its config.json is not supported by the trainer, which refuses to start"
        also = "; it knows yarn of deepseek_v3 with mscale equal to mscale_all_dim"
        yield Finding("warning" if machine.assumed else "error", ("model.source",), text + also)


Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]


def _batches(c: Config) -> Iterator[Raw]:
    w, t = c.workflow, c.trainer
    if w.groups_per_step % t.data_parallel:
        yield (
            "error",
            ("workflow.groups_per_step", "trainer.data_parallel"),
            f"{w.groups_per_step} prompt groups cannot be divided over {t.data_parallel} data-parallel ranks; "
            f"take {_multiple(w.groups_per_step, t.data_parallel)} groups",
        )
    if t.stream_groups and w.groups_per_step % t.stream_groups:
        yield (
            "error",
            ("workflow.groups_per_step", "trainer.stream_groups"),
            f"{w.groups_per_step} prompt groups cannot be taken {t.stream_groups} at a time; "
            f"take a divisor of {w.groups_per_step} or leave stream_groups out",
        )
    if not w.overlap and w.max_lag:
        yield (
            "error",
            ("workflow.overlap", "workflow.max_lag"),
            f"one task at a time is on-policy: with overlap false, max_lag must be 0, not {w.max_lag}",
        )


def _multiple(value: int, divisor: int) -> int:
    return max(divisor, round(value / divisor) * divisor)


def _rollout(c: Config) -> Iterator[Raw]:
    r = c.rollout
    if r.top_p < 1:
        yield "error", ("rollout.top_p",), f"is {r.top_p}: the trainer's log-probabilities would not match; must be 1.0"
    if r.top_k != -1:
        yield "error", ("rollout.top_k",), f"is {r.top_k}: the trainer's log-probabilities would not match; must be -1"
    longest = c.data.max_prompt_tokens + r.max_new_tokens
    if c.trainer.micro_batch_tokens < longest:
        yield (
            "error",
            ("trainer.micro_batch_tokens", "data.max_prompt_tokens", "rollout.max_new_tokens"),
            f"the longest sample has {longest} tokens and does not fit into {c.trainer.micro_batch_tokens}; "
            f"set micro_batch_tokens to {longest} or more",
        )
    if c.workflow.keep_versions <= c.workflow.max_lag:
        yield (
            "warning",
            ("workflow.keep_versions", "workflow.max_lag"),
            f"the trainer may be {c.workflow.max_lag} versions ahead, {c.workflow.keep_versions} are kept: a replica "
            f"that loads slowly can find its version dropped; set keep_versions to {c.workflow.max_lag + 1} or more",
        )
    if c.workflow.update == "rolling" and r.replicas < 2:
        yield (
            "error",
            ("workflow.update", "rollout.replicas"),
            "rolling loads one replica while the others serve, and there is only one; set rollout.replicas to 2 or "
            "more, or update to delayed or in_flight",
        )
    if c.dock.lease_s < r.timeout_s:
        yield (
            "error",
            ("dock.lease_s", "rollout.timeout_s"),
            f"a claim of {c.dock.lease_s:g} s ends before its generation batch may ({r.timeout_s:g} s): prompts would "
            "be generated twice; raise lease_s",
        )
    if c.workflow.watchdog_s < r.timeout_s:
        yield (
            "error",
            ("workflow.watchdog_s", "rollout.timeout_s"),
            f"the watchdog ({c.workflow.watchdog_s:g} s) would stop a generation batch that may take {r.timeout_s:g} s"
            f"; set watchdog_s to {r.timeout_s:g} or more",
        )
    if r.engine == "simulated":
        yield (
            "error",
            ("rollout.engine",),
            "simulated has no model and is for `asyncflow simulate`; set vllm or reference",
        )
    under_way = c.most_samples_open
    if c.dock.max_rows and under_way > c.dock.max_rows * c.dock.pairs:
        yield (
            "error",
            ("dock.max_rows", "dock.pairs", "workflow.groups_per_step", "algorithm.group_size", "workflow.max_lag"),
            f"{under_way} samples are under way, the dock may hold {c.dock.max_rows * c.dock.pairs} rows; "
            f"set dock.max_rows to {-(-under_way // c.dock.pairs)} or more, or to 0",
        )
    need = feasibility.arena_bytes(c)
    given = c.dock.arena_mb * c.dock.pairs
    if need > given << 20:
        yield (
            "error",
            ("dock.arena_mb", "dock.pairs", "workflow.groups_per_step", "algorithm.group_size", "workflow.max_lag"),
            f"{under_way} samples of at most {longest} tokens are under way "
            f"and need {-(-need >> 20) or 1} MiB, {given} are given; "
            f"set dock.arena_mb to {-(-need // (c.dock.pairs << 20)) or 1} or more",
        )


def _trainer(c: Config) -> Iterator[Raw]:
    t = c.trainer
    if not all(0 <= beta < 1 for beta in t.betas):
        yield "error", ("trainer.betas",), f"{list(t.betas)}: both must be at least 0 and below 1"
    if t.lr_warmup_steps >= t.steps:
        yield (
            "warning",
            ("trainer.lr_warmup_steps", "trainer.steps"),
            f"the rate rises over {t.lr_warmup_steps} steps and only {t.steps} are run: it never reaches trainer.lr; "
            "lower lr_warmup_steps",
        )
