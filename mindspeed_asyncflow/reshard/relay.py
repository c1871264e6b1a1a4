"""Versioned weights in host shared memory: one writer (trainer rank 0), any number of readers on the same node.

The relay is one file of `keep` equal slots, each a header page followed by the bytes of one version:

    | header 0 | tensors of version a | header 1 | tensors of version b | ...

Slots are allocated at the first publish (their pages are touched there) and recycled, oldest version first. A slot
header says which version lies behind it and whether it is complete; it carries its own checksum, so a header that is
being rewritten never passes for a valid one. A reader checks the header before *and after* it used the bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.records import ParamMeta, WeightManifest

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096
ALIGN_BYTES = 64
EMPTY, WRITING, READY = 0, 1, 2
_MAGIC = b"AFRELAY1"
_HEADER = struct.Struct("<8sqqqqq")  # magic, version, state, payload bytes, slot stride in bytes, slots
_CHECKSUM = struct.Struct("<I")


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _pack_header(version: int, state: int, nbytes: int, stride: int, slots: int) -> bytes:
    body = _HEADER.pack(_MAGIC, version, state, nbytes, stride, slots)
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _unpack_header(raw: bytes) -> tuple[int, int, int, int, int] | None:
    """(version, state, payload bytes, stride, slots), or None for a header that is not whole."""
    body, check = raw[: _HEADER.size], raw[_HEADER.size : _HEADER.size + _CHECKSUM.size]
    if len(check) < _CHECKSUM.size or _CHECKSUM.unpack(check)[0] != zlib.crc32(body):
        return None
    magic, version, state, nbytes, stride, slots = _HEADER.unpack(body)
    return (version, state, nbytes, stride, slots) if magic == _MAGIC else None


class _Fingerprint:
    """Checksum of every tensor, combined with its name in publish order."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    def add(self, name: str, data: Any) -> None:
        self._hash.update(f"{name}:{zlib.crc32(data):08x};".encode())

    def hex(self) -> str:
        return self._hash.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The raw bytes of a contiguous host tensor, no copy (numpy knows no bfloat16, so they travel as uint8)."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


