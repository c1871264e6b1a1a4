"""Our side of a comparison: `python -m mindspeed_asyncflow train`, and what its run folder says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from measured import Measured

ROOT = Path(__file__).resolve().parent.parent
PASSIVE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # as scripts/launch_qwen_grpo.sh
PARTS = {
    "generation": "timing_s/gen",
    "forward and backward": "timing_s/forward_backward",
    "optimizer": "timing_s/optim_step",
    "publishing weights": "weight_sync/publish_exposed_s",
    "loading weights": "timing_s/update_weights",
}


def empty_folder(out: Path, benchmark: str) -> Path:
    """`out` without what an earlier call of `benchmark` left there; a folder that is not from it is left alone."""
    mark = out / f".{benchmark}"
    if out.exists() and any(out.iterdir()) and not mark.exists():
        raise SystemExit(f"{out} is not empty and was not made by {benchmark}.py; give another --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    mark.touch()
    return out


def foreign_cpu() -> float:
    """Share of all cores in use over the last second: by others, as nothing of ours runs when this is asked."""
    return psutil.cpu_percent(interval=1.0) / 100


def run_command(command: Sequence[str], log: Path, threads: dict[str, str], timeout_s: float) -> float:
    """Run to the end with output to `log`; seconds. Of the OpenMP variables the command sees `threads` and no other.

    Raises RuntimeError on failure and when `timeout_s` is over.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=inherited | threads,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    if code != 0:
        words = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        what = f"did not end in {timeout_s:g} s" if code is None else f"exited with {code}"
        raise RuntimeError(f"{' '.join(command)} {what}; {log} ends with:\n{words}")
    return time.perf_counter() - began


def _end(process: subprocess.Popen) -> None:
    for number, patience_s in ((signal.SIGINT, 20.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue


def run_ours(
    label: str, config: Path, overrides: Sequence[str], seed: int, samples_per_step: int, out: Path, timeout_s: float
) -> Measured:
    """One training run in `out`/runs."""
    folder = out / "runs" / f"{label}_{seed}"
    command = [sys.executable, "-m", "mindspeed_asyncflow", "train", str(config)]
    for override in [*overrides, f"run.seed={seed}", f"run.folder={folder}"]:
        command += ["--set", override]
    foreign = foreign_cpu()
    wall_s = run_command(command, out / f"{label}_{seed}.log", PASSIVE, timeout_s)
    return read_run(folder / "latest", label, seed, samples_per_step, wall_s, foreign)


def read_run(
    folder: Path, label: str, seed: int, samples_per_step: int, wall_s: float, foreign: float = 0.0
) -> Measured:
    """Figures of the training loop alone: its last line is written before the closing evaluation begins."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    step_s = [line["timing_s/step"] for line in lines]

    def share(name: str) -> float:
        return sum(line[name] * seconds for line, seconds in zip(lines, step_s)) / sum(step_s)

    return Measured(
        label=label,
        seed=seed,
        samples_per_step=samples_per_step,
        step_s=step_s,
        rewards=[line["reward/mean"] for line in lines],
        heldout_greedy=summary["heldout_greedy"],
        wall_s=wall_s,
        foreign_cpu=foreign,
        trainer_idle=share("idle/trainer"),
        rollout_idle=share("idle/rollout"),
        parts_s={name: statistics.fmean(line.get(metric, 0.0) for line in lines) for name, metric in PARTS.items()},
    )
