"""Settings that were changed and have no effect beside the others: a warning for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.config.section import Section

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]


def rules(c: Config) -> Iterator[Raw]:
    yield from _mathematics(c)
    yield from _intake(c)
    yield from _ascend(c)
    for side, section in (("trainer", c.trainer), ("rollout", c.rollout)):
        if not section.own:
            why = (f"{side}.engine", f"{section.engine} is no engine of your own")
            yield from _changed(side, section, ("engine_options",), why)
    if c.trainer.own and not c.critic_size:
        why = ("trainer.engine", "it is not megatron")
        yield from _changed(
            "trainer.mindspeed", c.trainer.mindspeed, tuple(type(c.trainer.mindspeed).model_fields), why
        )


def _changed(prefix: str, section: Section, names: tuple[str, ...], why: tuple[str, str]) -> Iterator[Raw]:
    """A warning for those of `names` that do not have their default; `why`: the key to turn, and what it is."""
    key, state = why
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True):
            yield "warning", (f"{prefix}.{name}", key), f"has no use: {state}; leave it out"


def _mathematics(c: Config) -> Iterator[Raw]:
    a, k, w = c.algorithm, c.correction, c.workflow
    advantage = ("algorithm.advantage", f"advantage is {a.advantage}")
    loss = ("algorithm.loss", f"loss is {a.loss}")
    lag = ("workflow.max_lag", "max_lag is 0, so no token is older than its step")
    unused: list[tuple[bool, str, Section, tuple[str, ...], tuple[str, str]]] = [
        (a.advantage not in ("gae", "reinforce_pp"), "algorithm", a, ("gamma",), advantage),
        (a.advantage != "gae", "algorithm", a, ("gae_lambda",), advantage),
        (a.advantage != "gae", "critic", c.critic, tuple(type(c.critic).model_fields), advantage),
        (a.advantage not in ("gae", "reinforce_pp", "reinforce_pp_baseline"), "algorithm", a, ("whiten",), advantage),
        (a.loss in ("reinforce", "sapo"), "algorithm", a, ("clip_low", "clip_high"), loss),
        (a.loss != "ppo_clip", "algorithm", a, ("dual_clip",), loss),
        (a.loss != "sapo", "algorithm", a, ("sapo_tau_positive", "sapo_tau_negative"), loss),
        (a.loss != "dppo_tv", "algorithm", a, ("dppo_cap",), loss),
        (
            a.aggregation != "seq-mean-token-sum-norm",
            "algorithm",
            a,
            ("loss_horizon",),
            ("algorithm.aggregation", f"aggregation is {a.aggregation}"),
        ),
        (a.kl_coef == 0, "algorithm", a, ("kl_type", "kl_in", "kl_weighted"), ("algorithm.kl_coef", "kl_coef is 0")),
        (k.weight == "off", "correction", k, ("cap", "floor", "beyond"), ("correction.weight", "weight is off")),
        (k.reject == "off", "correction", k, ("reject_low", "reject_high"), ("correction.reject", "reject is off")),
        (w.max_lag == 0, "correction", k, ("stale_power",), lag),
    ]
    for idle, prefix, section, names, why in unused:
        if idle:
            yield from _changed(prefix, section, names, why)
    if a.proximal == "log_linear" and w.max_lag == 0:
        yield (
            "warning",
            ("algorithm.proximal", "workflow.max_lag"),
            "log_linear is current where no token is old; set it to current",
        )


def _intake(c: Config) -> Iterator[Raw]:
    if c.reward.overlong_buffer is None:
        why = ("reward.overlong_buffer", "overlong_buffer is off")
        yield from _changed("reward", c.reward, ("overlong_factor", "overlong_beyond"), why)
    if c.turns.environment is None:
        names = tuple(name for name in type(c.turns).model_fields if name != "environment")
        yield from _changed("turns", c.turns, names, ("turns.environment", "no environment answers the model"))
    for place, source in enumerate(c.data.validation):
        if source.weight != 1:
            yield (
                "warning",
                (f"data.validation[{place}].weight", "evaluation.prompts"),
                "has no use: evaluation takes the sources as they are; data.validation[...].size says how many",
            )


def _ascend(c: Config) -> Iterator[Raw]:
    on_cpus = ("run.platform", "the run is on CPUs")
    names, transfer = tuple(type(c.rollout.ascend).model_fields), ("transfer", "bucket_mb")  # gloo stands for HCCL
    if c.rollout.engine != "vllm":
        yield from _changed("rollout.ascend", c.rollout.ascend, names, ("rollout.engine", f"it is {c.rollout.engine}"))
    elif c.run.platform == "cpu":
        yield from _changed("rollout.ascend", c.rollout.ascend, tuple(n for n in names if n not in transfer), on_cpus)
    if c.rollout.engine == "vllm" and not c.rollout.native:
        why = ("rollout.ascend.transfer", "weights come through the relay")
        yield from _changed("rollout.ascend", c.rollout.ascend, ("bucket_mb",), why)
    if c.run.platform == "cpu":
        names = ("hccl_ports", "hccl_port_range", "trainer_expandable_segments", "rollout_expandable_segments")
        yield from _changed("placement", c.placement, names, on_cpus)
