"""Which pairs of query and key each rank of a ring computes, and where tokens are."""

import itertools

import numpy as np
import pytest

from mindspeed_asyncflow.platforms.striping import gathered_places, held_tokens, ring_layout

CASES = [
    ((12,), 2),
    ((1,) * 6, 3),
    ((5, 7, 4), 2),
    ((5, 7, 4), 4),
    ((1, 9, 2, 3, 1), 4),
    ((3, 1, 1, 13, 2, 1), 3),
    ((1, 15, 1, 1, 2, 11, 1), 8),
]


def pairs_of(cu, size):
    """(query, key) in packed positions of every rank and round, as the rounds describe them."""
    total = int(cu[-1])
    found = {}
    for rank in range(size):
        for around in ring_layout(cu, rank, size).rounds:
            mine = found[rank, around.source] = []
            if around.layout is None:
                continue
            queries, keys = (
                held_tokens(total, of, size, True)[slice(None) if index is None else index.numpy()]
                for of, index in ((rank, around.queries), (around.source, around.keys))
            )
            start = 0
            for length in around.layout.lengths:
                mine += [(queries[start + i], keys[start + j]) for i in range(length) for j in range(i + 1)]
                start += length
            assert start == len(queries) == len(keys)
    return found


@pytest.mark.parametrize(("lengths", "size"), CASES)
def test_rounds_of_all_ranks_make_every_causal_pair_once(lengths, size):
    cu = np.concatenate([[0], np.cumsum(lengths)])
    found = list(itertools.chain.from_iterable(pairs_of(cu, size).values()))
    wanted = {(a + i, a + j) for a, b in itertools.pairwise(cu) for i in range(b - a) for j in range(i + 1)}
    assert len(found) == len(wanted) and set(found) == wanted


@pytest.mark.parametrize("lengths", [(256,), (170, 15, 3, 46, 22), (96,) * 3], ids=["one", "mixed", "equal"])
def test_every_round_of_every_rank_is_about_the_same_work(lengths):
    """Causal attention over slices would give the last of four ranks seven times the work of the first."""
    work = {key: len(pairs) for key, pairs in pairs_of(np.concatenate([[0], np.cumsum(lengths)]), 4).items()}
    assert max(work.values()) < 1.2 * min(work.values())


def test_keys_come_by_in_the_order_in_which_they_are_handed_on():
    sources = [[around.source for around in ring_layout(np.array([0, 8]), rank, 4).rounds] for rank in range(4)]
    assert [own[0] for own in sources] == [0, 1, 2, 3]
    for rank, step in itertools.product(range(4), range(3)):
        assert sources[rank][step + 1] == sources[rank - 1][step]


@pytest.mark.parametrize("striped", [True, False])
def test_gathered_places_are_where_the_ranks_lie_end_to_end(striped):
    gathered = np.concatenate([held_tokens(12, rank, 3, striped) for rank in range(3)])
    places = gathered_places(np.arange(12), 12, 3, striped)
    assert gathered[places].tolist() == list(range(12))
