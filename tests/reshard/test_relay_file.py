"""Rules of the relay's file: ranks share it without waiting for each other, and whoever dies harms nobody."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box, whole
from mindspeed_asyncflow.reshard.relay import (
    RelayReader,
    RelayWriter,
    assemble,
    manifest_from_json,
    manifest_to_json,
)
from mindspeed_asyncflow.reshard.relay_file import RelayFile
from mindspeed_asyncflow.reshard.relay_table import RelayTable, make_table


@pytest.fixture
def path() -> Iterator[str]:
    name = f"/dev/shm/asyncflow-test-{uuid.uuid4().hex}"
    yield name
    assert not os.path.exists(name), "the relay file must be gone after close"


SHAPES = {"embed": (6, 4), "proj": (4, 6), "norm": (5,)}
PARTS = {
    0: [("embed", Box(0, 3, 0, 4)), ("proj", Box(0, 4, 0, 3)), ("norm", Box(0, 5, 0, 1))],
    1: [("embed", Box(3, 6, 0, 4)), ("proj", Box(0, 4, 3, 6))],
}


def cut_table() -> RelayTable:
    """Two ranks: a tensor cut along rows, one along columns, one that only rank 0 writes."""
    return make_table(SHAPES, "bfloat16", PARTS)


def full(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def own(rank: int, seed: int) -> Iterator[tuple[str, Box, torch.Tensor]]:
    for name, box in PARTS[rank]:
        matrix = full(seed)[name].reshape(SHAPES[name][0], -1)
        yield name, box, matrix[box.r0 : box.r1, box.c0 : box.c1]


def test_two_ranks_write_their_boxes_and_readers_see_whole_tensors(path: str) -> None:
    table = cut_table()
    with RelayWriter(path, table, 0, (0, 1)) as zero, RelayWriter(path, table, 1, (0, 1)) as one:
        parts = [one.publish(7, own(1, 7))]
        assert zero.versions == ()  # rank 0 is not done
        parts.append(zero.publish(7, own(0, 7)))
        manifest = assemble(7, table, path, parts)
        assert (zero.versions, one.versions) == ((7,), (7,))
        reader = RelayReader(manifest)
        assert reader.verify() == manifest.fingerprint
        got = dict(reader)
        assert list(got) == list(SHAPES)
        for name, tensor in full(7).items():
            assert torch.equal(got[name], tensor.bfloat16())
        assert manifest_from_json(manifest_to_json(manifest)) == manifest
        with pytest.raises(WeightSyncError, match="no writer published 'embed' rows 3 to 6"):
            assemble(7, table, path, parts[1:])


def test_a_fast_rank_may_be_a_version_ahead_of_a_slow_one(path: str) -> None:
    table = cut_table()
    with RelayWriter(path, table, 0, (0, 1)) as fast, RelayWriter(path, table, 1, (0, 1)) as slow:
        for version in (1, 2):
            fast.publish(version, own(0, version))
            slow.publish(version, own(1, version))
        parts = [fast.publish(3, own(0, 3))]
        fast.publish(4, own(0, 4))
        parts.append(slow.publish(3, own(1, 3)))
        assert fast.versions == (1, 2, 3)
        RelayReader(assemble(3, table, path, parts)).verify()
        for version in (5, 6, 7):
            fast.publish(version, own(0, version))

        def overtaken() -> Iterator[tuple[str, Box, torch.Tensor]]:
            yield from own(1, 4)
            fast.publish(8, own(0, 8))

        with pytest.raises(WeightSyncError, match=r"version 4 was overtaken .* by 8"):
            slow.publish(4, overtaken())


def test_a_version_that_one_rank_failed_to_write_can_be_written_again_by_all(path: str) -> None:
    table = cut_table()
    with RelayWriter(path, table, 0, (0, 1)) as zero, RelayWriter(path, table, 1, (0, 1)) as one:
        zero.publish(1, own(0, 1))
        with pytest.raises(WeightSyncError, match=r"version 1 of rank 1 lacks 2 of 2 shards"):
            one.publish(1, [])
        parts = [zero.publish(1, own(0, 9)), one.publish(1, own(1, 9))]
        assert torch.equal(dict(RelayReader(assemble(1, table, path, parts)))["embed"], full(9)["embed"].bfloat16())


def test_a_version_that_one_rank_is_writing_again_is_not_complete_meanwhile(path: str) -> None:
    with RelayWriter(path, cut_table(), 0, (0, 1)) as zero, RelayWriter(path, cut_table(), 1, (0, 1)) as one:
        zero.publish(1, own(0, 1))

        def again() -> Iterator[tuple[str, Box, torch.Tensor]]:
            yield from own(0, 9)
            one.publish(1, own(1, 9))
            assert one.versions == ()

        zero.publish(1, again())
        assert one.versions == (1,)


def test_a_version_that_comes_again_after_it_was_dropped_is_complete_when_it_is_filled_again(path: str) -> None:
    every = np.zeros(1, np.int64)
    with contextlib.closing(RelayFile.join(path, make_table({"w": (2,)}, "float32"), (0,), keep=1)) as file:
        for version in (1, 2, 1):
            slot = file.assign(version)
            assert version not in file.versions()
            file.fill(slot, version, 0, every, every.astype(np.uint32))
            assert file.versions() == (version,)


def test_a_rank_takes_only_the_memory_of_its_own_boxes(path: str) -> None:
    shapes = {"a": (1024, 1024), "b": (1024, 1024)}
    boxes = {rank: [(name, whole(shapes[name]))] for rank, name in enumerate(shapes)}
    table = make_table(shapes, "float32", boxes)
    with RelayWriter(path, table, 1, (1,)) as writer:
        writer.publish(1, [("b", whole((1024, 1024)), torch.ones(1024, 1024))])
        size, taken = os.stat(path).st_size, os.stat(path).st_blocks * 512
        assert size > 4 * 8 << 20 and 4 * 4 << 20 <= taken < 4.1 * (4 << 20)  # three that are kept, and one


WRITER = """
import sys, torch
from mindspeed_asyncflow.reshard.boxes import Box
from mindspeed_asyncflow.reshard.relay import RelayWriter
from tests.reshard.test_relay_file import cut_table, own
path, dies = sys.argv[1], len(sys.argv) > 2
writer = RelayWriter(path, cut_table(), 1, (0, 1))
def halting(version):
    for number, part in enumerate(own(1, version)):
        yield part
        print("stored", number, flush=True)
        sys.stdin.readline()
