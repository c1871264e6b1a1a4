"""A whole run whose weights come by vllm-ascend's own transfer, over gloo in place of HCCL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
STEPS = 4
SETTINGS = [
    f"trainer.steps={STEPS}",
    *("workflow.groups_per_step=8", "evaluation.prompts=0", "trainer.lr_warmup_steps=0", "run.platform=cpu"),
    *("rollout.ascend.transfer=hccl", "rollout.ascend.bucket_mb=1"),
]


ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def command(folder: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "mindspeed_asyncflow", "train", str(ROOT / "configs" / "qwen_tiny_cpu.yaml")]
    return words + [word for setting in (f"run.folder={folder}", *SETTINGS, *more) for word in ("--set", setting)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run."""
    folder = tmp_path_factory.mktemp("native") / "runs"
    done = subprocess.run(command(folder), cwd=ROOT, env=ENVIRON, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "latest"


def spans(run: Path, name: str) -> list[dict[str, Any]]:
    events = json.loads((run / "trace" / "trace.json").read_text())["traceEvents"]
    return sorted((e for e in events if e["ph"] == "X" and e["name"] == name), key=lambda e: e["ts"])


def test_it_trains_to_its_end_under_the_checks_of_every_run(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["samples_trained"] == STEPS * 8 * 8 and summary["max_lag"] <= 1
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4


def test_each_version_that_a_replica_loads_was_sent_to_it_once_and_while_it_loaded(run: Path) -> None:
    sent, loaded = spans(run, "send/version"), spans(run, "rollout/load_weights")
    versions = Counter(span["args"]["version"] for span in sent)
    assert versions == Counter(span["args"]["version"] for span in loaded)
    assert len(versions) >= STEPS and max(versions.values()) == 1
    for send, load in zip(sent, loaded, strict=True):
        assert send["ts"] < load["ts"] + load["dur"] and load["ts"] < send["ts"] + send["dur"]


@pytest.mark.nightly
def test_a_sender_that_is_killed_takes_its_replica_with_it_and_both_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    endless = ["trainer.steps=100000", "data.epochs=100000", "trainer.lr=1e-5", "rollout.replicas=2"]
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(command(folder, *endless), cwd=ROOT, env=ENVIRON, stdout=out, stderr=subprocess.STDOUT)
    latest = folder / "latest"

    def until(happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300.0
        while not happened():
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()[-3000:]
            time.sleep(0.2)

    def steps() -> int:
        return len((latest / "metrics.jsonl").read_text().splitlines()) if (latest / "metrics.jsonl").exists() else 0

    def pids() -> dict[str, int]:
        return {name: entry["pid"] for name, entry in json.loads((latest / "processes.json").read_text()).items()}

    try:
        until(lambda: steps() >= 3)
        before, pair = pids(), {"sender0", "rollout0"}
        os.kill(before["sender0"], signal.SIGKILL)
        until(lambda: "rollout0 is back" in (latest / "log.txt").read_text())
        after, seen = pids(), steps()
        assert {name for name in before if before[name] != after[name]} == pair
        until(lambda: steps() >= seen + 5)
        job.send_signal(signal.SIGINT)
        assert job.wait(60.0) == 130
    finally:
        job.kill()
    summary = json.loads((latest / "summary.json").read_text())
    assert summary["max_lag"] <= 1 and summary["samples_dropped"] == 0
    assert summary["samples_issued"] == summary["samples_trained"] + summary["samples_open"]
