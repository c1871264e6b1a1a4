"""Whole runs in which trainer and replicas take turns on the same devices. Real processes."""

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
    """The replica with a device of its own is slow to fill a batch of long answers; the one on the trainer's device
    helps until the batch is there."""
    settings = [*SMALL, "rollout.engine=reference", "rollout.max_new_tokens=48", "rollout.temperature=10"]
    settings += ["trainer.steps=6", "workflow.lend=true", "rollout.max_running=32"]
    job = Job(tmp_path / "runs", DEFAULT, *settings)
    summary = finished(job)
    assert summary["samples_trained"] == 6 * 64 and balanced(summary) and summary["max_lag"] <= 1
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4
    computing = [s[:2] for name in ("train/forward_backward", "train/optimizer") for s in spans(job, name)]
    turns = awake(job, 1)
    assert turns and overlapping(turns, computing) == []
    assert {who for *_, who in spans(job, "rollout/generate")} == {"rollout0", "rollout1"}
    for usage in books(job, "device/generates"):
        assert [usage[kind] for kind in TRAIN_KINDS] == [0, 0, 0]
    assert job.leftovers() == []
