"""How fast the main job is: against itself without overlap, and against TRL's GRPOTrainer. README.md explains.

    python benchmarks/main_job.py [--quick] [--with-trl] [--seeds N] [--out FOLDER]

Run it with the Python of .venv, on a machine that does nothing else. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also where the package is not installed

import trl_run
from measured import EDGE, Measured, limiting_part, median_ratio
from our_side import ROOT, empty_folder, run_ours
from plot import draw_curves

from mindspeed_asyncflow.config.load import load_config

EMBEDDED = ROOT / "configs" / "qwen_tiny_cpu.yaml"
LONG = ROOT / "configs" / "benchmark" / "long.yaml"
ASYNC, ONE_AT_A_TIME, STREAMED, TRL = "async", "one_at_a_time", "streamed", "trl"
VARIANTS = {
    ASYNC: ["workflow.max_lag=1", "workflow.overlap=true"],
    ONE_AT_A_TIME: ["workflow.max_lag=0", "workflow.overlap=false"],
    STREAMED: ["workflow.max_lag=0", "workflow.overlap=true"],
}
QUIET = 0.15  # share of the machine that others may use before a figure is called rough


@dataclass(slots=True)
class Comparison:
    """The same job on every side, once for each seed."""

    name: str
    config: Path
    overrides: list[str]
    sides: tuple[str, ...]
    seeds: range
    out: Path
    timeout_s: float
    runs: dict[str, list[Measured]] = field(default_factory=dict)

    def measure(self) -> None:
        shape = None
        for seed, side in self._order():
            if side == TRL:
                config = load_config(self.config, [*self.overrides, f"run.seed={seed}"])
                spec = trl_run.specification(config, log=lambda text: say(f"  {text}"))
                if shape is None:
                    candidates = trl_run.shapes(config, os.cpu_count() or 1)
                    shape = trl_run.fastest_shape(f"{self.name}_trl", spec, candidates, self.out)
                run = trl_run.run_trl(f"{self.name}_trl", spec, shape, self.out, self.timeout_s)
            else:
                run = self._ours(side, seed)
            self.runs.setdefault(side, []).append(run)
            say(
                f"  {self.name}, seed {seed}, {side}: {run.samples_per_s:.0f} samples/s, reward "
                f"{run.rewards[0]:.2f} to {statistics.fmean(run.rewards[-5:]):.2f}, whole process {run.wall_s:.0f} s"
                + (f" (others used {run.foreign_cpu:.0%} of the machine)" if run.foreign_cpu > QUIET else "")
            )

    def _order(self) -> Iterator[tuple[int, str]]:
        """Sides in turn, each second round backwards: a machine that warms up or slows down favours nobody."""
        for seed in self.seeds:
            for side in self.sides if seed % 2 == 0 else reversed(self.sides):
                yield seed, side

    def _ours(self, side: str, seed: int) -> Measured:
        config = load_config(self.config, self.overrides)
        overrides = [*self.overrides, *VARIANTS[side]]
        if side != ASYNC:
            overrides.append("evaluation.prompts=0")  # not part of the loop; the asynchronous run tells what is learnt
        return run_ours(
            f"{self.name}_{side}", self.config, overrides, seed, config.samples_per_step, self.out, self.timeout_s
        )

    def ratio(self, above: str, below: str, rate: str) -> float | None:
        if above not in self.runs or below not in self.runs:
            return None
        return median_ratio(*([getattr(run, rate) for run in self.runs[side]] for side in (above, below)))

    def median(self, side: str, name: str) -> float | None:
        values = [getattr(run, name) for run in self.runs.get(side, [])]
        return round(statistics.median(values), 4) if values else None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def recorded_install_s() -> float | None:
    """Seconds of the set-up, from the stamp that scripts/bootstrap.sh leaves in the environment."""
    stamp = Path(sys.prefix) / "asyncflow-stamp"
    lines = stamp.read_text(encoding="utf-8").splitlines() if stamp.exists() else []
    found = [float(line.split()[1]) for line in lines if line.startswith("install_s ")]
    return found[-1] if found else None


def plan(arguments: argparse.Namespace, out: Path, with_trl: bool) -> list[Comparison]:
    steps = 12 if arguments.quick else 60
    cold = [] if arguments.quick else [f"model.cache={out / 'models'}"]  # so that the first run also makes its model
    ours = (ASYNC, ONE_AT_A_TIME, STREAMED)
    todo = [
        Comparison(
            "embedded",
            EMBEDDED,
            [f"trainer.steps={steps}", *cold],
            (ASYNC, TRL, ONE_AT_A_TIME, STREAMED) if with_trl else ours,
            range(arguments.seeds),
            out,
            timeout_s=600.0,
        )
    ]
    if with_trl and not arguments.quick:
        todo.append(Comparison("long", LONG, [], (ASYNC, TRL), range(min(2, arguments.seeds)), out, timeout_s=1800.0))
    return todo


def report(todo: list[Comparison], arguments: argparse.Namespace, reason: str, out: Path) -> dict[str, Any]:
    """The figures of the last line; medians over the seeds."""
    embedded, long = todo[0], todo[1] if len(todo) > 1 else None
    runs = [run for comparison in todo for side in comparison.runs.values() for run in side]
    figures: dict[str, Any] = {
        "samples_per_s": embedded.median(ASYNC, "samples_per_s"),
        "trainer_idle_share": embedded.median(ASYNC, "trainer_idle"),
        "rollout_idle_share": embedded.median(ASYNC, "rollout_idle"),
        "async_over_sync": embedded.ratio(ASYNC, ONE_AT_A_TIME, "loop_samples_per_s"),
        "overlap_over_sync": embedded.ratio(STREAMED, ONE_AT_A_TIME, "loop_samples_per_s"),
        "first_run_s": None if arguments.quick else round(embedded.runs[ASYNC][0].wall_s, 1),
        "install_s": recorded_install_s(),
        "over_trl": embedded.ratio(ASYNC, TRL, "samples_per_s"),
        "over_trl_long": long.ratio(ASYNC, TRL, "samples_per_s") if long else None,
        "limiting_part": limiting_part(embedded.runs[ASYNC][0]),
        "limiting_part_long": limiting_part(long.runs[ASYNC][0]) if long else None,
        "trl_samples_per_s": embedded.median(TRL, "samples_per_s"),
        "trl_settings": embedded.runs[TRL][0].settings if TRL in embedded.runs else None,
        "trl_missing": reason or None,
        "heldout_greedy": {
            f"{c.name}_{side}": [run.heldout_greedy for run in c.runs[side]]
            for c in todo
            for side in (ASYNC, TRL)
            if side in c.runs
        },
        "seeds": arguments.seeds,
        "steps": len(embedded.runs[ASYNC][0].step_s),
        "cores": os.cpu_count(),
        "others_used_most": round(max(run.foreign_cpu for run in runs), 2),
    }
    if long:
        figures["samples_per_s_long"] = long.median(ASYNC, "samples_per_s")
        figures["trl_samples_per_s_long"] = long.median(TRL, "samples_per_s")
        figures["trl_settings_long"] = long.runs[TRL][0].settings
    detail = {c.name: {side: [_detail(run) for run in c.runs[side]] for side in c.runs} for c in todo}
    (out / "result.json").write_text(json.dumps({"figures": figures, "runs": detail}, indent=1), encoding="utf-8")
    return figures


def _detail(run: Measured) -> dict[str, Any]:
    return dataclasses.asdict(run) | {
        "samples_per_s": run.samples_per_s,
        "loop_samples_per_s": run.loop_samples_per_s,
        "seconds_to_reward_0.8": run.seconds_to(0.8),
    }


def draw(todo: list[Comparison], file: Path) -> None:
    titles = {"embedded": "594k parameters, sort four digits", "long": "4 M parameters, answers of up to 256 tokens"}
    sides = {ASYNC: "asyncflow", TRL: "trl"}
    draw_curves(
        {titles[c.name]: {word: c.runs[side] for side, word in sides.items() if side in c.runs} for c in todo}, file
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the main job; the last line printed is one JSON object.")
    parser.add_argument("--quick", action="store_true", help=f"12 steps instead of 60, {2 * EDGE} of them left out")
    parser.add_argument("--with-trl", action="store_true", help="against TRL too, which is installed if missing")
    parser.add_argument("--seeds", type=int, help="repetitions, each with a seed of its own (default 3, quick 1)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "main_job", help="emptied first")
    arguments = parser.parse_args(argv)
    if arguments.seeds is None:
        arguments.seeds = 1 if arguments.quick else 3
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is under way is ended on the way out
    out = empty_folder(arguments.out.absolute(), "main_job")
    reason = trl_run.set_up() if arguments.with_trl else ""
    if reason:
        say(reason)
    todo = plan(arguments, out, with_trl=arguments.with_trl and not reason)
    for comparison in todo:
        comparison.measure()
    figures = report(todo, arguments, reason, out)
    draw(todo, out / "curves.png")
    say(f"curves: {out / 'curves.png'}; every step of every run: {out / 'result.json'}")
    print(json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
