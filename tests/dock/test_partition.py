"""Whole groups, order of issue, and freshness: which units of a partition a claim gets."""

import numpy as np
import pytest

from mindspeed_asyncflow.errors import DeadlineExceeded, DockError, StaleHandle

# -- groups ------------------------------------------------------------------------------------------------------------


def test_only_whole_groups_are_granted_whatever_the_order_of_arrival(bench):
    rows = bench.put([10, 20], size=3, columns="")
    bench.write(np.concatenate((rows[1, :2], rows[0])), "a")
    assert bench.claim("first", 2, unit="groups").group_ids.tolist() == [10] * 3
    with pytest.raises(DeadlineExceeded):
        bench.claim("first", 2, unit="groups")
    bench.write(rows[1, 2:], "a")
    assert bench.claim("first", 2, unit="groups").rows.tolist() == rows[1].tolist()


def test_a_group_waits_for_a_member_that_is_put_late(bench):
    early = bench.put([7], size=3, count=2)
    key, grant = bench.ask("first", 1, wait_s=5.0, unit="groups")
    assert grant is None
    late = bench.put([7], size=3, count=1)
    assert sorted(bench.outcomes()[key].rows.tolist()) == sorted(np.concatenate((early, late), axis=1).ravel().tolist())
    with pytest.raises(DockError, match="cannot take"):
        bench.put([7], size=3, count=1)


def test_a_group_that_lost_a_member_is_whole_without_it(bench):
    rows = bench.put([7], size=3, columns="")
    bench.write(rows[0, :2], "a")
    bench.drop(rows[0, 2])
    assert bench.claim("first", 1, unit="groups").rows.tolist() == rows[0, :2].tolist()


def test_in_order_grants_group_k_only_after_group_k_minus_1(bench):
    rows = bench.put([5, 3, 9, 1], size=2, columns="")
    bench.write(rows[[1, 2]], "a")
    ask = {"unit": "groups", "policy": "in_order"}
    with pytest.raises(DeadlineExceeded):
        bench.claim("first", 4, **ask)
    bench.write(rows[0], "a")
    first = bench.claim("first", 2, **ask)
    assert first.group_ids.tolist() == [5, 5, 3, 3]
    bench.release(first)  # not granted any more: their turn again, before 9
    assert bench.claim("first", 4, **ask).group_ids.tolist() == [5, 5, 3, 3, 9, 9]
    bench.write(rows[3], "a")
    assert bench.claim("first", 4, **ask).group_ids.tolist() == [1, 1]


def test_in_order_goes_on_past_dropped_groups(bench):
    rows = bench.put([1, 2], size=2, columns="")
    bench.write(rows[1], "a")
    bench.drop(rows[0])
    assert bench.claim("first", 1, unit="groups", policy="in_order").group_ids.tolist() == [2, 2]


def test_listed_groups_are_granted_in_the_order_of_the_list_and_once(bench):
    rows = bench.put([1, 2, 3], size=2, columns="")
    bench.write(rows[[0, 2]], "a")
    grant = bench.claim("first", 3, unit="groups", group_ids=[3, 2, 1, 3])
    assert grant.group_ids.tolist() == [3, 3, 1, 1]
    key, parked = bench.ask("first", 2, wait_s=5.0, unit="groups", group_ids=[2, 3])
    assert parked is None
    bench.write(rows[1], "a")
    assert bench.outcomes()[key].group_ids.tolist() == [2, 2]


# -- freshness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "stale"), [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
def test_groups_older_than_the_bound_are_dropped_and_reported(bench, bound, stale):
    """Also for version 0 and bound 0: a version is compared, never taken for 'none'."""
    rows = bench.put([1, 2, 3], size=2, columns="")
    for version, group in enumerate(rows):
        bench.write(group[:1], "a", version=version)
        bench.write(group[1:], "a", version=version + 1)  # the oldest member counts
    grant = bench.claim("first", 9, unit="groups", min_version=bound)
    assert [(g, reason) for g, _, reason in grant.dropped] == [(g, "stale") for g in stale]
    assert sorted(set(grant.group_ids.tolist())) == [g for g in (1, 2, 3) if g not in stale]
    assert bench.control.drops["stale"] == 2 * len(stale)
    with pytest.raises(StaleHandle):
        bench.control.resolve(rows[0] if stale else np.array([rows[0, 0] + 1]))


def test_rows_older_than_the_bound_are_dropped_one_by_one(bench):
    rows = bench.put([1], size=3, columns="").ravel()
    for version, row in enumerate(rows):
        bench.write(row, "a", version=version)
    grant = bench.claim("first", 3, min_version=1)
    assert grant.rows.tolist() == rows[1:].tolist()
    assert grant.version_min.tolist() == [1, 2]
    assert [(g, r.tolist()) for g, r, _ in grant.dropped] == [(1, [rows[0]])]


def test_a_claim_that_dropped_something_returns_at_once(bench):
    rows = bench.put([1], size=2, columns="")
    bench.write(rows, "a", version=0)
    key, _ = bench.ask("third", 1, wait_s=5.0)
    grant = bench.ask("first", 1, wait_s=5.0, min_version=1, unit="groups", at_least=1)[1]
    assert grant is not None and not len(grant.rows) and not grant.sealed and grant.claim_id == 0
    assert len(grant.dropped) == 1 and key not in bench.outcomes()


def test_rows_that_no_policy_wrote_have_no_age(bench):
    bench.put([1], size=2)
    assert bench.claim("first", 2, min_version=5).version_min.tolist() == [-1, -1]


def test_the_version_range_of_a_row_spans_all_its_writes(bench):
    rows = bench.put([1], size=1, columns="")
    bench.write(rows, "a", version=4)
    bench.write(rows, "b", version=3)
    grant = bench.claim("second", 1)
    assert (grant.version_min[0], grant.version_max[0]) == (3, 4)
