"""Waiting, watching, freezing, pins, run-time tasks, closing: the life of claims and partitions beyond one grant."""

import numpy as np
import pytest

from mindspeed_asyncflow.dock.columns import TaskSpec
from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded, DockError, StaleHandle
from tests.dock.conftest import unpack_handles

# -- what a claim gets -------------------------------------------------------------------------------------------------


def test_fewer_rows_than_asked_are_granted_at_once_when_they_are_enough_and_waited_for_when_not(bench):
    bench.put([1], size=3)
    grant = bench.claim("first", 8, at_least=3)
    assert len(grant.rows) == 3 and grant.ready == 0
    bench.put([2], size=3)
    assert bench.ask("first", 8, wait_s=1.0, at_least=4)[1] is None
    assert bench.claim("first", 2).ready == 1


@pytest.mark.parametrize("unit", ["rows", "groups"])
def test_age_is_bounded_from_the_put_and_zero_is_a_bound(bench, unit):
    bench.put([1], size=2)
    bench.now = 4.0
    bench.put([2], size=2)
    bench.now = 5.0
    grant = bench.claim("first", 9, unit=unit, max_age_s=1.0)
    assert set(grant.group_ids.tolist()) == {2} and [(g, why) for g, _, why in grant.dropped] == [(1, "stale")]
    bench.put([3], size=2)
    assert bench.claim("first", 9, unit=unit, max_age_s=0).group_ids.tolist() == [3, 3]
    bench.put([4], size=2)
    bench.now = 5.5
    assert not len(bench.claim("first", 9, unit=unit, max_age_s=0).rows)
    assert bench.control.drops["stale"] == 4


def test_both_bounds_hold_together(bench):
    rows = bench.put([1, 2], size=1, columns="")
    bench.write(rows[0], "a", version=0)
    bench.write(rows[1], "a", version=1)
    bench.now = 2.0
    grant = bench.claim("first", 2, min_version=1, max_age_s=3.0)
    assert grant.group_ids.tolist() == [2]


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_thousand_waiters_are_not_looked_at_by_a_put_that_serves_none_or_one(bench, monkeypatch):
    bench.put([0], size=1, columns="")
    keys = [bench.ask("first", 4, wait_s=100.0, at_least=2)[0] for _ in range(1000)]
    tried = []
    real = bench.control._attempt
    monkeypatch.setattr(bench.control, "_attempt", lambda *a: tried.append(1) or real(*a))
    bench.put([1], size=1)
    assert len(tried) == 0
    bench.put([2], size=3)
    assert len(tried) == 1 and list(bench.outcomes()) == keys[:1]
    bench.put([3], size=2, columns="c")
    assert len(tried) == 1, "another task's rows concern nobody here"
    for key in keys[1:]:
        bench.control.cancel(key)
    assert bench.control.next_deadline() is not None
    bench.later(10.0)
    assert bench.control.next_deadline() is None and len(bench.control.waiting) == 0


def test_deadlines_of_waiters_end_them_in_time_and_only_them(bench):
    keys = [bench.ask("first", 1, wait_s=float(wait))[0] for wait in (5, 2, 9)]
    assert bench.control.next_deadline() == 2.0
    bench.later(2.0)
    assert list(bench.outcomes()) == [keys[1]]
    assert bench.control.next_deadline() == 5.0
    bench.control.cancel(keys[0])
    assert bench.control.next_deadline() == 9.0


def test_the_oldest_waiter_that_can_be_served_comes_first_whatever_it_asks_for(bench):
    groups, _ = bench.ask("first", 1, wait_s=5.0, unit="groups")
    rows, _ = bench.ask("first", 9, wait_s=5.0)
    bench.put([1], size=2, columns="", count=1)
    late = bench.put([2], size=2)
    assert bench.outcomes()[groups].rows.tolist() == late.ravel().tolist()
    more = bench.put([3], size=2)
    assert bench.outcomes()[rows].rows.tolist() == more.ravel().tolist()


# -- freezing ----------------------------------------------------------------------------------------------------------


def test_while_frozen_nothing_is_granted_and_no_lease_ends_and_leases_are_longer_by_that_time(bench):
    bench.put([1], size=2)
    grant = bench.claim("first", 1)
    bench.control.frozen = True
    key, parked = bench.ask("first", 1, wait_s=100.0)
    assert parked is None
    bench.later(50.0)
    assert bench.counts("first") == [0, 1, 1, 0] and not bench.outcomes()
    assert bench.control.next_deadline() == 100.0
    bench.control.frozen = False
    bench.later(9.0)
    assert len(bench.outcomes()[key].rows) == 1
    bench.done(grant)
    with pytest.raises(DeadlineExceeded):
        bench.control.frozen = True
        bench.claim("first", 1)


