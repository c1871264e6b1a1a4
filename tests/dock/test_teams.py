"""Consumers that claim together: rounds, shares, and what happens to a rank that is late or never comes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.dock.teams import balanced, dealt, divide, part_of
from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded, DockError


def member(rank: int, ranks: int, split: str = "same", **how) -> dict:
    return {"team": "t", "rank": rank, "ranks": ranks, "split": split, "worker": f"rank {rank}"} | how


# -- division ----------------------------------------------------------------------------------------------------------


def spread(tokens: np.ndarray, parts: list[np.ndarray]) -> float:
    sums = [tokens[part].sum() for part in parts]
    return max(sums) / (sum(sums) / len(sums))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=80), st.integers(1, 9))
def test_balanced_parts_hold_every_unit_once_with_equal_counts_and_are_never_worse_than_dealing(tokens, parts):
    tokens = np.array(tokens, np.int64)
    found = balanced(tokens, parts)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(tokens)))
    counts = [len(part) for part in found]
    assert len(counts) == parts and max(counts) - min(counts) <= 1
    if tokens.sum():
        assert spread(tokens, found) <= spread(tokens, dealt(len(tokens), parts))
    assert [p.tolist() for p in balanced(tokens, parts)] == [p.tolist() for p in found]


def test_balanced_beats_fifo_on_skewed_lengths():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(50):
        tokens = rng.lognormal(6, 0.8, 64).astype(np.int64)
        ratios.append((spread(tokens, balanced(tokens, 8)), spread(tokens, dealt(64, 8))))
    best, fifo = np.array(ratios).T
    assert (best <= fifo).all() and np.median(best) < 1.02 < 1.3 < np.median(fifo)


def test_the_part_with_one_very_long_unit_gets_the_shortest_others():
    tokens = np.array([5, 1000, 6, 7, 1, 2, 8, 9])
    assert balanced(tokens, 2)[0].tolist() == [0, 1, 4, 5]


def test_groups_are_not_torn_apart_and_rows_keep_their_order():
    units = np.array([7, 7, 3, 3, 9, 9, 1, 1])
    tokens = np.array([5, 5, 1, 1, 5, 5, 1, 1])
    for split in ("tokens", "fifo"):
        parts = divide(tokens, units, 2, split)
        assert sorted(np.concatenate(parts).tolist()) == list(range(8))
        for part in parts:
            assert part.tolist() == sorted(part.tolist()) and len(set(units[part].tolist())) == 2
    assert [tokens[p].sum() for p in divide(tokens, units, 2, "tokens")] == [12, 12]
    assert [tokens[p].sum() for p in divide(tokens, units, 2, "fifo")] == [20, 4]


# -- the same rows for every rank --------------------------------------------------------------------------------------


def test_every_rank_of_a_replica_gets_the_very_same_grant_round_by_round(bench):
    bench.put(list(range(6)), size=1)
    rounds = {rank: [bench.claim("first", 2, **member(rank, 3)) for _ in range(3)] for rank in (1, 0, 2)}
    for grants in zip(*rounds.values()):
        assert len({g.claim_id for g in grants}) == 1
        assert len({tuple(g.rows.tolist()) for g in grants}) == 1
    assert [g.group_ids.tolist() for g in rounds[2]] == [[0, 1], [2, 3], [4, 5]]
    assert bench.counts("first") == [0, 0, 6, 0]
    for grant in rounds[0]:
        bench.done(grant)
    assert bench.counts("first") == [0, 0, 0, 6]


def test_ranks_that_wait_for_a_round_are_answered_by_the_commit_that_starts_it(bench):
    keys = [bench.ask("first", 4, wait_s=5.0, at_least=4, **member(rank, 3))[0] for rank in (2, 0)]
    bench.put([1], size=3, columns="a")
    assert not bench.outcomes()
    bench.put([2], size=1)
    answers = bench.outcomes()
    assert sorted(answers) == sorted(keys)
    assert answers[keys[0]].rows.tolist() == answers[keys[1]].rows.tolist()
    assert bench.claim("first", 4, **member(1, 3)).rows.tolist() == answers[keys[0]].rows.tolist()


def test_a_rank_takes_the_rounds_that_it_has_missed_before_it_starts_a_new_one(bench):
    bench.put(list(range(3)), size=1)
    fast = [bench.claim("first", 1, **member(0, 2)) for _ in range(3)]
    slow = [bench.claim("first", 1, **member(1, 2)) for _ in range(3)]
    assert [g.rows.tolist() for g in slow] == [g.rows.tolist() for g in fast]
    with pytest.raises(DeadlineExceeded):
        bench.claim("first", 1, **member(1, 2))


def test_a_late_rank_gets_the_grant_that_another_has_finished_but_not_one_that_was_redelivered(bench):
    bench.put([1, 2], size=1)
    first, second = (bench.claim("first", 1, **member(0, 2)) for _ in range(2))
    bench.done(first)
    bench.release(second)
    assert bench.claim("first", 1, **member(1, 2)).rows.tolist() == first.rows.tolist()
    again = bench.claim("first", 1, **member(1, 2))
    assert again.claim_id != second.claim_id and again.rows.tolist() == second.rows.tolist()
    assert bench.claim("first", 1, **member(0, 2)).claim_id == again.claim_id


def test_the_loss_of_one_rank_takes_the_round_from_its_whole_replica(bench):
    bench.put([1], size=1)
    grant = bench.claim("first", 1, **member(0, 2))
    bench.claim("first", 1, **member(1, 2))
    assert bench.control.forget_worker("rank 1", bench.now) == 1
    with pytest.raises(ClaimLost, match="rank 1"):
        bench.done(grant)


def test_the_end_of_a_stream_reaches_every_rank_in_the_same_round(bench):
    bench.put([1], size=3)
    bench.control.seal("p", bench.now)
    tails = [bench.claim("first", 8, at_least=8, **member(rank, 2)) for rank in range(2)]
    assert [len(t.rows) for t in tails] == [3, 3]
    ends = [bench.claim("first", 8, **member(rank, 2)) for rank in range(2)]
    assert all(end.sealed and not len(end.rows) for end in ends), "nobody waits for the rows of its own team"


# -- balanced shares ---------------------------------------------------------------------------------------------------


def test_a_round_of_shares_takes_ranks_times_count_units_each_under_its_own_claim(bench):
    bench.put(list(range(20)), size=2)
    shares = [bench.claim("first", 3, unit="groups", **member(rank, 4, "tokens")) for rank in range(4)]
    assert [len(s.rows) for s in shares] == [6] * 4
    assert len({s.claim_id for s in shares}) == 4
    assert sorted(np.concatenate([s.group_ids for s in shares]).tolist()) == sorted(list(range(12)) * 2)
    bench.done(shares[2])
    assert bench.counts("first") == [0, 16, 18, 6]


def test_a_rank_that_never_comes_loses_its_share_to_redelivery_and_goes_on_with_the_next_round(bench):
    bench.put(list(range(4)), size=1)
    share = bench.claim("first", 2, **member(0, 2, "fifo"))
    bench.done(share)
    assert bench.counts("first") == [0, 0, 2, 2]
    bench.later(10.1)
    assert bench.counts("first") == [0, 2, 0, 2]
    late = bench.claim("first", 1, **member(1, 2, "fifo"))
    assert len(late.rows) == 1 and not set(late.rows.tolist()) & set(share.rows.tolist())
    assert len(bench.claim("first", 1, **member(0, 2, "fifo")).rows) == 1


def test_shares_are_equal_unless_they_are_the_last_and_a_rest_stays_for_the_next_round(bench):
    bench.put(list(range(7)), size=1)
    first = [bench.claim("first", 3, **member(rank, 3, "tokens")) for rank in range(3)]
    assert [len(s.rows) for s in first] == [2, 2, 2]
    with pytest.raises(DeadlineExceeded):
        bench.claim("first", 3, **member(0, 3, "tokens"))
    bench.put([7], size=1)
    bench.control.seal("p", bench.now)
    for share in first:
        bench.done(share)
    tail = [bench.claim("first", 3, **member(rank, 3, "tokens")) for rank in range(3)]
    assert sorted(len(s.rows) for s in tail) == [0, 1, 1]
    assert not any(s.sealed for s in tail)


def test_balanced_rounds_have_less_to_do_on_the_longest_rank_than_dealt_ones(new_bench):
    longest = {}
    for split in ("tokens", "fifo"):
        bench, rng = new_bench(), np.random.default_rng(3)
        rows = bench.put(list(range(64)), size=1, columns="")
        part, slots = bench.control.resolve(rows.ravel())
        tokens = rng.lognormal(6, 0.8, 64).astype(np.int64)
        bench.control.commit(part, slots, bench.schema.mask("a"), tokens, None, bench.now)
        shares = [bench.claim("first", 8, **member(rank, 8, split)) for rank in range(8)]
        assert [len(s.rows) for s in shares] == [8] * 8
        longest[split] = max(int(s.tokens.sum()) for s in shares)
        tokens.sort()
        least = max(tokens.sum() / 8, tokens[-1] + tokens[:7].sum())  # no division with equal counts has less
    assert longest["tokens"] <= 1.02 * least
    assert longest["fifo"] > 1.2 * longest["tokens"]


# -- memory and refusals -----------------------------------------------------------------------------------------------


def test_rounds_are_forgotten_when_all_have_them_or_their_leases_are_over(bench):
    bench.put(list(range(40)), size=1)
    rounds = lambda: bench.control.teams._teams["p", "first", "t"].rounds  # noqa: E731
    for _ in range(5):
        for rank in range(2):
            bench.done(bench.claim("first", 2, **member(rank, 2, "fifo")))
    assert not rounds()
    for _ in range(3):
        bench.claim("first", 2, **member(0, 2, "fifo"))
    assert len(rounds()) == 3
    bench.later(10.1)
    assert not rounds() and bench.control.next_deadline() is None


def test_teams_of_partitions_and_tasks_know_nothing_of_each_other(bench):
    """The same rank of the same team on another partition or task has a round of its own."""
    for name in "pq":
        bench.put([1], size=1, partition=name, columns="ac")
    grants = [bench.claim(t, 1, partition=p, **member(0, 2)) for p in "pq" for t in ("first", "third")]
    assert len({(int(g.rows[0]), g.claim_id) for g in grants}) == 4


def test_a_claim_that_does_not_fit_its_team_is_refused(bench):
    bench.put([1], size=4)
    bench.claim("first", 1, **member(0, 2))
    for wrong, words in (
        (member(1, 3), "has 2 ranks"),
        (member(1, 2, "fifo"), "splits by 'same'"),
        (member(2, 2), "cannot be"),
        (member(0, 2, "even"), "one of same"),
    ):
        with pytest.raises(DockError, match=words):
            bench.claim("first", 1, **wrong)


def test_a_parked_rank_that_is_cancelled_or_too_late_leaves_its_round_to_the_others(bench):
    gone, _ = bench.ask("first", 1, wait_s=5.0, **member(0, 2))
    late, _ = bench.ask("first", 1, wait_s=1.0, **member(1, 2))
    bench.control.cancel(gone)
    bench.later(2.0)
    assert isinstance(bench.outcomes()[late], DeadlineExceeded)
    bench.put([1], size=1)
    assert not bench.outcomes() and bench.counts("first") == [0, 1, 0, 0]
    assert (
        bench.claim("first", 1, **member(1, 2)).rows.tolist() == bench.claim("first", 1, **member(0, 2)).rows.tolist()
    )


def test_a_round_may_be_filled_with_rows_of_another_pair(bench):
    """Shares cut from one grant go to the ranks that wait and to those that come later."""
    key, _ = bench.ask("first", 2, wait_s=5.0, **member(1, 2, "tokens"))
    bench.put([1, 2, 3, 4], size=1, partition="elsewhere")
    whole = bench.claim("first", 4, partition="elsewhere")
    parts = divide(whole.tokens, whole.rows, 2, "tokens")
    shares = [part_of(whole, index, whole.claim_id) for index in parts]
    bench.control.offer_round(("p", "first", "t"), shares, bench.now)
    assert bench.outcomes()[key].rows.tolist() == shares[1].rows.tolist()
    assert bench.claim("first", 2, **member(0, 2, "tokens")).rows.tolist() == shares[0].rows.tolist()
