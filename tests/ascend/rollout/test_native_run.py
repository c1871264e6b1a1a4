"""Weights from a sender process to a real vLLM engine by vLLM's own verbs, over gloo in place of HCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.bench import TOLERANCE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.ascend.rollout.native_run", str(tmp_path_factory.mktemp("native"))]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_broadcast_version_is_served_and_running_answers_know_the_cut(found: dict[str, Any]) -> None:
    """Expert weights too; a bucket is smaller than the largest tensor (known issue 19)."""
    hccl = found["hccl"]
    assert hccl["transports"] == ["hccl"] and hccl["before"] < TOLERANCE
    loaded, published = hccl["fingerprint"]
    assert loaded == published and hccl["b"] < TOLERANCE
    (old, start, cut), (new, again, end) = hccl["spans"]
    assert (old, start, new, again, end) == (0, 0, 1, cut, 120) and 0 < cut < 120 == hccl["answer"]
    assert max(hccl["span_errors"]) < TOLERANCE


def test_another_version_than_asked_for_is_not_served(found: dict[str, Any]) -> None:
    said, state = found["hccl"]["other version"]
    assert "the sender gave version 2" in said and state == "DIRTY"


def test_bytes_that_change_on_the_way_are_not_served_and_the_next_update_heals(found: dict[str, Any]) -> None:
    said, state = found["hccl"]["spoilt"]
    assert "1 tensors have other bytes than were sent" in said and state == "DIRTY"
    loaded, published, state, error = found["hccl"]["healed"]
    assert loaded == published and state == "RUNNING" and error < TOLERANCE


def test_handles_reach_a_model_that_nobody_else_made_ready(found: dict[str, Any]) -> None:
    """npu_ipc of 0.27: its own life cycle prepares nothing, so that ours must. The adapter took its way for NPUs."""
    assert found["npu_ipc"]["answers"] == [20]
    assert max(found["npu_ipc"]["errors"]) < TOLERANCE


def test_a_transfer_that_lacks_a_tensor_is_not_served(found: dict[str, Any]) -> None:
    said, state = found["npu_ipc"]["short"]
    assert "44 of 45 tensors reached the model" in said and "model.norm.weight" in said and state == "DIRTY"