class RelayWriter:
    """Owns the relay file at `path` (under /dev/shm) and keeps the last `keep` versions in it.

    `dtype` (torch name, e.g. "bfloat16"): what every tensor is cast to, once; None publishes tensors as they are and
    then demands one floating type for all.
    """

    def __init__(self, path: str, keep: int = 3, dtype: str | None = None) -> None:
        if keep < 2:
            raise WeightSyncError(f"a relay needs at least 2 slots (one is read while one is written), got keep={keep}")
        self.path = path
        self.keep = keep
        self._dtype = dtype
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._params: tuple[ParamMeta, ...] = ()
        self._stride = 0
        self._versions: list[int | None] = [None] * keep

    @property
    def versions(self) -> tuple[int, ...]:
        """Complete versions in the relay, oldest first."""
        return tuple(sorted(v for v in self._versions if v is not None))

    def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Copy `weights` (name, host tensor) into the oldest slot and return where they are.

        The first call fixes names, shapes, order and slot size; it holds all tensors at once, later calls one at a
        time. A call that raises leaves all other versions readable. Raises `WeightSyncError`.
        """
        if self._fd < 0:
            raise WeightSyncError(f"relay {self.path} is closed")
        if self.versions and version <= self.versions[-1]:
            raise WeightSyncError(f"version {version} is not newer than the published {self.versions[-1]}")
        stream: Iterable[tuple[str, torch.Tensor]] = weights
        if not self._params:
            stream = list(weights)
            self._allocate(stream)
        slot = self._oldest_slot()
        base = slot * self._stride
        nbytes = self._params[-1].offset + self._params[-1].nbytes
        self._versions[slot] = None
        os.pwrite(self._fd, _pack_header(version, WRITING, nbytes, self._stride, self.keep), base)
        fingerprint = _Fingerprint()
        seen = 0
        for name, tensor in stream:
            cast = self._cast(name, tensor)
            meta = self._expect(seen, name, cast)
            data = _bytes_of(cast)
            self._write(data, base + PAGE_BYTES + meta.offset)
            fingerprint.add(name, data)
            seen += 1
        if seen != len(self._params):
            raise WeightSyncError(
                f"version {version} ends after {seen} of {len(self._params)} tensors; "
                f"the next one should be {self._params[seen].name!r}"
            )
        os.pwrite(self._fd, _pack_header(version, READY, nbytes, self._stride, self.keep), base)
        self._versions[slot] = version
        return WeightManifest(version, self.path, base + PAGE_BYTES, nbytes, self._params, fingerprint.hex())

    def _oldest_slot(self) -> int:
        """A slot without a complete version if there is one, else that of the oldest version."""
        ages = [(-1 if version is None else version, slot) for slot, version in enumerate(self._versions)]
        return min(ages)[1]

    def _allocate(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        if not weights:
            raise WeightSyncError("the first publish has no tensors")
        params: list[ParamMeta] = []
        offset = 0
        for name, tensor in weights:
            if not isinstance(name, str) or not name:
                raise WeightSyncError(f"tensor number {len(params)} has no name")
            if any(p.name == name for p in params):
                raise WeightSyncError(f"tensor {name!r} is published twice")
            cast = self._cast(name, tensor[:0] if tensor.dim() else tensor)
            dtype = str(cast.dtype).removeprefix("torch.")
            if params and dtype != params[0].dtype:
                raise WeightSyncError(
                    f"tensor {name!r} is {dtype} but {params[0].name!r} is {params[0].dtype}: "
                    "give the relay a dtype to cast to"
                )
            nbytes = tensor.numel() * cast.element_size()
            params.append(ParamMeta(name, dtype, tuple(tensor.shape), offset, nbytes))
            offset = _round_up(offset + nbytes, ALIGN_BYTES)
        stride = PAGE_BYTES + _round_up(max(offset, 1), PAGE_BYTES)
        try:
            os.posix_fallocate(self._fd, 0, stride * self.keep)  # tmpfs hands out every page now, or refuses
        except OSError as error:
            raise WeightSyncError(
                f"{self.keep} weight versions of {stride} bytes do not fit into {self.path}: {error.strerror}; "
                "free shared memory or mount a larger /dev/shm"
            ) from error
        self._params, self._stride = tuple(params), stride
        for slot in range(self.keep):
            os.pwrite(self._fd, _pack_header(-1, EMPTY, 0, stride, self.keep), slot * stride)

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        if not tensor.is_floating_point():
            raise WeightSyncError(f"tensor {name!r} is {tensor.dtype}; the relay carries floating-point weights only")
        dtype = getattr(torch, self._dtype) if self._dtype else tensor.dtype
        return tensor.detach().to(device="cpu", dtype=dtype).contiguous()

    def _expect(self, index: int, name: str, tensor: torch.Tensor) -> ParamMeta:
        if index >= len(self._params):
            raise WeightSyncError(f"unexpected tensor {name!r} after the last one, {self._params[-1].name!r}")
        meta = self._params[index]
        if name != meta.name:
            raise WeightSyncError(f"tensor number {index} is {name!r}, the first version had {meta.name!r} there")
        shape = tuple(tensor.shape)
        if shape != meta.shape:
            raise WeightSyncError(f"tensor {name!r} has shape {shape}, the first version had {meta.shape}")
        if str(tensor.dtype) != f"torch.{meta.dtype}":
            raise WeightSyncError(f"tensor {name!r} is {tensor.dtype}, the first version was {meta.dtype}")
        return meta

    def _write(self, data: Any, offset: int) -> None:
        while len(data):
            written = os.pwrite(self._fd, data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        """Remove the file; readers that have it mapped keep what they see. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            os.unlink(self.path)

    def __enter__(self) -> RelayWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RelayReader:
    """Maps one version and yields its tensors without copying. Views stay valid after the reader is gone.

    Use: iterate, copy what you need, then `check()`: it raises if the writer recycled the slot meanwhile.
    """

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        try:
            fd = os.open(manifest.path, os.O_RDONLY)
        except OSError as error:
            raise WeightSyncError(f"relay {manifest.path} of version {manifest.version}: {error.strerror}") from error
        try:
            size = os.fstat(fd).st_size
            end = manifest.offset + manifest.nbytes
            if end > size:
                raise WeightSyncError(
                    f"version {manifest.version} should end at byte {end} of {manifest.path}, which has only {size}"
                )
            # A private mapping: torch wants writable memory, and nobody here can change what the writer published.
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self.check()

    def check(self) -> None:
        """Raise `WeightSyncError` unless the slot still holds the complete version of the manifest."""
        start = self.manifest.offset - PAGE_BYTES
        header = _unpack_header(self._map[start : start + _HEADER.size + _CHECKSUM.size])
        if header is not None and header[:2] == (self.manifest.version, READY):
            return
        kept = self._kept(header)
        raise WeightSyncError(
            f"weight version {self.manifest.version} is not in the relay any more; it keeps {kept}: "
            "ask for a newer manifest"
        )

    def _kept(self, header: tuple[int, int, int, int, int] | None) -> str:
        if header is None:
            return "unknown versions (a slot is being rewritten)"
        _, _, _, stride, slots = header
        found = []
        for slot in range(slots):
            other = _unpack_header(self._map[slot * stride : slot * stride + _HEADER.size + _CHECKSUM.size])
            if other is not None and other[1] == READY:
                found.append(other[0])
        return ", ".join(map(str, sorted(found))) or "no complete version"

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for meta in self.manifest.params:
            count = meta.nbytes // getattr(torch, meta.dtype).itemsize
            if count == 0:
                yield meta.name, torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
                continue
            flat = torch.frombuffer(
                self._map, dtype=getattr(torch, meta.dtype), count=count, offset=self.manifest.offset + meta.offset
            )
            yield meta.name, flat.view(meta.shape)

    def verify(self) -> str:
        """Fingerprint of the mapped bytes; raises `WeightSyncError` if it is not the manifest's."""
        fingerprint = _Fingerprint()
        with memoryview(self._map) as view:
            for meta in self.manifest.params:
                start = self.manifest.offset + meta.offset
                fingerprint.add(meta.name, view[start : start + meta.nbytes])
        self.check()
        if fingerprint.hex() != self.manifest.fingerprint:
            raise WeightSyncError(
                f"weight version {self.manifest.version}: published fingerprint {self.manifest.fingerprint}, "
                f"found {fingerprint.hex()} in {self.manifest.path}"
            )
        return fingerprint.hex()


def manifest_to_json(manifest: WeightManifest) -> str:
    """Plain text form, for crossing processes."""
    return json.dumps(asdict(manifest))


def manifest_from_json(text: str) -> WeightManifest:
    raw = json.loads(text)
    params = tuple(ParamMeta(p["name"], p["dtype"], tuple(p["shape"]), p["offset"], p["nbytes"]) for p in raw["params"])
    return WeightManifest(**{**raw, "params": params})
