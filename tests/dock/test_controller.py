"""Rules of the control plane, on a clock of its own."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.dock.lines import ArrivalLine, KeyLine
from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded, DockError, StaleHandle

COLUMN_SETS = st.lists(st.lists(st.sampled_from("abc"), unique=True), min_size=1, max_size=12)


# -- readiness ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(COLUMN_SETS, st.integers(0, 1000))
def test_a_row_is_offered_exactly_when_all_columns_of_the_task_are_written(new_bench, columns, seed):
    bench = new_bench()
    rows = bench.put(list(range(len(columns))), size=1, columns="")[:, 0]
    cells = [(row, name) for row, names in zip(rows, columns) for name in names]
    random.Random(seed).shuffle(cells)
    for row, name in cells:
        bench.write(np.array([row]), name)
    for task, needed in {"first": {"a"}, "second": {"a", "b"}, "third": {"c"}}.items():
        expected = {int(row) for row, names in zip(rows, columns) if needed <= set(names)}
        assert bench.counts(task)[1] == len(expected)
        if expected:
            assert set(bench.claim(task, 100).rows.tolist()) == expected


def test_tasks_are_independent_and_each_sees_every_row(bench):
    rows = bench.put([1, 2], columns="abc").ravel()
    for task in ("first", "second", "third"):
        assert bench.claim(task, 100).rows.tolist() == rows.tolist()


def test_rows_are_marked_at_the_grant_and_done_rows_never_come_again(bench):
    bench.put([1], size=8)
    first = bench.claim("first", 5)
    assert bench.counts("first") == [0, 3, 5, 0]
    bench.done(first)
    rest = bench.claim("first", 8)
    assert len(rest.rows) == 3 and not set(rest.rows.tolist()) & set(first.rows.tolist())
    bench.later(1000.0)
    assert bench.claim("first", 8).rows.tolist() == rest.rows.tolist()


def test_unknown_task_policy_or_unit_is_an_error_with_the_nearest_name(bench):
    bench.put([1])
    with pytest.raises(DockError, match="did you mean 'second'"):
        bench.ask("secnd", 1)
    with pytest.raises(DockError, match="did you mean 'fifo'"):
        bench.ask("first", 1, policy="fifi")
    with pytest.raises(DockError, match="rows"):
        bench.ask("first", 1, unit="row")
    with pytest.raises(DockError, match="at_least"):
        bench.ask("first", 1, at_least=2)


# -- claims and leases -------------------------------------------------------------------------------------------------


def test_surplus_stays_for_the_next_claims(bench):
    """B49: 10 groups ready, target 4: 4, 4 and 2 groups, each id once."""
    bench.put(list(range(10)))
    taken, left = [], []
    for _ in range(3):
        grant = bench.claim("first", 4, unit="groups")
        taken.append(list(dict.fromkeys(grant.group_ids.tolist())))
        left.append(bench.control.partitions["p"].queues["first"].whole_groups)
    assert [len(t) for t in taken] == [4, 4, 2]
    assert sorted(itertools.chain(*taken)) == list(range(10))
    assert left == [6, 2, 0]


def test_an_expired_lease_offers_the_rows_again_and_refuses_the_late_result(bench):
    bench.put([1], size=2)
    lost = bench.claim("first", 2)
    bench.later(9.9)
    assert bench.counts("first") == [0, 0, 2, 0]
    bench.later(0.2)
    assert bench.counts("first") == [0, 2, 0, 0]
    new = bench.claim("first", 2)
    assert new.rows.tolist() == lost.rows.tolist()
    with pytest.raises(ClaimLost, match="lease of 10 s ran out"):
        bench.done(lost)
    bench.done(new)
    assert bench.counts("first") == [0, 0, 0, 2]


def test_a_call_for_a_claim_renews_its_lease(bench):
    bench.put([1], size=2)
    grant = bench.claim("first", 2)
    bench.later(8.0)
    bench.done(grant, grant.rows[:1])
    bench.later(8.0)
    bench.done(grant)
    assert bench.counts("first") == [0, 0, 0, 2]


def test_released_rows_and_rows_of_a_forgotten_worker_come_before_others(bench):
    bench.put([1, 2, 3], size=2)
    bench.release(bench.claim("first", 2, worker="x"))
    again = bench.claim("first", 2, worker="x")
    assert again.group_ids.tolist() == [1, 1]
    bench.claim("first", 2, worker="y")
    assert bench.control.forget_worker("x", bench.now) == 1
    assert bench.claim("first", 10).group_ids.tolist() == [1, 1, 3, 3]
    with pytest.raises(ClaimLost, match="worker 'x' was forgotten"):
        bench.done(again)


def test_done_by_task_and_rows_reaches_over_claims(bench):
    rows = bench.put([1], size=4).ravel()
    bench.claim("first", 2), bench.claim("first", 2)
    part, slots = bench.control.resolve(rows[1:3])
    bench.control.done_rows(part, "first", slots, bench.now)
    assert bench.counts("first") == [0, 0, 2, 2]
    with pytest.raises(DockError, match="not claimed"):
        bench.control.done_rows(part, "first", slots, bench.now)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_random_schedules_lose_no_row_and_serve_none_twice(new_bench, seed):
    """Claims, expiry, release, loss of workers and drops in any order: each row ends done once, or dropped."""
    rng, bench = random.Random(seed), new_bench(lease_s=3.0)
    written, finished, dropped, open_claims, put = set(), [], set(), [], 0
    for _ in range(120):
        action = rng.choice(["put", "claim", "claim", "groups", "done", "done", "release", "wait", "lose", "drop"])
        if action == "put":
            rows = bench.put(list(range(put, put + 3)), size=rng.randint(1, 4), columns="")
            put += 3
            written |= set(rows.ravel().tolist())
            bench.write(rows, "a")
        elif action in ("claim", "groups") and bench.control.partitions:
            how = {"unit": "groups", "policy": rng.choice(["fifo", "in_order"])} if action == "groups" else {}
            try:
                grant = bench.claim("first", rng.randint(1, 6), worker=rng.choice("xy"), **how)
            except DeadlineExceeded:
                continue
            held = [r for c in open_claims for r in c.rows.tolist()]
            assert not set(grant.rows.tolist()) & (set(held) | set(finished) | dropped)
            open_claims.append(grant)
        elif action == "done" and open_claims:
            grant = open_claims.pop(rng.randrange(len(open_claims)))
            bench.done(grant)
            finished += [r for r in grant.rows.tolist() if r not in dropped]
        elif action == "release" and open_claims:
            bench.release(open_claims.pop())
        elif action == "wait":
            bench.later(3.5)
            open_claims.clear()
        elif action == "lose":
            bench.control.forget_worker("x", bench.now)
            open_claims = [c for c in open_claims if c.claim_id in bench.control.leases.open]
        elif action == "drop" and written - set(finished) - dropped:
            row = rng.choice(sorted(written - set(finished) - dropped))
            bench.drop(np.array([row]))
            dropped.add(row)
    bench.later(4.0)
    while True:
        try:
            grant = bench.claim("first", 100)
        except DeadlineExceeded:
            break
        finished += grant.rows.tolist()
        bench.done(grant)
    assert len(finished) == len(set(finished))
    assert set(finished) == written - dropped
    assert not bench.control.partitions or bench.counts("first")[:3] == [0, 0, 0]


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_parked_claim_is_woken_by_the_commit_that_satisfies_it(bench):
    rows = bench.put([1], size=4, columns="").ravel()
    key, grant = bench.ask("first", 4, wait_s=5.0, at_least=3)
    assert grant is None
    bench.write(rows[:2], "a")
    bench.write(rows, "b")
    assert not bench.outcomes()
    bench.write(rows[2:3], "a")
    assert bench.outcomes()[key].rows.tolist() == rows[:3].tolist()


def test_a_claim_may_come_before_its_partition(bench):
    key, _ = bench.ask("first", 1, wait_s=5.0)
    rows = bench.put([1], size=1)
    assert bench.outcomes()[key].rows.tolist() == rows.ravel().tolist()


def test_waiters_are_served_in_order_and_a_large_one_blocks_nobody(bench):
    large, _ = bench.ask("first", 100, wait_s=5.0, at_least=100)
    one, _ = bench.ask("first", 2, wait_s=5.0)
    two, _ = bench.ask("first", 2, wait_s=5.0)
    rows = bench.put([1], size=4).ravel().tolist()
    outcomes = bench.outcomes()
    assert outcomes[one].rows.tolist() == rows[:2] and outcomes[two].rows.tolist() == rows[2:]
    assert large not in outcomes


def test_a_wait_that_ends_says_for_whom_and_for_what_and_claims_nothing(bench):
    bench.put([1], size=4, columns="a")
    key, _ = bench.ask("second", 4, wait_s=5.0, worker="trainer 3", at_least=2)
    bench.claim("first", 1, worker="scorer")
    bench.later(5.0)
    error = bench.outcomes()[key]
    assert isinstance(error, DeadlineExceeded)
    for part in ("'trainer 3' waited 5.0 s", "2 rows of task 'second'", "4 rows lack a column", "b (4)"):
        assert part in str(error)
    assert bench.counts("second") == [4, 0, 0, 0]
    with pytest.raises(DeadlineExceeded, match="nobody has put a row into partition 'q'; known: p"):
        bench.ask("first", 1, partition="q")


def test_a_cancelled_wait_takes_no_rows(bench):
    key, _ = bench.ask("first", 1, wait_s=5.0)
    bench.control.cancel(key)
    bench.put([1], size=1)
    assert not bench.outcomes() and bench.counts("first") == [0, 1, 0, 0]


# -- the end of a stream -----------------------------------------------------------------------------------------------


def test_seal_serves_the_tail_and_then_ends_every_wait(bench):
    bench.put([1], size=3)
    tail, _ = bench.ask("first", 8, wait_s=5.0, at_least=8, worker="a")
    bench.control.seal("p", bench.now)
    granted = bench.outcomes()[tail]
    assert len(granted.rows) == 3 and not granted.sealed
    other, _ = bench.ask("first", 8, wait_s=5.0, worker="b")
    assert other not in bench.outcomes(), "rows that another worker holds may come back"
    assert bench.claim("first", 8, worker="a").sealed, "nobody waits for its own claim"
    bench.done(granted)
    end = bench.outcomes()[other]
    assert end.sealed and not len(end.rows)
    with pytest.raises(DockError, match="sealed"):
        bench.put([2])


def test_a_sealed_stream_waits_for_rows_that_are_still_being_made(bench):
    rows = bench.put([1], size=2, columns="")
    bench.control.seal("p", bench.now)
    key, grant = bench.ask("first", 4, wait_s=5.0, at_least=4)
    assert grant is None
    bench.write(rows[0, :1], "a")
    assert key not in bench.outcomes()
    bench.write(rows[0, 1:], "a")
    assert len(bench.outcomes()[key].rows) == 2


def test_an_empty_sealed_partition_ends_at_once_and_a_group_without_its_late_member_is_served(bench):
    bench.control.seal("q", bench.now)
    assert bench.claim("first", 1, partition="q").sealed
    bench.put([1], size=3, count=2)
    bench.control.seal("p", bench.now)
    assert len(bench.claim("first", 1, unit="groups").rows) == 2


# -- identity ----------------------------------------------------------------------------------------------------------


def test_a_handle_is_stale_after_its_row_is_freed_also_when_the_slot_is_used_again(bench):
    old = bench.put([1], size=4).ravel()
    bench.free(old)
    new = bench.put([2], size=4).ravel()
    assert not set(new.tolist()) & set(old.tolist())
    assert sorted((new >> 21).tolist()) == sorted((old >> 21).tolist()), "slots are recycled"
    for call in (bench.free, bench.drop, lambda rows: bench.write(rows, "b")):
        with pytest.raises(StaleHandle, match="4 of 4"):
            call(old)
    assert bench.counts("first") == [0, 4, 0, 0]


def test_partitions_do_not_leak_into_each_other(bench):
    """B51: a freed row of one partition and a new one of another that uses its place."""
    bench.free(bench.put([1], size=1, partition="one"))
    row = bench.put([1], size=1, partition="two").ravel()
    with pytest.raises(DeadlineExceeded):
        bench.claim("first", 1, partition="one")
    assert bench.claim("first", 1, partition="two").rows.tolist() == row.tolist()
    other = bench.put([2], size=1, partition="one").ravel()
    with pytest.raises(DockError, match="one partition"):
        bench.free(np.concatenate((row, other)))


def test_a_call_that_names_a_row_twice_or_an_impossible_one_is_refused(bench):
    row = bench.put([1], size=1).ravel()
    with pytest.raises(DockError, match="twice"):
        bench.free(np.concatenate((row, row)))
    for wrong in (-1, 0, 1 << 62, int(row[0]) + (1 << 40)):
        with pytest.raises(DockError):
            bench.free(np.array([wrong]))
    assert bench.counts("first") == [0, 1, 0, 0]


def test_a_claim_gives_no_right_over_rows_of_another_partition(bench):
    bench.put([1], size=2, partition="one")
    grant = bench.claim("first", 2, partition="one")
    foreign = bench.put([1], size=2, partition="two").ravel()
    with pytest.raises(DockError, match="does not hold"):
        bench.done(grant, foreign)


# -- rows leave --------------------------------------------------------------------------------------------------------


def test_a_dropped_row_stays_readable_until_the_last_claim_on_it_ends(bench):
    rows = bench.put([1], size=2, columns="ac").ravel()
    scoring, other = bench.claim("third", 2), bench.claim("first", 1)
    bench.drop(rows)
    bench.control.resolve(rows[:1])
    assert bench.counts("first") == [0, 0, 1, 0], "an unheld row leaves the task at once"
    bench.done(scoring)
    bench.control.resolve(rows[:1])
    with pytest.raises(StaleHandle):
        bench.control.resolve(rows[1:])
    bench.release(other)
    with pytest.raises(StaleHandle):
        bench.control.resolve(rows[:1])
    assert bench.control.partitions["p"].rows.count == 0


def test_the_group_of_a_row_on_its_way_out_is_granted_without_it(bench):
    rows = bench.put([1], size=3, columns="ac")
    holding = bench.claim("third", 3)
    bench.drop(rows[0, 1])
    assert bench.claim("first", 1, unit="groups").rows.tolist() == rows[0, [0, 2]].tolist()
    bench.done(holding)
    bench.control.resolve(rows[0, [0, 2]])


@pytest.mark.parametrize("how", [{}, {"unit": "groups"}, {"policy": "oldest"}, {"policy": "random"}])
def test_work_per_grant_does_not_grow_with_the_rows_alive(new_bench, monkeypatch, how):
    """Numbers that claims, their ends and the frees of their rows look at, counted in the line that they come from."""

    def looked_at(rows: int) -> float:
        bench = new_bench()
        bench.put(list(range(rows // 2)), size=2)
        bench.claim("first", 8, **how)
        seen = []
        for line in (ArrivalLine, KeyLine):
            for verb in ("first", "add", "remove"):
                real = getattr(line, verb)

                def counted(self, units, *more, real=real, **named):
                    found = real(self, units, *more, **named)
                    seen.append(len(found) if isinstance(units, int) else len(units))
                    return found

                monkeypatch.setattr(line, verb, counted)
        for _ in range(50):
            grant = bench.claim("first", 8, **how)
            bench.done(grant)
            bench.free(grant.rows)
        monkeypatch.undo()
        return sum(seen)

    assert looked_at(20_000) == looked_at(2_000) > 0
