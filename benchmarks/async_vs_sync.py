"""What it brings that tasks run at the same time: asynchronous schedules against one task after the other.

    python benchmarks/async_vs_sync.py [--quick] [--seeds N] [--out FOLDER]

Run it with the Python of .venv, on a machine that does nothing else. The last line printed is one JSON object.
README.md says what is compared and what the keys mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also where the package is not installed

from measured import Measured, median_ratio
from our_side import ROOT, empty_folder, run_ours

from mindspeed_asyncflow.config.load import load_config
from mindspeed_asyncflow.data.builtin_models import ensure_model

CONFIG = ROOT / "configs" / "benchmark" / "long_tail.yaml"
SYNC, STREAMED, ASYNC, BEST = "one_at_a_time", "streamed", "async", "best"
SCHEDULES = {
    SYNC: ["workflow.max_lag=0", "workflow.overlap=false"],
    STREAMED: ["workflow.max_lag=0"],
    ASYNC: ["workflow.max_lag=1"],
    BEST: ["workflow.max_lag=2", "workflow.take=ready"],
}
LAST = 8  # steps whose mean reward is compared
QUIET = 0.15  # share of the machine that others may use before a figure is called rough
TIMEOUT_S = 240.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(seeds: int, steps: int, out: Path) -> dict[str, list[Measured]]:
    """Every schedule once for each seed, all from the same weights with the same prompts in the same order."""
    config = load_config(CONFIG)
    model = ensure_model(config.model, config.data, config.run.seed, lambda text: say(f"  {text}"))
    runs: dict[str, list[Measured]] = {name: [] for name in SCHEDULES}
    for seed in range(seeds):
        # Each second round backwards: a machine that warms up or slows down favours nobody.
        for name in list(SCHEDULES) if seed % 2 == 0 else list(reversed(SCHEDULES)):
            settings = [f"trainer.steps={steps}", f"model.source={os.path.abspath(model)}", *SCHEDULES[name]]
            run = run_ours(name, CONFIG, settings, seed, config.samples_per_step, out, TIMEOUT_S)
            runs[name].append(run)
            say(
                f"  seed {seed}, {name}: {run.loop_samples_per_s:.0f} samples/s, trainer idle {run.trainer_idle:.0%}, "
                f"rollout idle {run.rollout_idle:.0%}, reward {run.rewards[0]:.2f} to {_last_reward(run):.2f}, whole "
                f"process {run.wall_s:.0f} s"
                + (f" (others used {run.foreign_cpu:.0%} of the machine)" if run.foreign_cpu > QUIET else "")
            )
    return runs


def _last_reward(run: Measured) -> float:
    return statistics.fmean(run.rewards[-LAST:])


def _stages_s(run: Measured) -> tuple[float, float]:
    """Seconds of a step that rollout and trainer work, waiting left out."""
    assert run.trainer_idle is not None and run.rollout_idle is not None
    step_s = statistics.fmean(run.step_s)
    return (1 - run.rollout_idle) * step_s, (1 - run.trainer_idle) * step_s


def _median(runs: list[Measured], name: str) -> float:
    return round(statistics.median(getattr(run, name) for run in runs), 3)


def largest_lag(out: Path, name: str, seeds: int) -> int:
    """Of any token that the schedule trained, by the runs' own summaries."""
    files = (out / "runs" / f"{name}_{seed}" / "latest" / "summary.json" for seed in range(seeds))
    return max(json.loads(file.read_text(encoding="utf-8"))["max_lag"] for file in files)


def reward_gap(runs: dict[str, list[Measured]], name: str) -> float | None:
    """Mean reward of the last steps, schedule less one-at-a-time, in standard deviations over seeds; None: one seed."""
    of = {side: [_last_reward(run) for run in runs[side]] for side in (SYNC, name)}
    if len(of[SYNC]) < 2:
        return None
    spread = statistics.fmean(statistics.variance(rewards) for rewards in of.values()) ** 0.5
    return round((statistics.fmean(of[name]) - statistics.fmean(of[SYNC])) / spread, 2)


def figures(runs: dict[str, list[Measured]], out: Path) -> dict[str, Any]:
    """The last line; ratios are medians over the seeds of runs that followed one another."""
    rates = {name: [run.loop_samples_per_s for run in of_name] for name, of_name in runs.items()}
    alone = [statistics.median(times) for times in zip(*map(_stages_s, runs[SYNC]))]
    beside = [statistics.median(times) for times in zip(*map(_stages_s, runs[ASYNC]))]
    return {
        "async_over_sync": median_ratio(rates[ASYNC], rates[SYNC]),
        "best_over_sync": median_ratio(rates[BEST], rates[SYNC]),
        "overlap_over_sync": median_ratio(rates[STREAMED], rates[SYNC]),
        "possible_max": round(sum(alone) / max(alone), 3),
        "rollout_s": round(alone[0], 3),
        "train_s": round(alone[1], 3),
        "rollout_slower_beside": round(beside[0] / alone[0], 3),
        "train_slower_beside": round(beside[1] / alone[1], 3),
        "trainer_idle_share": _median(runs[ASYNC], "trainer_idle"),
        "rollout_idle_share": _median(runs[ASYNC], "rollout_idle"),
        "best_trainer_idle_share": _median(runs[BEST], "trainer_idle"),
        "best_rollout_idle_share": _median(runs[BEST], "rollout_idle"),
        "reward_gap_in_seed_sd": reward_gap(runs, ASYNC),
        "best_reward_gap_in_seed_sd": reward_gap(runs, BEST),
        "max_lag": largest_lag(out, ASYNC, len(runs[ASYNC])),
        "best_max_lag": largest_lag(out, BEST, len(runs[BEST])),
        "best_schedule": " ".join(setting.removeprefix("workflow.") for setting in SCHEDULES[BEST]),
        "seeds": len(runs[SYNC]),
        "steps": len(runs[SYNC][0].step_s),
        "cores": os.cpu_count(),
        "others_used_most": round(max(run.foreign_cpu for of_name in runs.values() for run in of_name), 2),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what asynchrony brings; the last line is one JSON object.")
    parser.add_argument("--quick", action="store_true", help="10 steps instead of 24 and one seed")
    parser.add_argument("--seeds", type=int, help="repetitions, each with a seed of its own (default 3, quick 1)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "benchmarks" / "async_vs_sync", help="emptied first"
    )
    arguments = parser.parse_args(argv)
    if arguments.seeds is None:
        arguments.seeds = 1 if arguments.quick else 3
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is under way is ended on the way out
    out = empty_folder(arguments.out.absolute(), "async_vs_sync")
    runs = measure(arguments.seeds, 10 if arguments.quick else 24, out)
    found = figures(runs, out)
    detail = {name: [dataclasses.asdict(run) for run in of_name] for name, of_name in runs.items()}
    (out / "result.json").write_text(json.dumps({"figures": found, "runs": detail}, indent=1), encoding="utf-8")
    say(f"every step of every run: {out / 'result.json'}")
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