# -- pins --------------------------------------------------------------------------------------------------------------


def test_bytes_that_are_being_sent_stay_until_the_unpin(bench):
    rows = bench.put([1], size=2).ravel()
    part, slots = bench.control.resolve(rows)
    twice = np.concatenate((slots, slots[:1]))
    bench.control.pin(part, twice)
    bench.free(rows)
    assert not bench.control.departed and bench.counts("first") == [0, 0, 0, 0]
    bench.control.unpin(part, slots, bench.now)
    assert [s.tolist() for _, s, _ in bench.control.departed] == [slots[1:].tolist()]
    bench.control.unpin(part, slots[:1], bench.now)
    assert [s.tolist() for _, s, _ in bench.control.departed] == [slots[1:].tolist(), slots[:1].tolist()]
    with pytest.raises(StaleHandle):
        bench.control.resolve(rows[:1])


# -- tasks that come later ---------------------------------------------------------------------------------------------


def test_a_task_that_is_added_sees_exactly_the_live_rows_in_issue_order_and_wakes_with_later_ones(bench):
    rows = bench.put([4, 2, 3], size=2, columns="ab")
    bench.put([9], size=1, columns="a")
    other = bench.put([5], size=1, columns="b", partition="q")
    bench.claim("first", 2)
    bench.free(rows[1])
    bench.control.add_task(TaskSpec("late", ("b",)), bench.now)
    assert bench.counts("late") == [1, 4, 0, 0]
    assert bench.claim("late", 9, unit="groups").group_ids.tolist() == [4, 4, 3, 3]
    assert bench.claim("late", 9, partition="q").rows.tolist() == other.ravel().tolist()
    key, _ = bench.ask("late", 1, wait_s=5.0)
    new = bench.put([6], size=1, columns="b")
    assert bench.outcomes()[key].rows.tolist() == new.ravel().tolist()


def test_adding_a_task_again_changes_nothing_and_with_other_columns_it_is_refused(bench):
    bench.put([1], size=1, columns="abc")
    for _ in range(2):
        bench.control.add_task(TaskSpec("late", ("b", "a")), bench.now)
    assert bench.counts("late") == [0, 1, 0, 0]
    with pytest.raises(DockError, match="reads b, a, not c"):
        bench.control.add_task(TaskSpec("late", ("c",)), bench.now)
    with pytest.raises(DockError, match="unknown column"):
        bench.control.add_task(TaskSpec("other", ("x",)), bench.now)


def test_rows_that_were_finished_before_they_were_ready_are_not_offered_and_can_be_reset(bench):
    rows = bench.put([1], size=3, columns="").ravel()
    part, slots = bench.control.resolve(rows)
    bench.control.finish(part, "first", slots[:2], bench.now)
    bench.write(rows[1:], "a")
    assert bench.counts("first") == [0, 1, 0, 2]
    bench.control.reset(part, "first", slots[:2], bench.now)
    assert bench.counts("first") == [1, 2, 0, 0]
    assert bench.claim("first", 3).rows.tolist() == rows[1:].tolist()
    with pytest.raises(DockError, match="not done"):
        bench.control.reset(part, "first", slots, bench.now)
    with pytest.raises(DockError, match="claimed"):
        bench.control.finish(part, "first", slots[1:], bench.now)


# -- closing -----------------------------------------------------------------------------------------------------------


def test_closing_frees_all_rows_and_old_handles_never_name_rows_of_a_later_partition(bench):
    seen: set[int] = set()
    for turn in range(20):
        rows = bench.put(list(range(10)), size=2, partition=f"epoch {turn}").ravel()
        assert not seen & set(rows.tolist())
        if turn:
            with pytest.raises(StaleHandle):
                bench.control.resolve(np.array(sorted(seen))[-5:])
        seen |= set(rows.tolist())
        bench.control.close(f"epoch {turn}", bench.now)
        assert not bench.control.partitions
    numbers = set(unpack_handles(np.array(sorted(seen)))[1].tolist())
    assert numbers == {0}, "the number is used again"
    assert sum(len(s) for _, s, _ in bench.control.departed) == len(seen) == 400
    with pytest.raises(StaleHandle, match="closed"):
        bench.control.resolve(np.array(sorted(seen)[:3]))


