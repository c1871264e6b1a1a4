"""Free runs: nothing is lost or given twice, and many runs cost no more than few."""

import random
import time

import numpy as np
import pytest

from mindspeed_asyncflow.dock.freelist import FreeList


def test_random_takes_and_returns_never_overlap_and_leave_one_run():
    rng, free, held = random.Random(0), FreeList(10, 100_010), {}
    for _ in range(20_000):
        if held and rng.random() < 0.5:
            gone = rng.sample(sorted(held), min(len(held), rng.randint(1, 8)))
            free.give(np.array(gone), np.array([held.pop(start) for start in gone]))
        else:
            size = rng.choice((1, 2, 7, 64, 300))
            start = free.take(size)
            if start is not None:
                held[start] = start + size
    starts = np.array(sorted(held))
    ends = np.array([held[s] for s in starts.tolist()])
    assert bool((starts[1:] >= ends[:-1]).all()) and starts[0] >= 10 and ends[-1] <= 100_010
    assert free.total == 100_000 - int((ends - starts).sum())
    free.give(starts, ends)
    assert free.largest == free.total == 100_000
    assert free.take(100_000) == 10 and free.take(1) is None


def fragmented(runs: int) -> FreeList:
    """So many free runs of 1 or 2 granules, between used ones, and a long one at the end."""
    free = FreeList(0, 4 * runs + 1_000_000)
    assert free.take(4 * runs) == 0
    starts = np.arange(runs) * 4
    free.give(starts, starts + 1 + np.arange(runs) % 2)
    return free


@pytest.mark.parametrize("runs", [100, 100_000])
def test_a_search_among_many_fragments_takes_microseconds(runs):
    """100,000 fragments: a mean of under 100 us per take, for long runs and for short ones, returns included."""
    free = fragmented(runs)
    free.take(1)
    times = []
    for repeat in range(5):
        begun = time.process_time()
        for i in range(200):
            start = free.take(500 + (i + repeat) % 3 * 17)
            assert start is not None and start >= 4 * runs
            if i % 2:
                free.give(np.array([start]), np.array([start + 500 + (i + repeat) % 3 * 17]))
            assert free.take(2) is not None
        times.append((time.process_time() - begun) / 400)
    print(f"{runs} runs: {min(times) * 1e6:.1f} us per take")
    assert min(times) < 100e-6
