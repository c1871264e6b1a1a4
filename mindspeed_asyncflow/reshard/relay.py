"""Versioned weights in the host memory of a node: every trainer rank writes its own boxes, anybody on the node reads.

Ranks cast once, straight into the shared file, and wait for nobody: a version is complete when all writers' entries say
so. The driver puts the checksums that the ranks report into one manifest (`assemble`). Readers map a version without
copying and check before *and after* they used the bytes that it is still there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.records import ParamMeta, WeightManifest
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape
from mindspeed_asyncflow.reshard.fingerprint import checksum, checksums, fingerprint
from mindspeed_asyncflow.reshard.relay_file import NOBODY, RelayFile
from mindspeed_asyncflow.reshard.relay_table import RelayTable

if TYPE_CHECKING:
    import torch


class RelayWriter:
    """What `rank` writes into the relay file at `path` (under /dev/shm), which all `writers` of this node share.

    `table` is the same on all of them and may name more ranks, those of other nodes. `keep` complete versions stay
    readable while the next one is written: the memory taken here is (bytes of the own shards) x (`keep` + 1). Raises
    `WeightSyncError`.
    """

    def __init__(
        self, path: str, table: RelayTable, rank: int = 0, writers: Sequence[int] = (0,), keep: int = 3
    ) -> None:
        self.path, self.table, self.rank = path, table, rank
        self._file = RelayFile.join(path, table, writers, keep)
        try:
            self._place = self._file.own_writer(rank)
            self._own = np.array([i for i, s in enumerate(table.shards) if s.writer == rank], np.int64)
            self._file.allocate(self._own.tolist())
        except BaseException:
            self._file.close()
            raise
        self._closed = False

    @property
    def versions(self) -> tuple[int, ...]:
        """Complete versions in the relay, oldest first."""
        return self._file.versions()

    def publish(self, version: int, tensors: Iterable[tuple[str, Box, torch.Tensor]]) -> dict[int, int]:
        """Copy this rank's boxes (any device, any floating type) into the version's slot, casting once.

        `tensors`: (Hugging Face name, box, tensor of the box's shape) in any order, every own shard once. Returns
        crc32 of the stored bytes by shard number. The call that completes a version drops the oldest one; a call that
        raises leaves all versions readable that were.
        """
        if self._closed:
            raise WeightSyncError(f"relay {self.path} is closed")
        newest = max(int(entry[self._place]) for entry in self._file.entries)
        if version < newest or version in self.versions:
            raise WeightSyncError(f"version {version} is not newer than the published {newest}")
        slot = self._file.assign(version, self._place)
        self._file.entries[slot][self._place] = NOBODY
        crc: dict[int, int] = {}
        for name, box, tensor in tensors:
            shard = self._shard(version, name, box)
            if shard in crc:
                raise WeightSyncError(f"version {version}: {self.table.describe(shard)} is published twice")
            crc[shard] = self._store(slot, shard, tensor)
        missing = [i for i in self._own.tolist() if i not in crc]
        if missing:
            raise WeightSyncError(
                f"version {version} of rank {self.rank} lacks {len(missing)} of {len(self._own)} shards; "
                f"first {self.table.describe(missing[0])}"
            )
        self._file.fill(
            slot, version, self._place, self._own, np.array([crc[i] for i in self._own.tolist()], np.uint32)
        )
        return crc

    def _shard(self, version: int, name: str, box: Box) -> int:
        shard = self.table.number.get((name, Box(*box)))
        if shard is not None and self.table.shards[shard].writer == self.rank:
            return shard
        known = self.table.index.get(name)
        what = f"a shard that rank {self.rank} writes" if known is not None else "a tensor of the relay"
        shape = f"; its shape is {self.table.params[known].shape}" if known is not None else ""
        raise WeightSyncError(f"version {version}: {name!r} {tuple(box)} is not {what}{shape}")

    def _store(self, slot: int, shard: int, tensor: torch.Tensor) -> int:
        import torch

        meta, param = self.table.shards[shard], self.table.param_of[shard]
        box = Box(*meta.box)
        if not tensor.is_floating_point():
            raise WeightSyncError(
                f"tensor {param.name!r} is {tensor.dtype}; the relay carries floating-point weights only"
            )
        if matrix_shape(tensor.shape) != (box.rows, box.cols):
            raise WeightSyncError(f"{self.table.describe(shard)} came with shape {tuple(tensor.shape)}")
        if not meta.nbytes:
            return checksum(b"")
        start = self._file.payload_at(slot) + meta.offset
        stored = self._file.bytes[start : start + meta.nbytes]
        target = torch.from_numpy(stored).view(getattr(torch, param.dtype)).view(box.rows, box.cols)
        target.copy_(tensor.detach().reshape(box.rows, box.cols))
        return checksum(stored.data)

    def close(self) -> None:
        """Leave the relay; the last writer removes the file, and readers that have it mapped keep what they see."""
        self._closed = True
        self._file.close()

    def __enter__(self) -> RelayWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def assemble(version: int, table: RelayTable, path: str, parts: Iterable[Mapping[int, int]]) -> WeightManifest:
    """One manifest from what the writers returned. Raises `WeightSyncError` unless they hold every shard once."""
    crc: dict[int, int] = {}
    count = 0
    for part in parts:
        crc.update(part)
        count += len(part)
    missing = next((i for i in range(len(table.shards)) if i not in crc), None)
    if missing is not None:
        raise WeightSyncError(f"version {version}: no writer published {table.describe(missing)}")
    if count > len(table.shards):
        raise WeightSyncError(f"version {version}: the writers published {count} shards, the table has fewer")
    sums = tuple(crc[i] for i in range(len(table.shards)))
    combined = fingerprint(table.digest, np.array(sums, np.uint32))
    return WeightManifest(version, path, table.slot_bytes, table.params, sums, combined)


def unchanged_share(before: WeightManifest, now: WeightManifest) -> float:
    """Share of bytes in shards whose checksum is that of the version before."""
    sizes = np.array([s.nbytes for p in now.params for s in p.shards], dtype=np.float64)
    if not sizes.sum() or len(before.checksums) != len(now.checksums):
        return 0.0
    same = np.array(before.checksums) == np.array(now.checksums)
    return float(sizes[same].sum() / sizes.sum())


class RelayReader:
    """Maps one version and yields its tensors. Views stay valid after the reader is gone.

    Use: iterate, copy what you need, then `check()`: it raises if a writer recycled the slot meanwhile.
    """

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._file = RelayFile.look(manifest.path)
        self._slot = self._file.slot_of(manifest.version)

    def check(self) -> None:
        """Raise `WeightSyncError` unless the slot still holds the complete version of the manifest."""
        self._file.check(self._slot, self.manifest.version)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the manifest's order: a view where the tensor lies in one piece, else put together here,
        one tensor at a time."""
        import torch

        for param in self.manifest.params:
            dtype = getattr(torch, param.dtype)
            rows, cols = matrix_shape(param.shape)
            boxes = [Box(*shard.box) for shard in param.shards]
            if all(box.cols == cols for box in boxes):
                yield param.name, self._block(param, 0, rows * cols, dtype).view(param.shape)
                continue
            full = torch.empty(rows, cols, dtype=dtype)
            for index, box in enumerate(boxes):
                block = self._block(param, index, box.size, dtype)
                full[box.r0 : box.r1, box.c0 : box.c1] = block.view(box.rows, box.cols)
            yield param.name, full.view(param.shape)

    def _block(self, param: ParamMeta, index: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements from the start of a shard; [count]."""
        import torch

        if not count:
            return torch.empty(0, dtype=dtype)
        start = self._file.payload_at(self._slot) + param.shards[index].offset
        return torch.frombuffer(self._file.map, dtype=dtype, count=count, offset=start)

    def verify(self) -> str:
        """Fingerprint of the version, after all bytes of the manifest's tensors were summed anew.

        Raises `WeightSyncError` that names the first shard whose bytes are not those published.
        """
        found = self._file.fingerprint(self._slot, self.manifest.version)
        if found != self.manifest.fingerprint:
            raise WeightSyncError(
                f"weight version {self.manifest.version}: published fingerprint {self.manifest.fingerprint}, "
                f"found {found} in {self.manifest.path}"
            )
        base = self._file.payload_at(self._slot)
        shards = [(param, shard) for param in self.manifest.params for shard in param.shards]
        stored = (self._file.bytes[base + s.offset : base + s.offset + s.nbytes] for _, s in shards)
        for (param, shard), expected, summed in zip(shards, self.manifest.checksums, checksums(stored), strict=True):
            if summed != expected:
                self.check()
                raise WeightSyncError(
                    f"weight version {self.manifest.version}: {param.name!r} box {shard.box} in {self.manifest.path} "
                    "does not have the bytes that were published"
                )
        self.check()
        return found


def feed(manifest: WeightManifest, load: Callable[[Iterator[tuple[str, torch.Tensor]]], Any]) -> str:
    """Give `load` one version's (name, tensor) pairs, which it must copy; returns the version's fingerprint.

    Raises `WeightSyncError` where the bytes are not those published, or the slot was recycled while `load` copied: what
    it has is then worth nothing.
    """
    reader = RelayReader(manifest)
    fingerprint = reader.verify()
    load(iter(reader))
    reader.check()
    return fingerprint


def manifest_to_json(manifest: WeightManifest) -> str:
    """Plain text for processes of this node, about 200 bytes: table and checksums stay in the relay file."""
    text = {"version": manifest.version, "path": manifest.path, "fingerprint": manifest.fingerprint}
    index = RelayFile.look(manifest.path).table.index
    if len(manifest.params) == len(index):
        return json.dumps(text)
    runs: list[list[int]] = []  # [first, last + 1] of the tensors that a subset holds
    for place in sorted(index[param.name] for param in manifest.params):
        if runs and runs[-1][1] == place:
            runs[-1][1] += 1
        else:
            runs.append([place, place + 1])
    return json.dumps({**text, "tensors": runs})


def manifest_from_json(text: str) -> WeightManifest:
    """The manifest again. Raises `WeightSyncError` if the relay does not hold that version with that fingerprint."""
    raw = json.loads(text)
    file = RelayFile.look(raw["path"])
    runs = raw.get("tensors")
    names = None if runs is None else [p.name for first, end in runs for p in file.table.params[first:end]]
    manifest = file.manifest(raw["version"], names)
    if manifest.fingerprint != raw["fingerprint"]:
        raise WeightSyncError(
            f"weight version {manifest.version}: published fingerprint {raw['fingerprint']}, found "
            f"{manifest.fingerprint} in {manifest.path}"
        )
    return manifest
