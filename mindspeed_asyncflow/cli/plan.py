"""`asyncflow plan`: the best use of a cluster for a configuration, as a configuration that can be started."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.cli import preflight, settings
from mindspeed_asyncflow.config import Config, machine, rules_critic
from mindspeed_asyncflow.config.feasibility import on_npu
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner import ready
from mindspeed_asyncflow.planner.candidates import changed
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.memory import usable_bytes
from mindspeed_asyncflow.planner.profile import Profile
from mindspeed_asyncflow.planner.search import Outcome, Plan, search
from mindspeed_asyncflow.planner.work import Work

NAME = "plan"
HELP = "find the best use of a cluster for a configuration; starts nothing"
EXAMPLES = """  asyncflow plan configs/qwen_tiny_cpu.yaml --profile profile.json --out planned.yaml
  asyncflow plan my.yaml --set cluster.preset=ascend_910c_die --devices 64 --max-lag 1 --out planned.yaml
  asyncflow plan my.yaml --set cluster.preset=ascend_910b --json"""
SAID_EVERY_S = 2.0
MANY = 10_000  # samples of a step
ROWS = 600_000  # that all simulations of a plan may have together: about half a minute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument(
        "--devices",
        metavar="N",
        type=settings.at_least(1),
        help="devices in all (default: cluster.devices, or those of this machine)",
    )
    parser.add_argument("--max-lag", metavar="N", type=settings.at_least(0), help="short for --set workflow.max_lag=N")
    parser.add_argument(
        "--profile", metavar="FILE", type=Path, help="what `asyncflow profile` measured, in place of analytic times"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="where the YAML goes (default: standard output)")
    parser.add_argument(
        "--simulations",
        metavar="N",
        type=settings.at_least(1),
        help="simulate at most so many candidates (default: by cluster size)",
    )
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object instead of words")


def run(arguments: argparse.Namespace) -> int:
    if arguments.devices is not None:
        arguments.overrides.append(f"cluster.devices={arguments.devices}")
    if arguments.max_lag is not None:
        arguments.overrides.append(f"workflow.max_lag={arguments.max_lag}")
    config = on_this_machine(settings.load(arguments), machine.probe())
    profile = Profile.load(arguments.profile) if arguments.profile else None
    began = time.monotonic()

    def say(text: str) -> None:
        nonlocal began
        if time.monotonic() - began > SAID_EVERY_S:
            began = time.monotonic()
            print(f"asyncflow: {text}", file=sys.stderr, flush=True)

    work = model_work(config)
    plan, config = make_plan(config, work, profile, most=arguments.simulations, say=say)
    devices = config.cluster.devices
    figures = ready.summary(plan, config, devices, usable_bytes(config))
    planned = ready.ready(plan.best, config)
    text = ready.yaml_text(planned, list(heading(figures)))
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    if arguments.json:
        print(json.dumps(figures | {"yaml": text}))
        return 0
    print("\n".join(words(figures)))
    print(f"== settings, written to {arguments.out}" if arguments.out else f"== settings\n{text}", end="\n")
    return 0


def on_this_machine(config: Config, here: machine.Machine) -> Config:
    """A configuration that says nothing of its hardware is planned for what is here: NPUs, or the cores of a CPU."""
    if config.cluster != Config().cluster:
        return config
    if not on_npu(config, here):
        return changed(config, "cluster", preset="cpu", devices=here.cpus)
    return changed(config, "cluster", devices=here.npus) if here.npus else config


def model_work(config: Config) -> Work:
    """Raises `ConfigError` where the sizes of `model.source` cannot be told, and where a critic is trained too."""
    rules_critic.refuse_priced(config)
    sizes = preflight.model_sizes(config)
    if sizes is None:
        raise ConfigError(f"model.source={config.model.source}: a plan needs its config.json, or a builtin model")
    return Work.of(sizes)


def make_plan(
    config: Config,
    work: Work,
    profile: Profile | None = None,
    *,
    most: int | None = None,
    accept: Callable[[Config], bool] = lambda config: True,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Plan, Config]:
    """The plan, and the configuration that it was made for: lengths that a profile has seen replace assumed ones."""
    from mindspeed_asyncflow.simulation.pricing import gather_s, priced
    from mindspeed_asyncflow.simulation.run import simulate

    if profile is not None:
        config = with_lengths(config, profile)
    devices = config.cluster.devices

    def costs_of(candidate: Config) -> Costs:
        return priced(candidate, work, reshard=gather_s)[1] if profile is None else profile.costs(candidate, work)

    def simulated(candidate: Config, costs: Costs) -> Outcome:
        return simulate(priced(candidate, work, reshard=gather_s)[0], costs)

    steps, skip = steps_for(config)
    if most is None:
        most = max(2, min(24, 1024 // devices + 4, ROWS // (config.samples_per_step * steps)))
    short = changed(config, "simulation", steps=steps, skip_steps=skip)
    plan = search(short, work, costs_of, simulated, devices=devices, most=most, accept=accept, say=say)
    return plan, config


def steps_for(config: Config) -> tuple[int, int]:
    """(steps to simulate, of which the first are not counted): enough for a schedule with lag to repeat itself, fewer
    where each has many samples, which also vary less."""
    if config.samples_per_step > MANY:
        return 3 + config.workflow.max_lag, 1
    return (4 if config.cluster.devices >= 256 else 8) + 2 * config.workflow.max_lag, 2


def with_lengths(config: Config, profile: Profile) -> Config:
    """Lengths that were seen, where the configuration says nothing of its own."""
    if config.workload != Config().workload or not profile.answer_bins:
        return config
    return changed(config, "workload", prompt_bins=profile.prompt_bins, answer_bins=profile.answer_bins)


def heading(figures: dict[str, Any]) -> list[str]:
    best = figures["best"]
    return [
        f"Made by `asyncflow plan` for {figures['devices']} devices ({figures['label']}).",
        best["sizes"],
        f"Expected: {best['step_s']:.3g} s a step, {best['tokens_per_s']:.4g} tokens/s; idle: "
        + ", ".join(f"{side} {share:.0%}" for side, share in best["idle"].items()),
    ]


def words(figures: dict[str, Any]) -> list[str]:
    lines = ["== plan", *heading(figures)]
    used, best = figures["devices_used"], figures["best"]
    if used < figures["devices"]:
        lines.append(f"{figures['devices'] - used} devices stay unused: no sizes that fit use them for less time")
    lines.append(f"no schedule of these sizes is faster than {best['bound_s']:.3g} s a step")
    lines.append(f"== memory of the fullest device, GB of {figures['usable_gb']:.1f} usable")
    for side, kinds in best["memory_gb"].items():
        lines += [f"{side}: {sum(kinds.values()):.2f}"]
        lines += [f"{size:>10.2f}  {kind}" for kind, size in kinds.items()]
    lines.append("== next best")
    lines += [f"{other['sizes']}\n    {other['why']}" for other in figures["next"]] or ["none was simulated"]
    lines.append("== not chosen, by reason")
    lines += [f"{count:>10}  {reason}" for reason, count in figures["rejected"].items()]
    lines.append(f"{figures['simulated']:>10}  simulated, in {figures['seconds']:.1f} s in all")
    return lines
