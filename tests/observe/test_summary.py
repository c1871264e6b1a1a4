"""summary.json adds up, is written whole, and is told in words."""

import json

import pytest

from mindspeed_asyncflow.errors import MetricError
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.summary import REQUIRED, check_summary, closing_words, duration, write_summary

GOOD = {
    "reward_first": 0.21,
    "reward_last": 0.86,
    "heldout_greedy": 0.97,
    "steps": 60,
    "wall_s": 124.2,
    "max_lag": 1,
    "samples_issued": 15872,
    "samples_trained": 15360,
    "samples_dropped": 8,
    "samples_open": 504,
    "rollout_train_logprob_gap_max": 1.4e-6,
}


@pytest.mark.parametrize("key", REQUIRED)
def test_every_required_key_is_missed(key):
    check_summary(GOOD)
    with pytest.raises(MetricError, match=key):
        check_summary({k: v for k, v in GOOD.items() if k != key})


@pytest.mark.parametrize("key", ["samples_issued", "samples_trained", "samples_dropped", "samples_open"])
def test_one_lost_or_doubled_sample_is_found(key):
    with pytest.raises(MetricError, match="lost or counted twice"):
        check_summary(GOOD | {key: GOOD[key] + 1})


@pytest.mark.parametrize(
    "change",
    [
        {"samples_open": -1, "samples_issued": 15367},
        {"steps": 60.0},
        {"steps": None},
        {"reward_last": float("nan")},
        {"wall_s": "124"},
        {"dropped_by_reason": {"stale": 7}},
    ],
)
def test_values_that_cannot_be_right_are_refused(change):
    with pytest.raises(MetricError):
        check_summary(GOOD | change)


def test_a_refused_summary_leaves_the_old_file(tmp_path):
    folder = RunFolder.create(tmp_path, "t", "")
    write_summary(folder, GOOD)
    with pytest.raises(MetricError):
        write_summary(folder, GOOD | {"steps": -1})
    assert json.loads(folder.summary.read_text()) == GOOD
    assert not list(folder.path.glob("*.tmp"))


def test_words_of_a_good_run_name_result_ledger_and_place(tmp_path):
    words = closing_words(GOOD | {"dropped_by_reason": {"stale": 8}, "task": "sort4", "model": "tiny"}, tmp_path)
    for part in ("tiny on sort4", "60 steps", "2 min 04 s", "0.21 to 0.86", "0.97", "8 dropped (stale 8)",
                 "504 still open", "1 version old", str(tmp_path), "report.html"):  # fmt: skip
        assert part in words, part
    assert "FAILED" not in words and "did not learn" not in words


def test_words_pass_on_why_a_run_ended_early():
    assert "Note: data ends after 7 steps." in closing_words(GOOD | {"note": "data ends after 7 steps"})
    assert "Note" not in closing_words(GOOD | {"note": ""})


def test_words_say_what_held_the_run_back_where_that_is_known():
    sentence = "rollout-bound: trainer waits 31 %; try workflow.max_lag 2"
    assert f"What held it back: {sentence}." in closing_words(GOOD | {"bottleneck": sentence})
    assert "held it back" not in closing_words(GOOD | {"bottleneck": ""})


def test_words_say_when_nothing_was_learned():
    assert "did not learn" in closing_words(GOOD | {"reward_last": 0.21})
    assert "worse" in closing_words(GOOD | {"reward_last": 0.1})


def test_words_of_a_run_that_failed_before_the_first_step_give_the_root_error(tmp_path):
    nothing = dict.fromkeys(REQUIRED) | dict.fromkeys([k for k in REQUIRED if k.startswith("samples")] + ["steps"], 0)
    failed = nothing | {"error": "WorkerLost: rollout0 died", "wall_s": 3.0}
    check_summary(failed)
    words = closing_words(failed, tmp_path)
    assert words.startswith("The run FAILED after 0 steps") and "WorkerLost: rollout0 died" in words
    assert "log.txt" in words and "None" not in words


def test_words_of_an_interrupted_run_point_to_no_error(tmp_path):
    words = closing_words(GOOD | {"error": "Interrupted: stopped by a signal"}, tmp_path)
    assert words.startswith("Stopped by a signal after 60 steps")
    by_client = closing_words(GOOD | {"error": "Interrupted: stopped by its client"}, tmp_path)
    assert by_client.startswith("Stopped by its client after 60 steps")
    assert "error" not in words and "log.txt" not in words and "report.html" in words


def test_a_run_that_ended_early_says_how_it_goes_on_or_that_its_steps_are_lost(tmp_path):
    stopped = GOOD | {"error": "Interrupted: stopped by a signal"}
    assert "To go on" not in closing_words(stopped, tmp_path)
    assert "these steps are lost; trainer.save_every" in closing_words(stopped, tmp_path)
    assert "are lost" not in closing_words(stopped | {"steps": 0}, tmp_path) + closing_words(GOOD, tmp_path)
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    assert closing_words(stopped, tmp_path).endswith(f"the same command with --run-folder {tmp_path}")
    assert "To go on" not in closing_words(GOOD, tmp_path)


def test_words_of_a_run_that_went_on_tell_which_steps_took_its_seconds():
    again = GOOD | {"steps_before": 48}
    assert closing_words(again).startswith("Trained the policy for 60 steps, the last 12 in 2 min 04 s.")
    failed = closing_words(again | {"error": "WorkerLost: rollout0 died"})
    assert failed.startswith("The run FAILED after 60 steps, the last 12 in 2 min 04 s: WorkerLost")
    stopped = closing_words(again | {"error": "Interrupted: stopped by a signal", "steps_before": 60})
    assert stopped.startswith("Stopped by a signal after 60 steps, none of them in the last 2 min 04 s.")


def test_the_difference_in_bfloat16_has_its_reason_and_its_limit_beside_it():
    limit = {"rollout_train_logprob_gap_limit": 0.5, "rollout_train_logprob_gap_max": 0.19}
    words = closing_words(GOOD | limit | {"dtype": "bfloat16"})
    said = "rounding in bfloat16 (model.dtype) gives up to about 0.3, and above 0.5 a run stops."
    assert f"differ by at most 1.9e-01 nat per token; {said}" in words
    assert "nat per token." in closing_words(GOOD | limit | {"dtype": "float32"})


def test_words_of_a_run_without_a_step_have_no_evaluation():
    assert "Greedy answers" in closing_words(GOOD | {"heldout_first": 0.3})
    assert "Greedy answers" not in closing_words(GOOD | {"heldout_first": 0.97, "steps": 0})


def test_durations_read_like_speech():
    assert [duration(s) for s in (0.25, 9.97, 59, 59.97, 85.2, 3725)] == [
        "0.2 s",
        "10 s",
        "59 s",
        "1 min 00 s",
        "1 min 25 s",
        "1 h 02 min",
    ]
