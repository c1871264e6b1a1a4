"""Policies over plain arrays, and as plug-ins of a running dock."""

import numpy as np
import pytest

from mindspeed_asyncflow.dock.policies import POLICIES, Facts, Policy, first_ready, pick, ready_prefix, shuffled
from mindspeed_asyncflow.errors import DockError

READY = np.array([True, True, False, True, True])


@pytest.mark.parametrize(
    ("count", "first", "prefix"), [(1, [0], [0]), (3, [0, 1, 3], [0, 1]), (9, [0, 1, 3, 4], [0, 1])]
)
def test_fifo_skips_what_is_not_ready_and_in_order_stops_there(count, first, prefix):
    assert first_ready(READY, count).tolist() == first
    assert ready_prefix(READY, count).tolist() == prefix


def test_nothing_ready_or_nothing_there_grants_nothing():
    for ready in (np.zeros(3, bool), np.zeros(0, bool)):
        assert not len(first_ready(ready, 2)) and not len(ready_prefix(ready, 2))


def test_group_policies_refuse_single_rows():
    assert pick("fifo", "groups", [3]).order == "listed"
    for name, ids in (("in_order", None), ("fifo", [1])):
        with pytest.raises(DockError, match="unit='groups'"):
            pick(name, "rows", ids)


def facts(group_ids: list[int], member: int = 0) -> Facts:
    n = np.arange(len(group_ids))
    return Facts(n, n, n, np.array(group_ids), np.full(len(n), member))


def test_a_random_place_depends_on_the_seed_and_the_identity_of_the_row_only():
    ids = list(range(1000))
    place = dict(zip(ids, shuffled(facts(ids), 5).tolist()))
    other = dict(zip(ids[::-1], shuffled(facts(ids[::-1]), 5).tolist()))
    assert place == other
    assert shuffled(facts(ids), 5).tolist() != shuffled(facts(ids), 6).tolist()
    assert shuffled(facts(ids), 5).tolist() != shuffled(facts(ids, 1), 5).tolist()
    order = np.argsort(shuffled(facts(ids), -1))
    assert abs(np.corrcoef(order, ids)[0, 1]) < 0.1 and len(set(place.values())) == 1000


@pytest.mark.parametrize("unit", ["rows", "groups"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_same_seed_gives_the_same_order_whatever_the_order_of_arrival(new_bench, unit, size):
    def order(seed: int, turn: int) -> list[int]:
        bench = new_bench()
        rows = bench.put(list(range(50)), size=size, columns="")
        bench.write(np.roll(rows, turn, 0), "a")
        how = {"unit": unit, "policy": "random", "seed": seed}
        ids = np.concatenate([bench.claim("first", 10, **how).group_ids for _ in range(5)]).tolist()
        return ids

    assert order(1, 0) == order(1, 17) != order(2, 0)
    assert sorted(set(order(3, 0))) == list(range(50)) or unit == "rows"


@pytest.mark.parametrize("unit", ["rows", "groups"])
@pytest.mark.parametrize("size", [1, 3])
def test_oldest_goes_by_the_put_and_by_version_by_the_oldest_policy(bench, unit, size):
    rows = bench.put([5, 3, 9, 1], size=size, columns="")
    for group, version in ((2, 4), (0, 7), (3, 2), (1, 0)):
        bench.write(rows[group], "ac", version=version)
    for task, policy, expected in (("first", "oldest", [5, 3, 9, 1]), ("third", "by_version", [3, 1, 9, 5])):
        ids: list[int] = []
        while len(ids) < rows.size:
            ids += bench.claim(task, size if unit == "rows" else 1, unit=unit, policy=policy).group_ids.tolist()
        assert ids == np.repeat(expected, size).tolist()


def test_a_later_write_of_an_older_version_moves_a_ready_row_forward(bench):
    rows = bench.put([1, 2, 3], size=1, columns="")
    for row, version in zip(rows, (3, 4, 5)):
        bench.write(row, "a", version=version)
    assert bench.claim("first", 1, policy="by_version").group_ids.tolist() == [1]
    bench.write(rows[2], "b", version=1)
    assert bench.claim("first", 1, policy="by_version").group_ids.tolist() == [3]


def test_a_policy_looks_at_all_ready_units_and_what_it_does_not_grant_stays(bench):
    """What is looked at is not what is taken: one row of ten thousand, the one with the lowest key."""
    rows = bench.put(list(range(10_000)), size=1, columns="").ravel()
    versions = np.random.default_rng(0).permutation(10_000).astype(np.int32)
    part, slots = bench.control.resolve(rows)
    bench.control.commit(part, slots, bench.schema.mask("a"), None, (versions, versions), bench.now)
    for expected in range(3):
        assert bench.claim("first", 1, policy="by_version").version_min.tolist() == [expected]
    assert bench.counts("first") == [0, 9997, 3, 0]
    assert bench.claim("first", 10_000, policy="fifo").rows.tolist() == rows[versions > 2].tolist()


def test_a_new_policy_is_one_entry_of_the_table(bench, monkeypatch):
    monkeypatch.setitem(POLICIES, "longest", Policy("key", key=lambda known, seed: -known.tokens))
    rows = bench.put([1, 2, 3], size=2, columns="")
    part, slots = bench.control.resolve(rows.ravel())
    bench.control.commit(part, slots, bench.schema.mask("a"), np.array([5, 5, 1, 8, 7, 7]), None, bench.now)
    assert bench.claim("first", 1, policy="longest").tokens.tolist() == [8]
    assert bench.claim("first", 2, policy="longest", unit="groups").group_ids.tolist() == [3, 3, 1, 1]


def test_orders_that_nobody_uses_any_more_are_forgotten(bench):
    bench.put(list(range(100)), size=1)
    for seed in range(20):
        bench.claim("first", 1, policy="random", seed=seed)
    assert len(bench.control.partitions["p"].queues["first"]._orders) <= 4
    assert len(bench.claim("first", 100, policy="random", seed=0).rows) == 80
