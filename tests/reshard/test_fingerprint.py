"""Rules of checksums and fingerprints: order, place, type and every byte count, how the work was shared does not."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.reshard import fingerprint as module
from mindspeed_asyncflow.reshard.fingerprint import checksums, fingerprint, fingerprint_of


@pytest.mark.parametrize("batch_bytes", [1, 1000, 1 << 30])
def test_checksums_come_in_order_whoever_summed_them(monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", batch_bytes)
    random = np.random.default_rng(1)
    buffers = [random.integers(0, 256, int(n), dtype=np.uint8) for n in random.integers(0, 900, 200)]
    assert list(checksums(iter(buffers))) == [zlib.crc32(b.tobytes()) for b in buffers]
    assert list(checksums([])) == []


def test_a_fingerprint_depends_on_the_table_and_on_every_checksum_in_its_place() -> None:
    sums = np.array([1, 2, 3], np.uint32)
    same = fingerprint(b"table", sums)
    assert len(same) == 16 and same == fingerprint(b"table", sums.astype(">u4"))
    assert (
        len({same, fingerprint(b"tables", sums), fingerprint(b"table", sums[::-1]), fingerprint(b"table", sums[:2])})
        == 4
    )


def test_tensors_are_told_apart_by_name_type_shape_and_bytes_and_not_by_order() -> None:
    base = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2).bfloat16()}
    same = fingerprint_of(base)
    assert (
        same == fingerprint_of(dict(reversed(base.items()))) == fingerprint_of({n: t.clone() for n, t in base.items()})
    )
    others = [
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"].reshape(3, 2), "b": base["b"]},
        {"a": base["a"], "b": base["b"].half()},
        {"a": base["a"] + 1e-6, "b": base["b"]},
        {"a": base["a"]},
    ]
    assert len({same, *map(fingerprint_of, others)}) == 1 + len(others)
    wide = torch.arange(12.0).reshape(2, 6)
    assert fingerprint_of({"a": wide[:, :3]}) == fingerprint_of({"a": wide[:, :3].contiguous()})
