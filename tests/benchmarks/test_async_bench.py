"""The benchmark of asynchronous schedules: its last line follows from what was measured."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import async_vs_sync as bench
from measured import Measured

PROMISED = [
    "async_over_sync",
    "overlap_over_sync",
    "trainer_idle_share",
    "rollout_idle_share",
    "reward_gap_in_seed_sd",
    "max_lag",
    "possible_max",
]


def run(name, seed, step_s, trainer_busy_s, rollout_busy_s, reward=0.5):
    return Measured(
        name, seed, 100, [step_s] * 10, [reward] * 10, None, 30.0, 0.0, 1 - trainer_busy_s / step_s,
        1 - rollout_busy_s / step_s,
    )  # fmt: skip


def figures(out, rewards=((0.5, 0.6, 0.7), (0.45, 0.55, 0.65))):
    """One at a time: 0.4 s of rollout, then 0.3 s of training, then 0.1 s of nothing."""
    timed = {
        bench.SYNC: [run(bench.SYNC, s, 0.8, 0.3, 0.4, r) for s, r in enumerate(rewards[0])],
        bench.STREAMED: [run(bench.STREAMED, s, 0.64, 0.3, 0.4) for s in range(len(rewards[0]))],
        bench.ASYNC: [run(bench.ASYNC, s, 0.5, 0.36, 0.48, r) for s, r in enumerate(rewards[1])],
        bench.BEST: [run(bench.BEST, s, 0.4, 0.36, 0.39) for s in range(len(rewards[0]))],
    }
    for name in timed:
        for seed in range(len(rewards[0])):
            folder = out / "runs" / f"{name}_{seed}" / "latest"
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text(json.dumps({"max_lag": seed}))
    return bench.figures(timed, out)


def test_the_last_line_follows_from_the_runs(tmp_path):
    found = figures(tmp_path)
    assert set(PROMISED) <= found.keys()
    assert found["async_over_sync"] == 1.6 and found["overlap_over_sync"] == 1.25 and found["best_over_sync"] == 2.0
    assert found["possible_max"] == 1.75  # (0.4 + 0.3) / 0.4
    assert (found["rollout_slower_beside"], found["train_slower_beside"]) == (1.2, 1.2)
    assert (found["trainer_idle_share"], found["rollout_idle_share"]) == (0.28, 0.04)
    assert found["max_lag"] == 2


def test_the_reward_gap_is_in_standard_deviations_over_seeds(tmp_path):
    assert figures(tmp_path)["reward_gap_in_seed_sd"] == pytest.approx(-0.5)


def test_one_seed_has_no_reward_gap(tmp_path):
    assert figures(tmp_path, rewards=((0.5,), (0.4,)))["reward_gap_in_seed_sd"] is None


def test_the_schedules_are_settings_that_a_run_accepts():
    for settings in bench.SCHEDULES.values():
        bench.load_config(bench.CONFIG, settings)
