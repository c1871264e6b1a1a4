"""The arena and its map: bytes come back as they were, and all of them come back."""

import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.dock.arena import GRANULE, Arena
from mindspeed_asyncflow.dock.columns import ColumnSpec
from mindspeed_asyncflow.dock.freelist import FreeList
from mindspeed_asyncflow.dock.warehouse import Placed, Warehouse, cell_offsets
from mindspeed_asyncflow.errors import PlatformError

COLUMNS = [ColumnSpec("ids", "int32", "ragged"), ColumnSpec("text", "uint8", "ragged"), ColumnSpec("score", "float64")]


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    made = Arena.create(str(tmp_path_factory.mktemp("arena") / "a"), 1 << 16)
    yield made
    made.unlink()


def one_run(house: Warehouse, nbytes: int) -> int | None:
    """Where a single cell of so many bytes would go."""
    pieces = house.reserve([house.parts["text"]], [np.array([nbytes])])
    return None if pieces is None else pieces[0][-1]


def store(house: Warehouse, index: np.ndarray, lengths: dict[str, np.ndarray], keep: np.ndarray, rng) -> dict | None:
    """Writes random cells; returns {(column, index): values} of the kept ones, None when there is no room."""
    parts, sizes = [house.parts[name] for name in lengths], list(lengths.values())
    pieces = house.reserve(parts, sizes)
    if pieces is None:
        return None
    assert all(offset % GRANULE == 0 for *_, offset in pieces)
    cells, where = {}, cell_offsets(pieces, parts, sizes)
    for i, (name, column) in enumerate(lengths.items()):  # may be in several pieces, when no free run is long enough
        values = rng.integers(0, 255, int(column.sum())).astype(house.parts[name].dtype)
        ends = np.cumsum(column)
        for j, first, last, offset in pieces:
            if j == i and last > first:
                begin = int(ends[first] - column[first])
                house.arena.room(offset, parts[i], int(ends[last - 1]) - begin)[:] = values[begin : ends[last - 1]]
        house.place(0, [Placed(name, index, where[i], column, keep)])
        rows = np.split(values, ends[:-1])
        cells |= {(name, int(i)): v for i, v, k in zip(index, rows, keep) if k}
    return cells


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_random_writes_and_releases_keep_every_live_cell_and_give_all_bytes_back(arena, seed):
    """Cells of several rows share granules at their edges; releasing one never touches its neighbours."""
    random_, rng = random.Random(seed), np.random.default_rng(seed)
    house, live, free = Warehouse(COLUMNS, arena), {}, list(range(64))
    for _ in range(30):
        if free and random_.random() < 0.6:
            random_.shuffle(free)
            index = np.array([free.pop() for _ in range(min(len(free), random_.randint(1, 8)))])
            lengths = {
                "ids": rng.integers(0, 60, len(index)),
                "text": rng.integers(0, 200, len(index)),
                "score": np.ones(len(index), np.int64),
            }
            keep = rng.random(len(index)) < 0.8
            cells = store(house, index, lengths, keep, rng)
            live |= cells or {}
            free += index.tolist() if cells is None else index[~keep].tolist()
        elif live:
            gone = np.array(random_.sample(sorted({i for _, i in live}), random_.randint(1, len({i for _, i in live}))))
            house.release_rows(0, gone, gone[:0])
            live = {key: v for key, v in live.items() if key[1] not in set(gone.tolist())}
            free += gone.tolist()
        for (name, i), values in live.items():
            assert np.array_equal(house.read(0, name, np.array([i]))[0], values)
        assert house.payload_bytes == sum(v.nbytes for v in live.values())
        assert house.payload_bytes <= house.used_bytes
    house.release_rows(0, np.array(sorted({i for _, i in live}), np.int64), np.empty(0, np.int64))
    assert house.used_bytes == house.payload_bytes == 0
    assert one_run(house, house.capacity_bytes) == GRANULE, "the free space is one run again"


def test_rows_carry_no_padding_in_the_arena(arena):
    house = Warehouse(COLUMNS, arena)
    lengths = {"text": np.full(100, 7)}
    store(house, np.arange(100), lengths, np.ones(100, bool), np.random.default_rng(0))
    assert house.payload_bytes == 700
    assert house.used_bytes == -(-700 // GRANULE) * GRANULE
    house.release(0, {"text": np.arange(99)})
    assert house.used_bytes == GRANULE, "released bytes are free although one row of the batch lives"


def test_an_unplaced_extent_can_be_given_back_and_a_too_long_one_is_not_found(arena):
    house = Warehouse(COLUMNS, arena)
    assert one_run(house, house.capacity_bytes + 1) is None
    part, lengths = house.parts["text"], np.array([1000])
    house.cancel(house.reserve([part], [lengths]), [part], [lengths])
    assert house.used_bytes == 0


def test_free_runs_join_and_serve_the_first_that_fits():
    free = FreeList(0, 10)
    a, b, c = free.take(3), free.take(3), free.take(3)
    assert (a, b, c, free.take(2)) == (0, 3, 6, None)
    free.give(np.array([6, 0]), np.array([9, 3]))
    assert free.largest == 4 and free.take(4) == 6
    free.give(np.array([3]), np.array([6]))
    assert (free.largest, free.total, free.take(6)) == (6, 6, 0)
    assert free.take(1) is None and free.total == 0


def test_another_process_view_needs_the_token(arena):
    other = Arena.attach(arena.path, arena.token)
    assert other is not None
    arena.bytes[GRANULE : GRANULE + 16] = np.array([1.5, 2.5]).view(np.uint8)
    assert other.view(np.dtype("float64"))[GRANULE // 8 : GRANULE // 8 + 2].tolist() == [1.5, 2.5]
    with pytest.raises(ValueError, match="read-only"):
        other.view(np.dtype("float64"))[8] = 0
    assert Arena.attach(arena.path, b"another token") is None
    assert Arena.attach(arena.path + "x", arena.token) is None


def test_missing_memory_and_a_taken_name_are_platform_errors(tmp_path):
    path = str(tmp_path / "arena")
    with pytest.raises(PlatformError, match=r"dock\.arena_mb"):
        Arena.create(path, 1 << 60)
    assert not os.path.exists(path)
    Arena.create(path, 1 << 12)
    with pytest.raises(PlatformError, match="cannot be created: File exists"):
        Arena.create(path, 1 << 12)
