"""Schedules by name, as settings put over a configuration, and random ones for tests of the law."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_asyncflow.config.schedules import rules
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.costs import Costs

Settings = dict[str, dict[str, Any]]  # section -> key -> value
_SEPARATED: dict[str, Any] = {"schedule": "separated", "lend": False, "overlap": True, "lanes": 1, "take": "issued"}
_PLAIN: dict[str, Any] = _SEPARATED | {"partial_rounds": None, "oversample": 1.0, "repack_below": 0, "stale": "drop"}


def _of(**workflow: Any) -> Settings:
    return {"workflow": _PLAIN | workflow}


# In the order in which they are compared. What they mean is in docs/simulation.md.
NAMED: dict[str, Settings] = {
    "colocated": _of(schedule="colocated", max_lag=0, update="delayed"),
    "sequential": _of(max_lag=0, update="delayed", overlap=False),
    "streamed": _of(max_lag=0, update="delayed"),
    "delayed": _of(max_lag=1, update="delayed"),
    "rolling": _of(max_lag=1, update="rolling"),
    "in_flight": _of(max_lag=1, update="in_flight"),
    "lanes": _of(max_lag=1, update="in_flight", lanes=4),
    "partial": _of(max_lag=1, update="in_flight", partial_rounds=2),
    "repack": _of(max_lag=1, update="delayed", repack_below=64),
    "oversample": _of(max_lag=1, update="in_flight", lanes=4, oversample=1.25, take="ready"),
    "lag2": _of(max_lag=2, update="in_flight", lanes=4),
    "ready": _of(max_lag=2, update="in_flight", lanes=4, take="ready"),
    "lend": _of(max_lag=1, update="delayed", lend=True),
}


def with_settings(config: Config, settings: Settings) -> Config:
    """The configuration with these values put over it; validated anew."""
    values = config.model_dump()
    for section, keys in settings.items():
        values[section] |= keys
    return Config.model_validate(values)


def named(config: Config, name: str) -> Config:
    """`config` under the schedule `name`. Raises `ConfigError` for an unknown one, and where it does not fit."""
    if name not in NAMED:
        raise ConfigError(f"unknown schedule {name!r}; there are {', '.join(NAMED)}")
    settings = {section: dict(keys) for section, keys in NAMED[name].items()}
    if name == "colocated":
        settings |= _on_all_devices(config)
    settings["workflow"]["keep_versions"] = max(config.workflow.keep_versions, settings["workflow"]["max_lag"] + 1)
    changed = with_settings(config, settings)
    for level, keys, why in rules(changed):
        if level == "error":
            raise ConfigError(f"{name}: {', '.join(keys)}: {why}")
    return changed


def _on_all_devices(config: Config) -> Settings:
    """Trainer and replicas each take all devices, in turn; other parallel sizes stay."""
    t, devices = config.trainer, config.cluster.devices
    model = t.tensor_parallel * t.pipeline_parallel * t.context_parallel
    for what, size in (("trainer's TP x PP x CP", model), ("rollout.tensor_parallel", config.rollout.tensor_parallel)):
        if devices % size:
            raise ConfigError(f"colocated: cluster.devices {devices} is no multiple of the {what} {size}")
    return {
        "trainer": {"data_parallel": devices // model},
        "rollout": {"replicas": devices // config.rollout.tensor_parallel},
    }


def random_schedule(rng: np.random.Generator, seed: int) -> tuple[Config, Costs]:
    """A small run under random settings of every key that makes a schedule, with random costs, lengths and faults; of
    the combinations that `asyncflow check` lets through."""
    while True:
        config = _random_config(rng, seed)
        if not any(level == "error" for level, _, _ in rules(config)):
            return config, _random_costs(rng)


def _one(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _random_config(rng: np.random.Generator, seed: int) -> Config:
    replicas, group_size = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    shared = _one(rng, "", "", "", "colocated", "lend")
    longest = int(rng.integers(8, 200))
    mean = longest / 3
    lag = 0 if shared == "colocated" else _one(rng, 0, 1, 1, 2, 3)
    workflow = {
        "schedule": "colocated" if shared == "colocated" else "separated",
        "lend": shared == "lend",
        "max_lag": lag,
        "update": "delayed" if shared == "colocated" else _one(rng, "delayed", "rolling", "in_flight"),
        "keep_versions": max(2, lag + 1),
        "take": _one(rng, "issued", "ready"),
        "stale": _one(rng, "drop", "drop", "mask"),
        "oversample": _one(rng, 1.0, 1.0, 1.25, 2.0),
        "max_refills": int(rng.integers(0, 4)),
        "partial_rounds": _one(rng, None, None, 2, 3),
        "lanes": _one(rng, 1, 1, 2, 3),
        "repack_below": _one(rng, 0, 0, 2, 4),
        "overlap": lag > 0 or bool(rng.random() < 0.7),
        "groups_per_step": int(rng.integers(1, 9)),
    }
    if lag == 0:  # what needs a lag is off, or nearly every draw would be refused
        workflow |= {"take": "issued", "stale": "drop", "partial_rounds": None, "lanes": 1, "repack_below": 0}
    return Config.model_validate({
        "cluster": {"devices": 8, "devices_per_node": _one(rng, 1, 2, 4)},
        "algorithm": {
            "group_size": group_size, "dynamic_sampling": bool(rng.random() < 0.3),
            "kl_coef": _one(rng, 0.0, 0.0, 0.01),
        },
        "workload": {
            "prompt_mean": 8, "prompt_p95": 16, "answer_mean": mean, "answer_p95": mean * _one(rng, 1.5, 2.5, 3.5),
        },
        "data": {"max_prompt_tokens": 32},
        "rollout": {
            "engine": "simulated", "replicas": replicas, "max_new_tokens": longest,
            "max_running": int(rng.integers(group_size, 33)),
        },
        "trainer": {"data_parallel": int(rng.integers(1, 4)), "micro_batch_tokens": 512},
        "workflow": workflow,
        "simulation": {
            "steps": int(rng.integers(2, 7)), "seed": seed, "flat_share": _one(rng, 0.0, 0.2, 0.6),
            "references": int(rng.integers(1, 3)), "faults": _random_faults(rng, replicas),
        },
    })  # fmt: skip


def _random_costs(rng: np.random.Generator) -> Costs:
    slow, fast = float(rng.uniform(0.5, 3)), float(rng.uniform(0, 2))
    return Costs(
        prefill_token_s=1e-4,
        decode_weights_s=0.02 * slow,
        decode_context_s=1e-5,
        train_token_s=float(rng.uniform(1e-4, 1e-2)),
        optimizer_s=float(rng.uniform(0, 1)),
        publish_s=fast * _one(rng, 0.0, 0.5, 5.0),
        fetch_s=fast * _one(rng, 0.0, 0.5, 5.0),
        load_s=fast * _one(rng, 0.0, 0.5, 2.0),
        forward_token_s=1e-4,
        score_row_s=float(rng.uniform(0, 0.05)),
        give_s=fast * 0.3,
        take_s=fast * 0.3,
        claim_s=_one(rng, 0.0, 0.001),
    )


def _random_faults(rng: np.random.Generator, replicas: int) -> list[str]:
    """At random times; replica 0 lives."""
    found = [f"unscored:{rng.choice([0.05, 0.5]):g}"] if rng.random() < 0.2 else []
    for index in range(replicas):
        at = float(rng.uniform(0, 30))
        kind = rng.choice(["", "", "slow", "leave", "die", "join"])
        if kind == "slow":
            found.append(f"slow:{index}:{rng.uniform(1, 6):.2f}:{at:.2f}")
        elif kind and index:
            found.append(f"{kind}:{index}:{at:.2f}")
    return found
