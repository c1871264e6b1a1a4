"""Samples as they were trained, on disk."""

import threading

import numpy as np

from mindspeed_asyncflow.workflow.sample_log import SampleLog, read_step
from tests.workflow.recorded import REPLICAS, rows_of


def test_samples_come_back_with_all_columns_and_versions(recorded):
    rng = np.random.default_rng(7)
    given = [rows_of(step, rng) for step in range(3)]
    step = read_step(recorded, 1, REPLICAS)
    order = np.lexsort((step.members, step.groups))
    assert list(zip(step.groups[order], step.members[order])) == [(g, m) for g in range(4, 8) for m in (0, 1)]
    for name in ("advantage", "reward", "finish"):
        np.testing.assert_array_equal(step.columns[name][order], given[1][name])
    for name in ("response_ids", "rollout_logprobs"):
        for got, expected in zip(step.columns[name].take(order), given[1][name], strict=True):
            np.testing.assert_array_equal(got, expected)
    assert set(step.versions[0].tolist()) == {0}


def chunk(size):
    return (
        np.array([5]),
        {5: (0, 0)},
        {5: (0, 0)},
        {"advantage": np.zeros(1, np.float32), "x": np.zeros(size, np.uint8)},
    )


def test_recording_stops_at_its_limit_and_says_from_which_step_on(tmp_path, caplog):
    log = SampleLog(tmp_path, 0, 1000)
    with caplog.at_level("WARNING", logger="asyncflow"):
        for version in (1, 2, 3):
            log.add(*chunk(450))
            log.finish(version)
    log.close()
    assert [f.name for f in sorted(tmp_path.iterdir())] == ["step_000000_replica_0.npz", "step_000001_replica_0.npz"]
    (said,) = caplog.messages
    assert "from step 2 on" in said and "observe.events_mb" in said


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, caplog, monkeypatch):
    log = SampleLog(tmp_path, 0, 1000)
    monkeypatch.setattr(np, "savez", full)
    with caplog.at_level("WARNING", logger="asyncflow"):
        log.add(*chunk(1))
        log.finish(1)
        log.close()
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text


def full(*args, **arrays):
    raise OSError(28, "No space left on device")


def test_nothing_is_recorded_after_a_write_that_failed_late(tmp_path, monkeypatch):
    going, savez = threading.Event(), np.savez

    def first_fails(*args, **arrays):
        monkeypatch.setattr(np, "savez", savez)
        assert going.wait(5)
        full()

    monkeypatch.setattr(np, "savez", first_fails)
    log = SampleLog(tmp_path, 0, 10**6)
    for version in (1, 2):
        log.add(*chunk(10))
        if version == 2:
            threading.Timer(0.1, going.set).start()
        log.finish(version)
    log.close()
    assert list(tmp_path.iterdir()) == []
