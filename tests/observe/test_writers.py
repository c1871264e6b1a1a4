"""What is on disk after each step."""

import json
import math

import pytest

from mindspeed_asyncflow.errors import MetricError
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.trackers import EventFiles, Trackers
from mindspeed_asyncflow.observe.writers import MetricsWriter, SamplesWriter, SampleText


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "t", "")


def test_a_step_can_be_read_before_the_writer_is_closed(folder):
    writer = MetricsWriter(folder)
    writer.write(0, {"reward/mean": 0.25, "actor/lr": 1e-4})
    record = json.loads(folder.metrics.read_text())
    writer.close()
    assert record["step"] == 0 and record["reward/mean"] == 0.25 and record["time"] > 1e9


def test_not_finite_values_become_null_because_json_has_no_nan(folder):
    writer = MetricsWriter(folder)
    writer.write(0, {"actor/grad_norm": math.nan, "actor/pg_loss": math.inf})
    writer.close()
    record = json.loads(folder.metrics.read_text(), parse_constant=pytest.fail)
    assert record["actor/grad_norm"] is None and record["actor/pg_loss"] is None


def test_an_unknown_name_is_refused_and_leaves_no_half_line(folder):
    writer = MetricsWriter(folder)
    with pytest.raises(MetricError, match="reward/mean"):
        writer.write(0, {"reward/avg": 0.25})
    writer.close()
    assert folder.metrics.read_text() == ""


def test_tensorboard_shows_the_same_names_steps_and_values(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(folder, Trackers({"tensorboard": lambda: EventFiles(folder.tensorboard)}))
    writer.write(0, {"reward/mean": 0.25})
    writer.write(1, {"reward/mean": 0.5})
    events = EventAccumulator(str(folder.tensorboard))  # before close: each step is flushed
    events.Reload()
    writer.close()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0.25), (1, 0.5)]


def test_samples_are_readable_and_an_answer_cannot_pose_as_a_record(folder):
    writer = SamplesWriter(folder)
    evil = "ab\n--- step 9 | version 0"
    writer.write(
        3, SampleText(version=2, prompt="sort: b a", answer=evil, reward=0.5, truth="a b", lag=1, issue=(0, 17))
    )
    writer.write(3, SampleText(version=2, prompt="x", answer="\ud800", reward=0.0, truth="", lag=0))
    text = (folder.samples / "step_000003.txt").read_text(encoding="utf-8")
    assert text.startswith("--- step 3 | version 2 | lag 1 | reward 0.5 | prompt 0:17\nprompt: sort: b a\nanswer: ab\n")
    assert sum(line.startswith("--- step") for line in text.splitlines()) == 2


def test_metrics_are_written_on_after_their_file_was_cut(folder):
    writer = MetricsWriter(folder, Trackers({"tensorboard": lambda: EventFiles(folder.tensorboard)}))
    for step in range(3):
        writer.write(step, {"actor/loss": 1.0})
    with writer.closed():
        first = folder.metrics.read_text().splitlines(keepends=True)[0]
        folder.metrics.write_text(first)
    writer.write(1, {"actor/loss": 2.0})
    writer.close()
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [(row["step"], row["actor/loss"]) for row in rows] == [(0, 1.0), (1, 2.0)]
