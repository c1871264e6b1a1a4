"""What people can see of a controller."""

import json

from mindspeed_asyncflow.dock import report


def test_counters_tell_claims_rows_waits_redeliveries_and_expiries_per_task(bench):
    waiter, _ = bench.ask("first", 2, wait_s=60.0)
    bench.later(3.0)
    bench.put([1], size=2, columns="ab")
    assert waiter in bench.outcomes()
    bench.later(10.5)
    bench.done(bench.claim("first", 1))
    bench.release(bench.claim("first", 1))
    stats = report.stats(bench.control)
    first = stats["tasks"]["first"]
    assert (first["claims_granted"], first["rows_granted"]) == (3, 4)
    assert (first["wait_s"], first["longest_wait_s"]) == (3.0, 3.0)
    assert (first["rows_redelivered"], first["leases_expired"]) == (3, 1)
    assert stats["tasks"]["third"]["claims_granted"] == 0
    assert {name: c["rows_written"] for name, c in stats["columns"].items()} == {"a": 2, "b": 2, "c": 0}


def test_the_picture_of_partitions_and_waits_is_plain_numbers_and_words(bench):
    bench.put([1, 2], size=2, columns="a")
    bench.drop(bench.put([3], size=1), "too long")
    bench.ask("third", 3, wait_s=60.0, unit="groups", at_least=2, worker="scorer")
    bench.claim("first", 1)
    bench.now = 7.0
    bench.control.wake(bench.now)
    stats = report.stats(bench.control)
    assert json.loads(json.dumps(stats)) == stats
    part = stats["partitions"]["p"]
    assert (part["rows"], part["groups"], part["sealed"]) == (4, 2, False)
    assert part["tasks"]["first"] == {"waiting": 0, "ready": 3, "claimed": 1, "done": 0, "whole_groups": 1}
    assert stats["drops"] == {"too long": 1}
    (wait,) = stats["waiting"]
    assert (wait["worker"], wait["at_least"], wait["unit"], wait["waited_s"]) == ("scorer", 2, "groups", 7.0)


def test_looking_does_not_make_groups_cost_anything(bench):
    """Whole groups are counted for the picture without being kept up to date from then on."""
    bench.put([1, 2], size=2)
    report.stats(bench.control)
    assert bench.control.partitions["p"].queues["first"]._side is None
