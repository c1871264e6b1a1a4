"""Rules of the weight relay: nothing half-written or wrong is ever read, and nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.relay import (
    RelayReader,
    feed,
    manifest_from_json,
    manifest_to_json,
)
from mindspeed_asyncflow.reshard.relay_file import RelayFile
from tests.reshard.whole_writer import WholeWriter


@pytest.fixture
def path() -> Iterator[str]:
    name = f"/dev/shm/asyncflow-test-{uuid.uuid4().hex}"
    yield name
    assert not os.path.exists(name), "the relay file must be gone after close"


def weights(seed: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (57, 8), "norm.weight": (7,), "bias": (), "head.weight": (3, 5, 2)}
    return [(name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()]


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_readers_see_exactly_the_published_tensors_in_order(path: str, dtype: str | None) -> None:
    given = weights(1)
    with WholeWriter(path, dtype=dtype) as writer:
        reader = RelayReader(writer.publish(5, given))
        assert reader.verify() == reader.manifest.fingerprint
        got = list(reader)
    assert [name for name, _ in got] == [name for name, _ in given]
    for (_, want), (_, tensor) in zip(given, got, strict=True):
        assert torch.equal(tensor, want.to(getattr(torch, dtype or "float32")))  # views outlive writer and reader


def test_the_last_versions_stay_readable_and_an_evicted_one_names_them(path: str) -> None:
    with WholeWriter(path, keep=3) as writer:
        manifests = [writer.publish(version, weights(version)) for version in range(5)]
        assert writer.versions == (2, 3, 4)
        for manifest in manifests[2:]:
            assert torch.equal(
                dict(RelayReader(manifest))["norm.weight"], dict(weights(manifest.version))["norm.weight"]
            )
        with pytest.raises(WeightSyncError, match=r"version 1 is not in the relay .* it keeps 2, 3, 4"):
            RelayReader(manifests[1])


def test_a_slot_recycled_during_a_read_is_noticed(path: str) -> None:
    with WholeWriter(path, keep=2) as writer:
        reader = RelayReader(writer.publish(1, weights(1)))
        stream = iter(reader)
        next(stream)
        writer.publish(2, weights(2))
        reader.check()  # version 1 is still there
        writer.publish(3, weights(3))
        list(stream)
        with pytest.raises(WeightSyncError, match="keeps 2, 3"):
            reader.check()


def test_a_version_that_is_recycled_while_it_is_loaded_does_not_count_as_loaded(path: str) -> None:
    with WholeWriter(path, keep=1) as writer:
        manifest = writer.publish(1, weights(1))
        got: dict[str, torch.Tensor] = {}

        def load(tensors: Iterable[tuple[str, torch.Tensor]], later: tuple[int, ...] = ()) -> None:
            for name, tensor in tensors:
                got[name] = tensor.clone()
                for version in later:
                    writer.publish(version, weights(version))
                later = ()

        assert feed(manifest, load) == manifest.fingerprint
        assert all(torch.equal(got[name], tensor) for name, tensor in weights(1))
        with pytest.raises(WeightSyncError, match=r"version 1 is not in the relay .* keeps 3"):
            feed(manifest, lambda tensors: load(tensors, later=(2, 3)))
        assert not all(torch.equal(got[name], tensor) for name, tensor in weights(1))  # what the guard is for


def test_a_publish_that_fails_halfway_is_never_readable_and_harms_no_other_version(path: str) -> None:
    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(3)[:2]
        raise RuntimeError("trainer died")

    with WholeWriter(path, keep=2) as writer:
        first, second = (writer.publish(version, weights(version)) for version in (1, 2))
        with pytest.raises(RuntimeError, match="trainer died"):
            writer.publish(3, breaks())
        assert writer.versions == (1, 2)
        for manifest in (first, second):
            RelayReader(manifest).verify()
        with pytest.raises(WeightSyncError, match="keeps 1, 2"):
            RelayReader(replace(first, version=3))
        with pytest.raises(RuntimeError, match="trainer died"):
            writer.publish(4, breaks())  # in the slot of the broken version, not of a good one
        assert writer.versions == (1, 2)
        RelayReader(writer.publish(4, weights(3))).verify()
        RelayReader(second).verify()
        assert writer.versions == (2, 4)


@pytest.mark.parametrize("keep", [1, 3])
def test_all_kept_versions_are_readable_until_the_new_one_is_complete(path: str, keep: int) -> None:
    with WholeWriter(path, keep=keep) as writer:
        manifests = [writer.publish(version, weights(version)) for version in range(keep)]

        def looking() -> Iterator[tuple[str, torch.Tensor]]:
            for pair in weights(9):
                yield pair
                assert writer.versions == tuple(range(keep))
                for manifest in manifests:
                    RelayReader(manifest).verify()

        writer.publish(9, looking())
        assert writer.versions == (*range(1, keep), 9)


def test_a_changed_byte_is_found_and_the_shard_is_named(path: str) -> None:
    with WholeWriter(path) as writer:
        manifest = writer.publish(1, weights(1))
        file = RelayFile.look(path)
        with open(path, "r+b") as raw:
            raw.seek(file.payload_at(file.slot_of(1)) + manifest.params[1].shards[0].offset + 3)
            byte = raw.read(1)
            raw.seek(-1, os.SEEK_CUR)
            raw.write(bytes([byte[0] ^ 1]))
        with pytest.raises(WeightSyncError, match=r"'norm.weight' box \(0, 7, 0, 1\) .* does not have the bytes"):
            RelayReader(manifest).verify()


def test_fingerprints_tell_names_bytes_and_places_apart_and_nothing_else(path: str) -> None:
    base = weights(1)
    with WholeWriter(path) as writer:
        first = writer.publish(1, base).fingerprint
        assert writer.publish(2, [(name, tensor.clone()) for name, tensor in base]).fingerprint == first
        base[0][1][0, 0], base[0][1][0, 1] = base[0][1][0, 1].clone(), base[0][1][0, 0].clone()
        assert writer.publish(3, base).fingerprint != first


def test_memory_is_taken_once_and_recycled(path: str) -> None:
    with WholeWriter(path, keep=3) as writer:
        writer.publish(1, weights(1))
        before = os.stat(path)
        assert before.st_blocks * 512 >= before.st_size > 0  # every page is there already
        for version in range(2, 9):
            writer.publish(version, weights(version))
        after = os.stat(path)
    assert (after.st_size, after.st_blocks) == (before.st_size, before.st_blocks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:-1], r"lacks 1 of 4 shards; first 'head.weight' rows 0 to 3, columns 0 to 10"),
        (lambda w: [*w, ("extra", torch.zeros(1))], "'extra' .* is not a tensor of the relay"),
        (lambda w: [*w, w[1]], "'norm.weight' rows 0 to 7, columns 0 to 1 is published twice"),
        (lambda w: [("embed.weight", torch.zeros(58, 8)), *w[1:]], r"not a shard that rank 0 writes; .* \(57, 8\)"),
        (lambda w: [("embed.weight", w[0][1].long()), *w[1:]], "floating-point weights only"),
    ],
)
def test_a_version_unlike_the_first_is_refused_by_name(path: str, change, message: str) -> None:  # type: ignore[no-untyped-def]
    """Contract test 11: missing, extra, repeated, reshaped or retyped tensors."""
    with WholeWriter(path) as writer:
        manifest = writer.publish(1, weights(1))
        with pytest.raises(WeightSyncError, match=message):
            writer.publish(2, change(weights(2)))
        assert writer.versions == (1,)
        RelayReader(manifest).verify()
        assert RelayReader(writer.publish(2, weights(2)[::-1])).verify()  # order does not matter


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ([], "no tensors"),
        ([("", torch.zeros(1))], "has no name"),
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], "a tensor twice"),
        ([("a", torch.zeros(1, dtype=torch.int64))], "floating-point weights only"),
    ],
)
def test_a_first_version_that_cannot_work_is_refused(path: str, first: list, message: str) -> None:
    with WholeWriter(path) as writer, pytest.raises(WeightSyncError, match=message):
        writer.publish(1, first)


def test_ragged_types_are_cast_once_when_a_type_is_given(path: str) -> None:
    with WholeWriter(path, dtype="bfloat16") as writer:
        got = dict(RelayReader(writer.publish(1, [("a", torch.tensor([1.5])), ("b", torch.tensor([2.5]).bfloat16())])))
        assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}


def test_a_tensor_larger_than_all_others_together_passes(path: str) -> None:
    big = torch.arange(3_000_000, dtype=torch.float32)
    with WholeWriter(path) as writer:
        got = dict(RelayReader(writer.publish(1, [("small", torch.ones(2)), ("big", big)])))
        assert torch.equal(got["big"], big)


def test_versions_only_rise_and_a_rank_has_one_writer(path: str) -> None:
    with WholeWriter(path) as writer:
        writer.publish(4, weights(1))
        with pytest.raises(WeightSyncError, match="version 4 is not newer than the published 4"):
            writer.publish(4, weights(1))
        with pytest.raises(WeightSyncError, match=r"another process writes to .* as rank 0"):
            WholeWriter(path).publish(5, weights(1))
        with pytest.raises(WeightSyncError, match="another layout"):
            WholeWriter(path).publish(5, weights(1)[1:])
    with pytest.raises(WeightSyncError, match="closed"):
        writer.publish(5, weights(1))
    writer.close()


def test_too_little_shared_memory_is_said_before_anything_is_written(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with WholeWriter(path) as writer, pytest.raises(WeightSyncError, match=r"do not fit into .*No space left"):
        writer.publish(1, weights(1))


def test_another_process_reads_the_same_bytes(path: str) -> None:
    code = (
        "import sys; from mindspeed_asyncflow.reshard.relay import RelayReader, manifest_from_json\n"
        "reader = RelayReader(manifest_from_json(sys.stdin.read()))\n"
        "print(reader.verify(), len(reader.manifest.params))"
    )
    with WholeWriter(path) as writer:
        manifest = writer.publish(1, weights(1))
        assert manifest_from_json(manifest_to_json(manifest)) == manifest
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=manifest_to_json(manifest),
            capture_output=True,
            text=True,
            cwd=root,
            timeout=60,
        )
    assert done.stdout.split() == [manifest.fingerprint, "4"], done.stderr


def test_a_missing_file_and_a_short_file_are_named(path: str) -> None:
    with WholeWriter(path) as writer:
        manifest = writer.publish(1, weights(1))
        os.truncate(path, os.stat(path).st_size - 1)
        with pytest.raises(WeightSyncError, match="but has only"):
            RelayReader(manifest)
    with pytest.raises(WeightSyncError, match="No such file"):
        RelayReader(manifest)


@pytest.mark.slow
def test_a_reader_killed_in_the_middle_disturbs_nobody(path: str) -> None:
    code = (
        "import sys; from mindspeed_asyncflow.reshard.relay import RelayReader, manifest_from_json\n"
        "stream = iter(RelayReader(manifest_from_json(sys.stdin.readline())))\n"
        "print(next(stream)[0], flush=True); sys.stdin.readline()"
    )
    root = Path(__file__).resolve().parents[2]
    with WholeWriter(path) as writer:
        manifest = writer.publish(1, weights(1))
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as reading:  # type: ignore[call-overload]
            reading.stdin.write(manifest_to_json(manifest) + "\n")
            reading.stdin.flush()
            assert reading.stdout.readline() == "embed.weight\n"
            reading.kill()
        other = RelayReader(manifest)
        assert other.verify()
        for version in (2, 3, 4):
            RelayReader(writer.publish(version, weights(version))).verify()
        with pytest.raises(WeightSyncError, match="keeps 2, 3, 4"):
            other.check()


def test_the_text_of_a_manifest_stays_small(path: str) -> None:
    with WholeWriter(path) as writer:
        manifest = writer.publish(1, [(f"w{i}", torch.zeros(1)) for i in range(5000)])
        assert len(manifest_to_json(manifest)) < 200
        with pytest.raises(WeightSyncError, match="published fingerprint 0000, found"):
            manifest_from_json(manifest_to_json(replace(manifest, fingerprint="0000")))
        some = RelayFile.look(path).manifest(1, [f"w{i}" for i in range(10, 20)])
        assert manifest_from_json(manifest_to_json(some)) == some and len(some.params) == 10
