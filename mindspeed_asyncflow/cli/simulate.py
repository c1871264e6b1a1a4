"""`asyncflow simulate`: the loops of a run on virtual time, with costs in place of devices."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from mindspeed_asyncflow.cli import settings
from mindspeed_asyncflow.cli.plan import model_work, with_lengths
from mindspeed_asyncflow.config import Config, dump_resolved
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.observe import trace
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.writers import MetricsWriter
from mindspeed_asyncflow.planner.profile import Profile
from mindspeed_asyncflow.planner.work import Work

NAME = "simulate"
HELP = "run a configuration on virtual time, with costs in place of devices; needs no device"
FAILED = "a law of the loops is broken, or it failed"  # what status 1 says
EXAMPLES = """  asyncflow simulate configs/simulate/qwen2.5-7b.yaml --devices 512
  asyncflow simulate configs/simulate/qwen2.5-7b.yaml --compare
  asyncflow simulate configs/simulate/qwen2.5-32b.yaml --compare delayed,lanes --steps 8
  asyncflow simulate configs/simulate/qwen2.5-7b.yaml --sensitivity
  asyncflow simulate my.yaml --set workflow.max_lag=2 --set simulation.faults=[slow:0:3]"""
TRACE_EVERY_S = 600.0  # virtual


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--steps", metavar="N", type=settings.at_least(1), help="short for --set simulation.steps=N")
    parser.add_argument(
        "--devices",
        metavar="N",
        type=settings.at_least(1),
        help="the settings that simulation.sizes has for a cluster of N devices",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="a new folder for the results (default: a dated one in run.folder)"
    )
    parser.add_argument(
        "--compare",
        metavar="NAMES",
        nargs="?",
        const="all",
        help="several schedules on the same workload, by name with commas between (default: all)",
    )
    parser.add_argument(
        "--profile", metavar="FILE", type=Path, help="what `asyncflow profile` measured, in place of analytic times"
    )
    parser.add_argument(
        "--sensitivity", action="store_true", help="each setting of simulation.assumed at its least and greatest value"
    )


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_asyncflow.simulation import compare
    from mindspeed_asyncflow.simulation.result import LABEL
    from mindspeed_asyncflow.simulation.schedules import NAMED

    config = settings.load(arguments)
    if arguments.devices is not None:
        config = compare.on_devices(config, arguments.devices)
    if arguments.steps is not None:
        config = compare.put(config, "simulation.steps", arguments.steps)
    names = list(NAMED) if arguments.compare == "all" else (arguments.compare or "").split(",")
    if arguments.compare and (unknown := [name for name in names if name not in NAMED]):
        raise ConfigError(f"--compare: unknown schedule {unknown[0]!r}; there are {', '.join(NAMED)}")
    work = model_work(config)
    profile = Profile.load(arguments.profile) if arguments.profile else None
    if profile is not None:
        config = with_lengths(config, profile)
    folder = _folder(config, arguments.out)
    print(f"== {LABEL}: {config.model.source} on {config.cluster.devices} devices", flush=True)
    if arguments.compare:
        results = compare.schedules(config, work, names, _say, profile)
        print("\n".join(compare.table(results)))
        values = {n: r if isinstance(r, str) else r.to_dict() for n, r in results.items()}
        _write(folder, {"label": LABEL, "schedules": values})
    elif arguments.sensitivity:
        _sensitivity(config, work, folder, profile)
    else:
        return _single(config, work, folder, profile)
    print(f"results in {folder.path}")
    return 0


def _single(config: Config, work: Work, folder: RunFolder, profile: Profile | None) -> int:
    from mindspeed_asyncflow.simulation import compare, gantt
    from mindspeed_asyncflow.simulation.pricing import priced
    from mindspeed_asyncflow.simulation.run import simulate
    from mindspeed_asyncflow.simulation.telling import SimProgress

    settled, costs = priced(config, work, profile)
    metrics = MetricsWriter(folder)
    tracer = trace.configure(
        folder.trace, "simulation", config.observe.trace, clock_ns=_virtual_ns, flush_s=TRACE_EVERY_S
    )
    progress = SimProgress(config.simulation.steps, sys.stderr)
    try:
        result = simulate(settled, costs, metrics=metrics, progress=progress)
    finally:
        progress.close()
        metrics.close()
        tracer.close()
    print("\n".join(compare.words(result)))
    print(f"simulated in {result.real_s:.1f} s of real time")
    _write(folder, result.to_dict() | {"costs": costs.to_dict()})
    if config.observe.trace:
        path = trace.merge_traces(folder.trace)
        title = f"{config.model.source}, {config.cluster.devices} devices, {result.label}"
        if gantt.draw(folder.trace, folder.path / "gantt.png", title):
            print(f"picture: {folder.path / 'gantt.png'}; trace for chrome://tracing: {path}")
        else:
            print(f"no picture (matplotlib is not installed); trace for chrome://tracing: {path}")
    print(f"results in {folder.path}")
    return 1 if result.violations else 0


def _sensitivity(config: Config, work: Work, folder: RunFolder, profile: Profile | None) -> None:
    from mindspeed_asyncflow.simulation import compare
    from mindspeed_asyncflow.simulation.pricing import priced
    from mindspeed_asyncflow.simulation.result import LABEL
    from mindspeed_asyncflow.simulation.run import simulate

    if not config.simulation.assumed:
        raise ConfigError("--sensitivity: simulation.assumed names no setting with its least and greatest value")
    here = simulate(*priced(config, work, profile))
    print(f"as configured: {here.tokens_per_s:,.0f} tokens/s")
    found = compare.sensitivity(config, work, _say, profile)
    for key, pair in found.items():
        values = config.simulation.assumed[key]
        said = [f"{v:g}: {r.tokens_per_s / here.tokens_per_s - 1:+.1%}" for v, r in zip(values, pair)]
        print(f"{key:<34} {'   '.join(said)}")
    rates = {key: [r.tokens_per_s for r in pair] for key, pair in found.items()}
    _write(folder, {"label": LABEL, "tokens_per_s": here.tokens_per_s, "assumed": rates})


def _virtual_ns() -> int:
    try:
        return int(asyncio.get_running_loop().time() * 1e9)
    except RuntimeError:  # before and after the run
        return 0


def _folder(config: Config, out: Path | None) -> RunFolder:
    from mindspeed_asyncflow.simulation.result import LABEL

    if out is not None:
        folder = RunFolder.create_at(out, dump_resolved(config))
    else:
        folder = RunFolder.create(config.run.folder, f"simulate-{config.run.name}", dump_resolved(config))
    _write(folder, {"label": LABEL})  # now already: nobody takes the folder for that of a run
    return folder


def _write(folder: RunFolder, values: dict) -> None:
    folder.simulated.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    print(f"asyncflow: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
