"""How many devices rollout, reference and training get. Parallel sizes stay: `asyncflow plan` searches those
too; here only the shares change, so that the gain of a split is told from the rest.

The first split is the one that the planner expects to be best. Where its trainer idles in a simulated run, the next
one gives every side devices in proportion to the work that it did there; where it never does, training gets more.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import AsyncFlowError, ConfigError
from mindspeed_asyncflow.planner.estimate import estimate
from mindspeed_asyncflow.planner.work import Work
from mindspeed_asyncflow.planner.workload import Workload
from mindspeed_asyncflow.simulation.pricing import priced
from mindspeed_asyncflow.simulation.result import SimulationResult
from mindspeed_asyncflow.simulation.run import simulate
from mindspeed_asyncflow.simulation.schedules import Settings, with_settings

GRAIN = 128  # shares are told apart by 1/128 of all devices, or by one replica
NEVER_IDLE = 0.01
MORE = 1 / 32  # of all devices that training gets where it never idles


def best_split(config: Config, work: Work, tries: int) -> tuple[Config, SimulationResult]:
    """The fastest of up to `tries` simulated splits, and its run. Raises `ConfigError` where none fits, and what the
    first run raises."""
    chosen = expected_best(config, work)
    found = [(chosen, simulate(*priced(chosen, work)))]
    seen = {tuple(shares(chosen).values())}
    while len(found) < tries:
        chosen = rebalanced(chosen, found[-1][1].idle)
        if tuple(shares(chosen).values()) in seen:
            break
        seen.add(tuple(shares(chosen).values()))
        try:
            found.append((chosen, simulate(*priced(chosen, work))))
        except AsyncFlowError:  # does not fit
            break
    return max(found, key=lambda pair: pair[1].tokens_per_s)


def expected_best(config: Config, work: Work) -> Config:
    """All devices of a separated configuration, shared so that the expected step is shortest."""
    model, each = model_devices(config), reference_devices(config)
    workload, devices = Workload.of(config), config.cluster.devices
    grain = max(1, devices // GRAIN)
    found: list[tuple[float, int, Config]] = []
    for data in range(1, devices // model + 1, max(1, grain // model)):
        for references in range(grain, devices // each, grain) if each else (1,):
            changed = _with(config, data, references)
            if changed is not None:
                found.append((estimate(*priced(changed, work), workload).step_s, len(found), changed))
    if not found:
        raise ConfigError(f"no split of {devices} devices has room for a trainer of {model}, a reference and a replica")
    return min(found, key=lambda item: item[:2])[2]


def rebalanced(config: Config, idle: Mapping[str, float]) -> Config:
    """Another split, from the idle shares of a run on this one; rollout gets what rounding leaves."""
    busy = {side: count * (1 - idle.get(side, 0.0)) for side, count in shares(config).items()}
    model, each = model_devices(config), reference_devices(config)
    if idle.get("trainer", 0.0) < NEVER_IDLE:  # replicas may look busy with less than they could do
        grown = 1 + max(model, MORE * config.cluster.devices) / config.trainer.world_size
        data, references = round(config.trainer.data_parallel * grown), round(config.simulation.references * grown)
        return _with(config, data, references) or config
    scale = config.cluster.devices / sum(busy.values())
    data = max(1, round(busy["trainer"] * scale / model))
    references = max(1, round(busy["reference"] * scale / each)) if each else 1
    return _with(config, data, references) or config


def shares(config: Config) -> dict[str, int]:
    """Devices by side."""
    r = config.rollout
    return {
        "rollout": r.replicas * r.tensor_parallel,
        "reference": config.simulation.references * reference_devices(config),
        "trainer": config.trainer.world_size,
    }


def model_devices(config: Config) -> int:
    """Devices of one data-parallel replica of the trainer."""
    t = config.trainer
    return t.tensor_parallel * t.pipeline_parallel * t.context_parallel


def reference_devices(config: Config) -> int:
    """Devices of one replica of the reference policy; 0: there is none."""
    return config.simulation.reference_devices if config.algorithm.kl_coef > 0 else 0


def _with(config: Config, data: int, references: int) -> Config | None:
    """All other devices to rollout; None where those are no whole replicas."""
    left = config.cluster.devices - data * model_devices(config) - references * reference_devices(config)
    replicas, rest = divmod(left, config.rollout.tensor_parallel)
    if replicas < 1 or rest:
        return None
    settings: Settings = {
        "trainer": {"data_parallel": data},
        "rollout": {"replicas": replicas},
        "simulation": {"references": references},
    }
    return with_settings(config, settings)