def test_closing_waits_for_claims_and_pins_and_then_forgets_the_name(bench):
    rows = bench.put([1], size=3, columns="ac").ravel()
    part, slots = bench.control.resolve(rows)
    grant = bench.claim("first", 1)
    bench.control.pin(part, slots[1:2])
    early, _ = bench.ask("second", 1, wait_s=50.0)
    bench.control.close("p", bench.now)
    late, _ = bench.ask("third", 1, wait_s=50.0)
    assert part.rows.count == 2 and not bench.outcomes()
    with pytest.raises(DockError, match="being closed"):
        bench.put([2])
    bench.control.unpin(part, slots[1:2], bench.now)
    bench.done(grant)
    assert "p" not in bench.control.partitions
    new = bench.put([77], size=1, columns="abc").ravel().tolist()
    answers = bench.outcomes()
    assert answers[early].rows.tolist() == answers[late].rows.tolist() == new, "a partition of that name may come again"
    with pytest.raises(DockError, match="no partition 'x'"):
        bench.control.close("x", bench.now)


@pytest.mark.slow
def test_more_partitions_can_be_closed_than_there_are_numbers(bench):
    for turn in range(1100):
        bench.put([1], size=1, partition=str(turn))
        bench.control.close(str(turn), bench.now)
    with pytest.raises(DockError, match="at most 1024 partitions"):
        for turn in range(1025):
            bench.control.open(f"open {turn}")


# -- pairs, restarts ---------------------------------------------------------------------------------------------------


def test_rows_and_claims_of_another_pair_are_refused_by_name(new_bench):
    here, there = new_bench(), new_bench(pair=3)
    rows = there.put([1], size=1).ravel()
    with pytest.raises(DockError, match="live on pair 3, this is pair 0"):
        here.control.resolve(rows)
    grant = there.claim("first", 1)
    assert grant.claim_id >> 48 == 3
    with pytest.raises(ClaimLost, match="pair 3"):
        here.done(grant)


def test_a_restarted_controller_knows_claims_of_its_former_life_as_ended(new_bench):
    old = new_bench(pair=2)
    old.put([1], size=1)
    grant = old.claim("first", 1)
    new = new_bench(pair=2, first_claim=1 << 32)
    with pytest.raises(ClaimLost, match="it has ended"):
        new.done(grant)


def test_rows_can_be_put_back_under_the_handles_that_they_had(new_bench):
    old = new_bench()
    old.free(old.put([1, 2], size=2))
    rows = old.put([3], size=3).ravel()
    part, slots = old.control.resolve(rows)
    new = new_bench()
    again = new.control.open("p", number=5, first=part.rows.next_generation())
    again_slots, _ = new.control.put(
        again, [3], [3], [3], np.arange(3, dtype=np.int32), new.schema.mask("a"), np.zeros(3, np.int64), 0.0,
        slots=slots, generations=part.rows.generation[slots],
    )  # fmt: skip
    assert again_slots.tolist() == slots.tolist()
    assert (again.handles(slots) & ((1 << 45) - 1)).tolist() == (rows & ((1 << 45) - 1)).tolist()
    more = new.put([4], size=4).ravel()
    assert not set(unpack_handles(more)[2].tolist()) & set(slots.tolist())
    assert new.control.open("q").number != 5


def test_every_effect_on_rows_is_journaled_once(bench):
    notes: list[tuple[str, dict]] = []
    bench.control.journal = lambda kind, fields: notes.append((kind, fields))
    rows = bench.put([1, 2, 3], size=1).ravel()
    part, slots = bench.control.resolve(rows)
    bench.done(bench.claim("first", 1))
    bench.control.reset(part, "first", slots[:1], bench.now)
    bench.control.finish(part, "first", slots[:1], bench.now)
    held = bench.claim("first", 1)
    bench.free(rows[1:2])
    bench.done(held)
    bench.drop(rows[2:])
    bench.control.add_task(TaskSpec("late", ("b",)), bench.now)
    for _ in range(2):
        bench.control.seal("p", bench.now)
        bench.control.add_task(TaskSpec("late", ("b",)), bench.now)
    bench.control.close("p", bench.now)
    kinds = [kind for kind, _ in notes]
    assert kinds == ["open", "done", "reset", "done", "leave", "gone", "leave", "task", "seal", "close"]
    assert [n["slots"].tolist() for k, n in notes if k == "leave"] == [[slots[1]], [slots[2]]]
    assert [n["held"].tolist() for k, n in notes if k in ("leave", "close")] == [[slots[1]], [], []]
    assert [n["slots"].tolist() for k, n in notes if k == "gone"] == [[slots[1]]]
    assert all(n.get("partition", "p") == "p" for _, n in notes)
    assert notes[7][1] == {"name": "late", "columns": ["b"]}
