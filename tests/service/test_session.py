"""Real runs: what a session does beside training."""

import json

import numpy as np
import pytest

from tests.service.test_launch import DEFAULT, SMALL, Job, balanced, finished, trace

pytestmark = pytest.mark.slow


def test_evaluations_beside_training_measure_their_version_while_steps_go_on(tmp_path):
    """Four sampled answers each to 32 prompts, every second version; an eighth of a replica's answers at a time."""
    settings = ["every=2", "prompts=32", "answers=4", "temperature=1.0", "share=0.03"]
    job = Job(
        tmp_path / "runs",
        DEFAULT,
        *SMALL,
        "trainer.steps=8",
        "rollout.engine=reference",
        *(f"evaluation.{setting}" for setting in settings),
    )
    summary = finished(job)
    assert summary["steps"] == 8 and balanced(summary) and summary["max_lag"] == 1
    records = [json.loads(line) for line in (job.folder / "evaluations.jsonl").read_text().splitlines()]
    beside = [r["version"] for r in records if r["beside"]]
    assert beside[0] == 2 and set(beside) <= {2, 4, 6}  # one that finds the last one running is left out
    assert [r["version"] for r in records if not r["beside"]] == [0, 8]
    for r in records:
        scores = np.array(r["scores"])  # every one was scored
        assert scores.shape == (32, 4) and r["unscored"] == 0 and set(np.unique(scores)) <= {0.0, 1.0}
        assert r["mean_at_k"] == pytest.approx(scores.mean())
        assert r["pass_at_k"] == pytest.approx((scores == 1).any(axis=1).mean())
        assert r["mean_at_k"] <= r["pass_at_k"] and len(r["samples"]) == 5
    assert summary["evaluation"]["mean_at_k"] == records[-1]["mean_at_k"] and summary["heldout_greedy"] is None
    assert "4 answers each to 32 held-out prompts at temperature 1" in job.text and "pass@4" in job.text
    spans = [e for e in trace(job) if e["ph"] == "X"]
    measured = [e for e in spans if e["name"] == "rollout/evaluate" and e["args"]["version"] in beside]
    generated = [e for e in spans if e["name"] == "rollout/generate"]
    assert max(e["args"]["rows"] for e in measured) <= 7  # 0.03 x 256
    assert any(g["ts"] < e["ts"] + e["dur"] and e["ts"] < g["ts"] + g["dur"] for e in measured for g in generated)
    first = [e for e in measured if e["args"]["version"] == 2]
    begin, end = min(e["ts"] for e in first), max(e["ts"] + e["dur"] for e in first)
    steps = [e for e in spans if e["name"] == "train/forward_backward" and begin < e["ts"] < end]
    assert steps  # the trainer worked meanwhile
