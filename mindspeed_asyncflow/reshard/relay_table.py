"""The static description of what a relay holds: every tensor, its boxes, who writes them, where they lie. Pure.

Bytes of one version: sum over tensors of rows * cols * itemsize, each rounded up to 64. The boxes of a tensor follow
each other without gaps, each stored row after row, sorted by (first row, first column). A tensor that is cut along
rows, or not at all, is therefore one contiguous matrix; one that is cut along columns is a row of smaller matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b

import msgspec
import numpy as np

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.records import ParamMeta, ShardMeta
from mindspeed_asyncflow.reshard.boxes import Box, whole

ALIGN_BYTES = 64
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_Rows = list[tuple[str, str, list[int], list[tuple[int, int, int, int, int]]]]  # name, dtype, shape, (box, writer)


class RelayTable:
    """Tensors in reading order. Shards are numbered through, tensor after tensor: `shards[i]`, `param_of[i]`."""

    def __init__(
        self, rows: Iterable[tuple[str, str, Sequence[int], Sequence[tuple[int, int, int, int, int]]]]
    ) -> None:
        """Rows of (name, dtype, shape, boxes with their writer). Raises `WeightSyncError` unless the boxes of every
        tensor cover each element exactly once."""
        params: list[ParamMeta] = []
        offset = 0
        for name, dtype, shape, boxes in rows:
            item = _item_bytes(name, dtype)
            shards = []
            offset = -(-offset // ALIGN_BYTES) * ALIGN_BYTES
            for r0, r1, c0, c1, writer in sorted(map(tuple, boxes)):
                nbytes = (r1 - r0) * (c1 - c0) * item
                shards.append(ShardMeta((r0, r1, c0, c1), offset, nbytes, writer))
                offset += nbytes
            params.append(ParamMeta(name, dtype, tuple(shape), tuple(shards)))
            _check_tiling(params[-1])
        self.params = tuple(params)
        self.slot_bytes = -(-offset // ALIGN_BYTES) * ALIGN_BYTES
        self.index = {param.name: i for i, param in enumerate(params)}
        if len(self.index) < len(params):
            twice = next(p.name for i, p in enumerate(params) if self.index[p.name] != i)
            raise WeightSyncError(f"tensor {twice!r} is in the relay's table twice")
        if not params:
            raise WeightSyncError("the relay's table has no tensors")

    @cached_property
    def shards(self) -> tuple[ShardMeta, ...]:
        return tuple(shard for param in self.params for shard in param.shards)

    @cached_property
    def first_shard(self) -> np.ndarray:
        """int64 [params + 1]: shards [first[i], first[i + 1]) belong to tensor i."""
        return np.cumsum([0] + [len(param.shards) for param in self.params])

    @cached_property
    def number(self) -> dict[tuple[str, Box], int]:
        """Number of the shard with this name and box."""
        pairs = ((param.name, Box(*shard.box)) for param in self.params for shard in param.shards)
        return {pair: i for i, pair in enumerate(pairs)}

    @cached_property
    def param_of(self) -> tuple[ParamMeta, ...]:
        """The tensor of every shard."""
        return tuple(param for param in self.params for _ in param.shards)

    def shards_of(self, names: Iterable[str]) -> np.ndarray:
        """int64 numbers of all shards of these tensors, ascending. Raises `WeightSyncError` for unknown names."""
        names = sorted(set(names))
        unknown = [name for name in names if name not in self.index]
        if unknown:
            raise WeightSyncError(f"the relay holds no tensors {unknown[:3]}")
        first = self.first_shard
        picked = [np.arange(first[i], first[i + 1]) for i in sorted(self.index[name] for name in names)]
        return np.concatenate([np.zeros(0, np.int64), *picked])

    @cached_property
    def text(self) -> bytes:
        """MessagePack form; offsets follow from it and are not part of it."""
        rows = [(p.name, p.dtype, p.shape, [(*s.box, s.writer) for s in p.shards]) for p in self.params]
        return msgspec.msgpack.encode(rows)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name this table."""
        return blake2b(self.text, digest_size=16).digest()

    def describe(self, shard: int) -> str:
        box = self.shards[shard].box
        return f"{self.param_of[shard].name!r} rows {box[0]} to {box[1]}, columns {box[2]} to {box[3]}"


@lru_cache(maxsize=4)
def table_from_text(text: bytes) -> RelayTable:
    """The table again; processes that open one relay many times parse it once. Raises `WeightSyncError`."""
    try:
        return RelayTable(msgspec.msgpack.decode(text, type=_Rows))
    except msgspec.MsgspecError as error:
        raise WeightSyncError(f"the table of a relay is not what it should be: {error}") from error


def make_table(
    shapes: Mapping[str, Sequence[int]],
    dtype: str | Mapping[str, str],
    writers: Mapping[int, Iterable[tuple[str, Box]]] | None = None,
) -> RelayTable:
    """`shapes` in reading order; `dtype` (torch name) for all tensors or by name; `writers`: what each rank writes.

    None: rank 0 writes everything. Raises `WeightSyncError` unless the ranks together write every element once.
    """
    boxes: dict[str, list[tuple[int, int, int, int, int]]] = {name: [] for name in shapes}
    if writers is None:
        writers = {0: [(name, whole(shape)) for name, shape in shapes.items()]}
    for rank, parts in writers.items():
        for name, box in parts:
            if name not in boxes:
                raise WeightSyncError(f"rank {rank} writes {name!r}, which is not a weight of the model")
            boxes[name].append((*box, rank))
    kind = dtype if isinstance(dtype, Mapping) else dict.fromkeys(shapes, dtype)
    return RelayTable((name, kind[name], tuple(shape), boxes[name]) for name, shape in shapes.items())


def _item_bytes(name: str, dtype: str) -> int:
    if not name:
        raise WeightSyncError("a tensor of the relay's table has no name")
    if dtype not in ITEM_BYTES:
        raise WeightSyncError(f"tensor {name!r} is {dtype}; the relay carries floating-point weights only")
    return ITEM_BYTES[dtype]


def _check_tiling(param: ParamMeta) -> None:
    """Boxes inside the tensor, disjoint, and as many elements as it has: then each element lies in exactly one."""
    full = whole(param.shape)
    boxes = [Box(*shard.box) for shard in param.shards]
    outside = [b for b in boxes if b.r0 < 0 or b.c0 < 0 or b.r1 > full.r1 or b.c1 > full.c1 or b.size < 0]
    if outside:
        raise WeightSyncError(
            f"tensor {param.name!r} of shape {param.shape} has a shard {tuple(outside[0])} outside it"
        )
    open_boxes: list[Box] = []  # of the sweep over rows: those that may still meet the next one
    for box in boxes:
        open_boxes = [other for other in open_boxes if other.r1 > box.r0]
        other = next((o for o in open_boxes if o.meet(box)), None)
        if other is not None:
            raise WeightSyncError(f"tensor {param.name!r}: shards {tuple(other)} and {tuple(box)} overlap")
        open_boxes.append(box)
    if sum(box.size for box in boxes) != full.size:
        raise WeightSyncError(f"tensor {param.name!r} of shape {param.shape} is not covered by its shards")
