"""Spans of several processes become one Chrome trace."""

import json
import threading
import time

import pytest

from mindspeed_asyncflow.errors import MetricError
from mindspeed_asyncflow.observe.trace import Tracer, configure, get_tracer, merge_traces, read_events


def test_spans_of_two_processes_keep_wall_clock_names_and_arguments(tmp_path):
    before = time.time()
    first, second = Tracer(tmp_path, "trainer0"), Tracer(tmp_path, "rollout0")
    with first.span("train/forward_backward", lane="trainer0", step=3):
        time.sleep(0.002)
    second.instant("weights", lane="rollout0")
    second.counter("queue", train=4)
    first.close()
    second.close()
    after = time.time()

    events = json.loads(merge_traces(tmp_path).read_text())["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert {("process_name", "trainer0"), ("process_name", "rollout0"), ("thread_name", "trainer0")} <= names
    span = next(e for e in events if e["ph"] == "X")
    assert span["name"] == "train/forward_backward" and span["args"] == {"step": 3}
    assert before * 1e6 - 1000 <= span["ts"] <= after * 1e6 + 1000
    assert 2000 <= span["dur"] <= (after - before) * 1e6 + 1000
    assert next(e for e in events if e["ph"] == "C")["args"] == {"train": 4}
    assert next(e for e in events if e["ph"] == "i")["pid"] != span["pid"]


def test_a_span_is_recorded_when_its_body_raises(tmp_path):
    tracer = Tracer(tmp_path, "p")
    with pytest.raises(ValueError), tracer.span("fails"):
        raise ValueError
    tracer.close()
    assert [e["name"] for e in read_events(tmp_path)] == ["fails"]


def test_overlapping_spans_of_a_lane_get_threads_of_their_own_and_nested_ones_share(tmp_path):
    def add(name, start_ms, end_ms):
        tracer._add("X", "requests", name, start_ms * 1_000_000, end_ms * 1_000_000, {})

    tracer = Tracer(tmp_path, "p")
    for name, start, end in (("a", 0, 10), ("inside a", 2, 5), ("overlaps a", 8, 12), ("after", 12, 13)):
        add(name, start, end)
    tracer.close()
    events = json.loads(merge_traces(tmp_path).read_text())["traceEvents"]
    tid = {e["name"]: e["tid"] for e in events if e["ph"] == "X"}
    assert tid["a"] == tid["inside a"] == tid["after"] != tid["overlaps a"]
    assert "requests (2)" in {e["args"]["name"] for e in events if e["ph"] == "M"}


def test_events_reach_the_disk_within_a_second_of_further_events(tmp_path):
    tracer = Tracer(tmp_path, "p")
    tracer.instant("early")
    assert read_events(tmp_path) == []
    tracer._flush_at = 0  # as if a second had passed
    tracer.instant("later")
    assert [e["name"] for e in read_events(tmp_path)] == ["early", "later"]
    tracer.close()


def test_the_cut_line_of_a_killed_process_is_left_out_but_a_broken_file_is_an_error(tmp_path):
    tracer = Tracer(tmp_path, "p")
    tracer.instant("whole")
    tracer.close()
    path = next(tmp_path.glob("p-*.jsonl"))
    whole = path.read_text()
    path.write_text(whole + '[["X","main","cu')
    assert [e["name"] for e in read_events(tmp_path)] == ["whole"]
    path.write_text('{"process"\n' + whole)
    with pytest.raises(MetricError, match=r"jsonl:1 "):
        read_events(tmp_path)


def test_a_disabled_tracer_writes_nothing(tmp_path):
    tracer = configure(tmp_path / "trace", "p", enabled=False)
    with tracer.span("x"):
        tracer.instant("y")
    tracer.close()
    assert get_tracer() is tracer
    assert not (tmp_path / "trace").exists()


def test_events_after_close_are_ignored(tmp_path):
    tracer = Tracer(tmp_path, "p")
    span = tracer.span("open at close")
    with span:
        tracer.close()
    tracer.instant("late")
    assert read_events(tmp_path) == []


def test_threads_lose_no_event_while_the_buffer_is_written(tmp_path):
    tracer = Tracer(tmp_path, "p")

    def work(lane):
        for i in range(500):
            tracer.instant("e", lane=lane, i=i)
            if i % 50 == 0:
                tracer.flush()

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    tracer.close()
    seen = {(e["lane"], e["args"]["i"]) for e in read_events(tmp_path)}
    assert len(seen) == 2000


def test_a_span_costs_less_than_fifteen_microseconds_of_cpu_even_on_a_shared_core(tmp_path):
    tracer = Tracer(tmp_path, "p")
    costs = []
    for _ in range(5):
        begin = time.process_time()
        for step in range(5000):
            with tracer.span("train/forward_backward", lane="trainer0", step=step):
                pass
        tracer.flush()
        costs.append((time.process_time() - begin) / 5000)
    tracer.close()
    assert min(costs) < 15e-6
