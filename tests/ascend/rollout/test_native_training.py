"""A whole run whose weights come by vllm-ascend's own transfer, over gloo in place of HCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run."""
    folder = tmp_path_factory.mktemp("native") / "runs"
    command = [sys.executable, "-m", "mindspeed_asyncflow", "train", str(ROOT / "configs" / "qwen_tiny_cpu.yaml")]
    for setting in (f"run.folder={folder}", *SETTINGS):
        command += ["--set", setting]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
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
