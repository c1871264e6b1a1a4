"""Whole runs in which trainer and replicas take turns on the same devices. Real processes."""

import json

import pytest
from safetensors.numpy import load_file

from tests.service.test_launch import DEFAULT, SMALL, Job, balanced, finished, spans, trace

pytestmark = pytest.mark.slow

TRAIN_KINDS = ("train weights", "gradients", "optimizer")
GENERATION_KINDS = ("generation weights", "kv cache")
ON_POLICY = [*SMALL, "trainer.steps=2", "workflow.max_lag=0"]
REFERENCE = [*ON_POLICY, "rollout.engine=reference"]


def books(job, event):
    """What every trainer rank found on its device when it had changed hands: [bytes by kind]."""
    found = [e["args"] for e in trace(job) if e["name"] == event]
    assert found
    return found


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_colocated_in_place_trains_the_weights_of_the_separated_run_bit_for_bit(tmp_path, ranks):
    """Trainer rank and replica of a device are one process; nothing of one side is there while the other works."""
    settings = [*REFERENCE, f"trainer.tensor_parallel={ranks}", f"rollout.replicas={ranks}"]
    weights = []
    for schedule in ("separated", "colocated"):
        job = Job(tmp_path / schedule, DEFAULT, *settings, f"workflow.schedule={schedule}")
        summary = finished(job)
        assert summary["samples_trained"] == 2 * 64 and balanced(summary) and summary["max_lag"] == 0
        assert summary["rollout_train_logprob_gap_max"] <= 2e-4
        weights.append(load_file(job.folder / "hf" / "model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][k] == weights[1][k]).all() for k in weights[0])
    for usage in books(job, "device/generates"):
        assert [usage[kind] for kind in TRAIN_KINDS] == [0, 0, 0] and usage["generation weights"] > 0
    for usage in books(job, "device/trains"):
        assert [usage[kind] for kind in GENERATION_KINDS] == [0, 0] and usage["train weights"] and usage["gradients"]
    assert usage["optimizer"] > usage["train weights"]  # moments, from the first step on
    assert job.leftovers() == []


def awake(job, index):
    """[begin, end] in microseconds of the times between waking and sleeping of a replica."""
    begins = [begin for begin, _, who in spans(job, "device/rouse") if who == f"rollout{index}"]
    ends = [end for _, end, who in spans(job, "device/rest") if who == f"rollout{index}"]
    after = [min(end for end in [*ends, float("inf")] if end > begin) for begin in begins]
    return list(zip(begins, after))


def overlapping(times, others):
    return [(a, b) for a in times for b in others if a[0] < b[1] and b[0] < a[1]]


def test_colocated_vllm_sleeps_while_the_trainer_computes_and_never_both_are_awake(tmp_path):
    job = Job(tmp_path / "runs", DEFAULT, *ON_POLICY, "trainer.steps=3", "workflow.schedule=colocated")
    summary = finished(job)
    assert summary["samples_trained"] == 3 * 64 and balanced(summary) and summary["max_lag"] == 0
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4
    computing = [s[:2] for name in ("train/forward_backward", "train/optimizer") for s in spans(job, name)]
    turns = awake(job, 0)
    assert len(turns) == 4 and len(computing) >= 6  # before each step, and for the last evaluation
    assert overlapping(turns, computing) == []
    for usage in books(job, "device/generates"):
        assert [usage[kind] for kind in TRAIN_KINDS] == [0, 0, 0]
    assert job.leftovers() == []


def test_lent_devices_answer_while_the_trainer_waits_and_what_is_interrupted_goes_on_elsewhere(tmp_path):
    """Long answers: the replica on the trainer's device is stopped in the middle of them, and no sample is lost."""
    settings = [*SMALL, "rollout.engine=reference", "rollout.max_new_tokens=120", "rollout.temperature=10"]
    settings += ["trainer.steps=6", "trainer.save_every=2", "workflow.lend=true", "workflow.max_lag=2"]
    job = Job(tmp_path / "runs", DEFAULT, *settings, "rollout.max_running=16")
    summary = finished(job)
    assert (summary["samples_trained"], summary["samples_dropped"]) == (6 * 64, 0) and balanced(summary)
    assert summary["max_lag"] <= 2 and summary["rollout_train_logprob_gap_max"] <= 2e-4
    computing = [s[:2] for name in ("forward_backward", "optimizer", "save") for s in spans(job, f"train/{name}")]
    turns = awake(job, 1)
    assert turns and overlapping(turns, computing) == []
    events = [json.loads(line) for line in (job.folder / "events" / "events.jsonl").read_text().splitlines()]
    assert any(e["kind"] == "generated" and e["replica"] == 1 and e["unfinished"] for e in events)
    for usage in books(job, "device/generates"):
        assert [usage[kind] for kind in TRAIN_KINDS] == [0, 0, 0]
    assert job.leftovers() == []
