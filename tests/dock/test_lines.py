"""Lines against sorted lists."""

import random

import numpy as np
import pytest

from mindspeed_asyncflow.dock.lines import ArrivalLine, KeyLine
from mindspeed_asyncflow.dock.slots import Pool
from mindspeed_asyncflow.dock.table import MAX_SLOTS, pack_handles, spans
from tests.dock.conftest import unpack_handles


@pytest.mark.parametrize("seed", range(4))
def test_an_arrival_line_is_a_queue_with_a_front_entrance(seed):
    rng, line, expected = random.Random(seed), ArrivalLine(), []
    line.ensure(500)
    for _ in range(2000):
        idle = sorted(set(range(500)) - set(expected))
        kind = rng.random()
        if kind < 0.4 and idle:
            new = rng.sample(idle, rng.randint(1, min(9, len(idle))))
            front = rng.random() < 0.3
            line.add(np.array(new), front)
            expected = new + expected if front else expected + new
        elif kind < 0.7:
            first = line.first(rng.randint(1, 9))
            assert first.tolist() == expected[: len(first)]
            if rng.random() < 0.7 and len(first):
                line.remove(first)
                del expected[: len(first)]
        elif expected:
            gone = rng.sample(expected, rng.randint(1, min(9, len(expected))))
            line.remove(np.array(gone))
            expected = [x for x in expected if x not in gone]
        assert line.count == len(expected)
    assert line.all().tolist() == expected == line.first(500).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_a_key_line_gives_the_lowest_keys_first_and_equal_ones_in_the_order_of_their_coming(seed):
    rng, line, keys, coming = random.Random(seed), KeyLine(), {}, 0
    line.ensure(500)
    for _ in range(2000):
        if rng.random() < 0.5:
            numbers = rng.sample(range(500), rng.randint(1, 9))
            new = [rng.randint(0, 30) for _ in numbers]
            line.add(np.array(numbers), np.array(new))
            for number, key in zip(numbers, new):
                coming += 1
                keys[number] = (key, coming)
        elif keys:
            gone = rng.sample(sorted(keys), min(len(keys), rng.randint(1, 9)))
            line.remove(np.array(gone))
            for number in gone:
                del keys[number]
        first = line.first(rng.randint(1, 12))
        assert [keys[n][0] for n in first.tolist()] == sorted(k for k, _ in keys.values())[: len(first)]
        assert line.count == len(keys)
    assert sorted(line.first(500).tolist()) == sorted(keys)
    assert line._length <= 2 * len(keys) + 1024 + 9, "outdated entries are cleaned"
    assert len(line._runs) <= 12, "few runs: a look takes the head of each"


def test_a_line_with_many_outdated_entries_at_its_head_looks_at_them_once():
    line = ArrivalLine()
    line.ensure(5000)
    line.add(np.arange(3000))
    line.remove(np.arange(1400))
    assert line.first(2).tolist() == [1400, 1401]
    assert line._head >= 1000
    assert line.first(2).tolist() == [1400, 1401]


def test_numbers_are_used_again_longest_unused_first():
    pool = Pool()
    assert pool.take(4).tolist() == [0, 1, 2, 3]
    pool.give(np.array([2, 0]))
    assert pool.take(3).tolist() == [2, 0, 4]
    for _ in range(200):  # around the ring, with growth
        pool.give(pool.take(150))
    assert sorted(pool.take(300).tolist()) == list(range(5, 305))


def test_forced_numbers_are_never_handed_out_again():
    pool = Pool()
    pool.force(np.array([3, 1]))
    assert sorted(pool.take(4).tolist()) == [0, 2, 4, 5]


def test_spans_are_counted_out_one_after_the_other():
    assert spans(np.array([5, 1, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert not len(spans(np.array([], int), np.array([], int)))


def test_handles_are_positive_and_give_back_their_parts_at_the_limits():
    slots, generations = np.array([0, MAX_SLOTS - 1]), np.array([1, (1 << 21) - 1])
    for pair, number in ((0, 0), (255, 1023)):
        rows = pack_handles(pair, number, slots, generations)
        assert (rows >= 0).all()
        found = [part.tolist() for part in unpack_handles(rows)]
        assert found == [[pair] * 2, [number] * 2, slots.tolist(), generations.tolist()]
