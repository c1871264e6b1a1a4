"""Lossless difference of two byte strings of one length: the blocks that changed, and where they lie.

    header (32 bytes) | places | changed blocks, one after the other

Places are either a bitmap of all blocks or uint16 steps from one changed block to the next (0: 65535 blocks without a
change), whichever is shorter. Checksums of the anchor and of the result are part of the message: a delta that meets
other bytes than it was made from is refused, and what it makes is what the sender had.

Bytes for n bytes in blocks of b, of which a share s changed: 32 + min(n / (8 b), 2 s n / b) + s n.
"""

from __future__ import annotations

import struct

import numpy as np

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.fingerprint import checksum

# Training in bfloat16 changes single weights, not runs of them. Measured with a share p of 16 million weights changed
# at random (p from 0.01 % to 3 %): blocks of 1, 2, 4 and 8 bytes cost 1.6 p, 2 p, 3 p and 5 p of the full bytes; single
# bytes take twice the time of pairs to compare.
BLOCK_BYTES = 2
BLOCKS = (1, 2, 4, 8)  # sizes that can be compared as whole numbers
# block, kind of places, bytes of places, bytes, changed blocks, crc before, crc after
_HEADER = struct.Struct("<BBxxIQQII")
_BITMAP, _STEPS = 0, 1
_LONGEST = 65535


def encode(anchor: np.ndarray, target: np.ndarray, block: int = BLOCK_BYTES) -> bytes | None:
    """What turns `anchor` into `target` (uint8 [n] both); None when that is not shorter than `target` itself."""
    if block not in BLOCKS:
        raise WeightSyncError(f"a delta's block has {' or '.join(map(str, BLOCKS))} bytes, got {block}")
    nbytes = len(target)
    before, after = _blocks(anchor, block), _blocks(target, block)
    changed = before != after
    count = int(np.count_nonzero(changed))
    if _HEADER.size + count * block >= nbytes:
        return None
    bitmap_bytes = -(-len(changed) // 8)
    kind, places = _BITMAP, b""
    if 2 * count < bitmap_bytes:
        kind, places = _STEPS, _steps(np.flatnonzero(changed)).tobytes()
    if kind == _BITMAP or len(places) > bitmap_bytes:
        kind, places = _BITMAP, np.packbits(changed).tobytes()
    if _HEADER.size + len(places) + count * block >= nbytes:
        return None
    head = _HEADER.pack(block, kind, len(places), nbytes, count, checksum(anchor.data), checksum(target.data))
    return b"".join((head, places, after[changed].tobytes()))


def apply(delta: bytes | bytearray | memoryview, anchor: np.ndarray, out: np.ndarray) -> None:
    """Write the bytes that `delta` makes of `anchor` (uint8 [n]) to `out` (uint8 [n]).

    Raises `WeightSyncError` when the anchor is another one or the message is damaged; `out` is then worth nothing.
    """
    if len(delta) < _HEADER.size:
        raise WeightSyncError(f"a delta of {len(delta)} bytes is shorter than its header")
    block, kind, places_bytes, nbytes, count, crc_before, crc_after = _HEADER.unpack_from(delta)
    if block not in BLOCKS or nbytes != len(anchor) or len(delta) != _HEADER.size + places_bytes + count * block:
        raise WeightSyncError(f"a delta for {nbytes} bytes does not fit {len(anchor)}, or is incomplete")
    if checksum(anchor.data) != crc_before:
        raise WeightSyncError("a delta was made from another anchor than the one here")
    places = np.frombuffer(delta, np.uint8, places_bytes, _HEADER.size)
    data = np.frombuffer(delta, np.uint8, count * block, _HEADER.size + places_bytes)
    where = _places(kind, places, -(-nbytes // block))
    if len(where) != count or (count and where[-1] * block >= nbytes):
        raise WeightSyncError("the places of a delta do not fit its blocks")
    result = _blocks(anchor, block).copy()
    result[where] = data.view(result.dtype)
    out[:] = result.view(np.uint8)[:nbytes]
    if checksum(out.data) != crc_after:
        raise WeightSyncError("a delta made other bytes than its sender had")


def _blocks(data: np.ndarray, block: int) -> np.ndarray:
    """[ceil(n / block)]; a last block that is not full ends with zeros. A view where the length allows it."""
    if len(data) % block:
        data = np.concatenate([data, np.zeros(-len(data) % block, np.uint8)])
    return data.view(f"<u{block}")


def _steps(where: np.ndarray) -> np.ndarray:
    """uint16 [>= k]: distances between ascending places, the first one from -1; each 0 adds 65535."""
    distance = np.diff(where, prepend=-1)
    skips = (distance - 1) // _LONGEST
    steps = np.zeros(len(where) + int(skips.sum()), "<u2")
    steps[np.arange(len(where)) + np.cumsum(skips)] = distance - skips * _LONGEST
    return steps


def _places(kind: int, places: np.ndarray, blocks: int) -> np.ndarray:
    if kind == _BITMAP:
        return np.flatnonzero(np.unpackbits(places)[:blocks])
    if kind != _STEPS or len(places) % 2:
        raise WeightSyncError("a delta says where its blocks lie in no known way")
    steps = places.view("<u2").astype(np.int64)
    return np.cumsum(np.where(steps == 0, _LONGEST, steps))[steps != 0] - 1
