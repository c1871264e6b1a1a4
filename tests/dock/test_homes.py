"""Which pair gets which group."""

import numpy as np

from mindspeed_asyncflow.dock.homes import Room, named_home, spread

MB = 1 << 20


def rooms(*free: int, rows: tuple[int, ...] | None = None, capacity: int = 100) -> list[Room]:
    return [Room(capacity * MB, f * MB, r) for f, r in zip(free, rows or (0,) * len(free))]


def test_equal_pairs_get_equal_shares_of_bytes_and_rows():
    rng = np.random.default_rng(0)
    nbytes, counts = rng.integers(1000, 200_000, 400), rng.integers(1, 9, 400)
    homes = spread(nbytes, counts, rooms(100, 100, 100, 100))
    for weights in (nbytes, counts):
        shares = np.bincount(homes, weights=weights, minlength=4) / weights.sum()
        assert shares.min() > 0.22 and shares.max() < 0.28


def test_a_pair_without_free_bytes_gets_little_and_the_emptiest_most():
    homes = spread(np.full(300, MB // 10), np.ones(300, np.int64), rooms(2, 50, 90))
    shares = np.bincount(homes, minlength=3)
    assert shares[0] == 0 and shares[2] > shares[1] > 0


def test_a_pair_that_has_more_rows_gets_fewer_until_all_have_the_same():
    homes = spread(np.full(90, 10), np.ones(90, np.int64), rooms(100, 100, 100, rows=(60, 30, 0)))
    assert (np.bincount(homes, minlength=3) + np.array([60, 30, 0])).tolist() == [60, 60, 60]


def test_one_large_group_moves_the_others_elsewhere():
    nbytes = np.array([80 * MB, *[MB] * 20])
    homes = spread(nbytes, np.ones(21, np.int64), rooms(100, 100))
    assert (homes[1:] != homes[0]).sum() >= 15


def test_a_dock_of_one_pair_and_a_put_without_bytes_have_a_home():
    assert spread(np.zeros(3, np.int64), np.ones(3, np.int64), rooms(0)).tolist() == [0, 0, 0]
    assert spread(np.empty(0, np.int64), np.empty(0, np.int64), rooms(1, 1)).tolist() == []
    assert set(spread(np.zeros(8, np.int64), np.ones(8, np.int64), rooms(0, 0, capacity=0)).tolist()) == {0, 1}


def test_everybody_computes_the_same_named_home_and_names_spread_evenly():
    homes = [named_home("train", group, [0, 1, 2, 3]) for group in range(4000)]
    assert homes == [named_home("train", group, [3, 1, 0, 2]) for group in range(4000)]
    assert np.bincount(homes).min() > 850
    assert homes != [named_home("eval", group, [0, 1, 2, 3]) for group in range(4000)]


def test_the_loss_of_a_pair_moves_only_the_names_that_had_it():
    before = [named_home("train", group, [0, 1, 2, 3]) for group in range(2000)]
    after = [named_home("train", group, [0, 1, 3]) for group in range(2000)]
    assert all(new == old for old, new in zip(before, after) if old != 2)
    assert np.bincount([new for old, new in zip(before, after) if old == 2], minlength=4)[[0, 1, 3]].min() > 100