for version in (1, 2):
    writer.publish(version, own(1, version))
    print("published", version, flush=True)
if dies:
    writer.publish(3, halting(3))
"""


def writer_process(path: str, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, path, *more]
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)


@pytest.mark.slow
def test_a_writer_killed_in_the_middle_leaves_the_versions_before_readable(path: str) -> None:
    table = cut_table()
    with RelayWriter(path, table, 0, (0, 1)) as zero:
        mine = {version: zero.publish(version, own(0, version)) for version in (1, 2, 3)}
        with writer_process(path, "dies") as other:
            assert other.stdout is not None
            lines = [other.stdout.readline() for _ in range(3)]
            assert lines == ["published 1\n", "published 2\n", "stored 0\n"]
            other.kill()
        assert mine[3] and zero.versions == (1, 2)
        for version in (1, 2):
            reader = RelayReader(RelayFile.look(path).manifest(version))
            reader.verify()
            assert torch.equal(dict(reader)["proj"], full(version)["proj"].bfloat16())
        with RelayWriter(path, table, 1, (0, 1)) as again:  # the kernel gave its place back
            again.publish(3, own(1, 3))
            RelayReader(RelayFile.look(path).manifest(3)).verify()


def test_a_file_that_is_no_relay_is_left_alone(path: str) -> None:
    Path(path).write_bytes(b"somebody else's" * 10)
    with pytest.raises(WeightSyncError, match="is not a relay"):
        RelayWriter(path, cut_table(), 0, (0, 1))
    with pytest.raises(WeightSyncError, match="is not a relay"):
        RelayFile.look(path)
    assert Path(path).read_bytes() == b"somebody else's" * 10
    os.unlink(path)


def test_what_a_dead_run_left_is_made_anew_and_its_readers_keep_what_they_see(path: str) -> None:
    with RelayWriter(path, cut_table(), 0, (0, 1)) as zero, RelayWriter(path, cut_table(), 1, (0, 1)) as one:
        zero.publish(1, own(0, 1))
        one.publish(1, own(1, 1))
        left = Path(path).read_bytes()
    Path(path).write_bytes(left)  # as if its users had died: nobody holds its locks
    reader = RelayReader(RelayFile.look(path).manifest(1))
    with RelayWriter(path, make_table({"w": (2,)}, "float32")) as writer:
        writer.publish(0, [("w", Box(0, 2, 0, 1), torch.ones(2))])
        assert writer.versions == (0,)
        assert torch.equal(dict(reader)["embed"], full(1)["embed"].bfloat16())
    Path(path).write_bytes(bytes(5000))  # its maker died before it had written the head
    with RelayWriter(path, cut_table(), 0, (0,)) as writer:
        assert writer.versions == ()
