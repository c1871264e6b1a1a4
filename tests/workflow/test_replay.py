"""The same run again from its record."""

import asyncio
import contextlib

import pytest

from mindspeed_asyncflow.errors import RecordError
from mindspeed_asyncflow.workflow.record import read_record, recorded_steps
from mindspeed_asyncflow.workflow.replay import Replay
from mindspeed_asyncflow.workflow.sample_log import file_of
from tests.workflow.recorded import REPLICAS, Bench, Summing, edit_events, edit_samples, record, settings


def replay(folder, config=None, engines=None, steps=None):
    config = config or settings()
    found = read_record(folder / "events.jsonl")
    there = recorded_steps(found, folder, REPLICAS)
    said = []
    with contextlib.ExitStack() as stack:
        bench = Bench(config, stack, engines)
        again = Replay(config, found, folder, bench.dock, bench.trainers, [0, 1], bench.path, bench.table, said.append)
        verdict = asyncio.run(again.run(there if steps is None else steps))
        assert verdict.difference or bench.dock.stats()["used_bytes"] == 0
    assert len(said) == verdict.repeated
    return verdict


def test_a_recorded_run_is_repeated_bit_for_bit(recorded):
    verdict = replay(recorded)
    assert (verdict.repeated, verdict.difference) == (4, "")


def test_only_the_first_steps_where_so_many_are_asked_for(recorded):
    assert replay(recorded, steps=2).repeated == 2


def test_a_changed_advantage_is_found_in_the_step_that_trained_it_with_the_tensor_that_it_moved(recorded):
    def change(arrays):
        arrays["value.advantage"][1] += 0.01

    edit_samples(recorded, 1, 1, change)
    verdict = replay(recorded)
    assert verdict.repeated == 1
    assert verdict.difference == "version 2: 'w1' rows 0 to 4, columns 0 to 1 has other bytes; 1 of 2 shards differ"


def test_other_starting_weights_are_named_before_anything_is_trained(recorded):
    verdict = replay(recorded, engines=[Summing(0), Summing(1, start=1.5)])
    assert verdict.repeated == 0
    assert verdict.difference.startswith("version 0: 'w1' rows 0 to") and "(model.source)" in verdict.difference


def test_rows_in_another_order_are_other_bits(recorded):
    def change(events):
        for event in events:
            if event["kind"] == "trained" and event["step"] == 2:
                event["plan"][0][0].reverse()
        return events

    edit_events(recorded, change)
    verdict = replay(recorded)
    assert verdict.repeated == 2 and verdict.difference.startswith("version 3")


def test_a_changed_metric_is_named_with_both_values(recorded):
    def change(events):
        next(e for e in events if e["kind"] == "finished")["lr"] = 0.2
        return events

    edit_events(recorded, change)
    assert replay(recorded).difference == "version 1: lr was 0.2 and is 0.1"


def test_a_row_that_is_trained_and_not_recorded_is_an_error(recorded):
    def change(events):
        next(e for e in events if e["kind"] == "trained")["plan"][0][0][0] = [99, 0]
        return events

    edit_events(recorded, change)
    with pytest.raises(RecordError, match=r"\(99, 0\), which is not among its samples"):
        replay(recorded)


def test_rows_older_than_the_law_allows_are_refused_as_they_would_be_in_a_run(recorded):
    edit_samples(recorded, 2, 0, lambda arrays: arrays["row.oldest"].fill(0))
    with pytest.raises(RecordError, match=r"step 2 trained group \d+ with tokens older than workflow.max_lag 1"):
        replay(recorded)


def test_a_run_that_masked_old_tokens_is_repeated_with_the_same_masks(tmp_path):
    record(tmp_path, settings(stale="mask"))
    assert replay(tmp_path, settings(stale="mask")).repeated == 4

    def change(events):
        next(e for e in events if e["kind"] == "trained" and e["step"] == 2)["rules"]["oldest_allowed"] = 0
        return events

    edit_events(tmp_path, change)
    verdict = replay(tmp_path, settings(stale="mask"))
    assert verdict.repeated == 2 and "actor/tokens_count was" in verdict.difference


def test_a_step_without_recorded_samples_ends_what_can_be_repeated(recorded):
    file_of(recorded, 1, 1).unlink()
    assert replay(recorded).repeated == 1


def test_torn_samples_are_named(recorded):
    path = file_of(recorded, 1, 0)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RecordError, match=r"step_000001_replica_0\.npz is torn or changed"):
        replay(recorded)


def test_a_flipped_byte_in_the_samples_is_found_when_they_are_read(recorded):
    path = file_of(recorded, 0, 0)
    data = bytearray(path.read_bytes())
    data[data.index(b"NUMPY") + 128] ^= 1  # past the array's header
    path.write_bytes(data)
    with pytest.raises(RecordError, match="torn or changed"):
        replay(recorded)


def test_the_torn_last_line_of_a_killed_run_is_left_out(recorded):
    path = recorded / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    found = read_record(path)
    assert found.torn and [step.version for step in found.steps] == [1, 2, 3]
    assert replay(recorded).repeated == 3
