"""Several simulated runs of one workload: every schedule, or every assumption at its least and greatest value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import AsyncFlowError, ConfigError
from mindspeed_asyncflow.planner.profile import Profile
from mindspeed_asyncflow.planner.work import Work
from mindspeed_asyncflow.simulation.pricing import priced
from mindspeed_asyncflow.simulation.result import SimulationResult
from mindspeed_asyncflow.simulation.run import simulate
from mindspeed_asyncflow.simulation.schedules import named, with_settings

Say = Callable[[str], None]
Outcome = SimulationResult | str  # or why there is none


def schedules(
    config: Config, work: Work, names: Iterable[str], say: Say, profile: Profile | None = None
) -> dict[str, Outcome]:
    """Each schedule on the same prompts and lengths; one that does not fit this cluster says why."""
    found: dict[str, Outcome] = {}
    for name in names:
        say(f"simulating {name}")
        try:
            found[name] = simulate(*priced(named(config, name), work, profile))
        except AsyncFlowError as error:
            found[name] = str(error).splitlines()[0]
    return found


def sensitivity(
    config: Config, work: Work, say: Say, profile: Profile | None = None
) -> dict[str, tuple[SimulationResult, SimulationResult]]:
    """By assumed setting: the run with its least and with its greatest value, all else as it is."""
    found = {}
    for key, between in config.simulation.assumed.items():
        if len(between) != 2:
            raise ConfigError(f"simulation.assumed: {key} needs two values, the least and the greatest, not {between}")
        say(f"simulating {key} = {between[0]} and {between[1]}")
        low, high = (simulate(*priced(put(config, key, value), work, profile)) for value in between)
        found[key] = (low, high)
    return found


def put(config: Config, key: str, value: Any) -> Config:
    """One setting, `section.key`, put over the others."""
    section, _, name = key.partition(".")
    if not hasattr(getattr(config, section, None), name):
        raise ConfigError(f"simulation: there is no setting {key!r}")
    return with_settings(config, {section: {name: value}})


def on_devices(config: Config, devices: int) -> Config:
    """The configuration for another cluster, as `simulation.sizes` has it. Raises `ConfigError` where it has none."""
    sizes = config.simulation.sizes
    if str(devices) not in sizes:
        raise ConfigError(
            f"simulation.sizes has nothing for {devices} devices; there are {', '.join(sizes) or 'none'} "
            "(or set cluster.devices and all that depends on it)"
        )
    config = put(config, "cluster.devices", devices)
    for key, value in sizes[str(devices)].items():
        config = put(config, key, value)
    return config


def table(results: dict[str, Outcome], against: str | None = None) -> list[str]:
    """Lines of a comparison; `against`: the run that ratios refer to (default: the first that ended)."""
    ended = {name: r for name, r in results.items() if isinstance(r, SimulationResult)}
    if not ended:
        return [f"{name}: {why}" for name, why in results.items()]
    base = ended[against] if against in ended else next(iter(ended.values()))
    width = max(map(len, results))
    lines = [f"{'schedule':<{width}} {'tokens/s':>10} {'x':>6} {'step s':>9}  idle: trainer rollout reference   lag"]
    for name, result in results.items():
        if isinstance(result, str):
            lines.append(f"{name:<{width}} {result}")
            continue
        idle = [f"{result.idle[k]:.0%}" if k in result.idle else "-" for k in ("trainer", "rollout", "reference")]
        ratio = result.tokens_per_s / base.tokens_per_s
        lines.append(
            f"{name:<{width}} {result.tokens_per_s:>10,.0f} {ratio:>6.2f} {result.step_s:>9.1f}  "
            f"{idle[0]:>13} {idle[1]:>7} {idle[2]:>9} {result.max_lag:>5}"
        )
    return lines


def words(result: SimulationResult) -> Sequence[str]:
    """A run in a few lines."""
    lags = ", ".join(f"{lag}: {rows:,}" for lag, rows in result.lag_histogram.items())
    took = f"{result.step_s:.1f} s each after the first {result.skipped}"
    if result.steps - result.skipped == 1:
        took = f"the last one took {result.step_s:.1f} s"
    lines = [
        f"{result.tokens_per_s:,.0f} tokens/s on {result.devices} devices "
        f"({result.tokens_per_s_per_device:,.0f} per device), {result.samples_per_s:,.1f} samples/s",
        f"{result.steps} steps, {took}",
        "idle: " + ", ".join(f"{side} {share:.1%}" for side, share in result.idle.items()),
        f"rows by lag: {lags}",
        f"an update takes a replica {result.load_s:.2f} s, {result.rollout_exposed_share:.2%} of its time; "
        f"an optimizer step waits {result.publish_wait_s:.2f} s for the version before",
        f"the trainer works {result.train_block_s:.1f} s a step, with {result.train_gap_s:.1f} s between two steps",
        f"samples: {result.issued:,} issued, {result.trained:,} trained, {result.open:,} open, "
        f"dropped: {', '.join(f'{n:,} {why}' for why, n in result.dropped.items()) or 'none'}",
    ]
    if result.violations:
        lines.append(f"VIOLATED: {result.violations}")
    return lines
