"""Which part of which weight lives on which rank. Pure: names, shapes and rank coordinates, no tensors.

A `Layout` says for every rank which local parameters it holds and which boxes of which full tensors lie in them. Full
tensors carry Hugging Face names and shapes on every side, so a trainer's fused QKV shard and a rollout replica's K
projection speak about the same rows. `train_layout.py` and `rollout_layout.py` make layouts, `plan.py` moves one into
another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from mindspeed_asyncflow.config.model import FullTensor
from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape, subtract, whole


@dataclass(frozen=True, slots=True)
class Segment:
    """`box` of the full tensor `name` lies in a local parameter, its first element at (row, col) there."""

    name: str
    box: Box
    row: int = 0
    col: int = 0

    @property
    def local(self) -> Box:
        """The place in the local parameter."""
        return Box(self.row, self.row + self.box.rows, self.col, self.col + self.box.cols)


@dataclass(frozen=True, slots=True)
class LocalParam:
    """One parameter as a rank holds it. Local elements that no segment covers are padding (vocabulary)."""

    name: str  # trainer: megatron's name with global layer and expert numbers; rollout: Hugging Face name
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Layout:
    """`ranks[r]` are the local parameters of rank r, in layer order. Ranks may share one tuple (replicas)."""

    tensors: dict[str, FullTensor]  # of the whole model, in layer order
    ranks: tuple[tuple[LocalParam, ...], ...]
    label: str = field(default="", compare=False)  # how a person names it: "TP2 PP2"

    @cached_property
    def world_size(self) -> int:
        return len(self.ranks)

    def rank_bytes(self, rank: int, itemsize: int) -> int:
        """Bytes of the local parameters of `rank`, padding included: sum of rows * cols * itemsize."""
        total = 0
        for param in self.ranks[rank]:
            rows, cols = matrix_shape(param.shape)
            total += rows * cols
        return total * itemsize

    def check_coverage(self) -> None:
        """Raise `WeightSyncError` unless all ranks together hold every element of every tensor (100 % coverage)."""
        missing = {name: [whole(t.shape)] for name, t in self.tensors.items()}
        seen: set[int] = set()
        for params in self.ranks:
            if id(params) in seen:
                continue
            seen.add(id(params))
            for param in params:
                for segment in param.segments:
                    if segment.name not in missing:
                        if segment.name not in self.tensors:
                            raise WeightSyncError(f"layout {self.label}: {segment.name!r} is not a weight of the model")
                        continue
                    left = [part for box in missing[segment.name] for part in subtract(box, segment.box)]
                    if left:
                        missing[segment.name] = left
                    else:
                        del missing[segment.name]
        if missing:
            name, boxes = next(iter(missing.items()))
            raise WeightSyncError(
                f"layout {self.label}: {len(missing)} tensors are not covered; first {name!r}, rows {boxes[0].r0} to "
                f"{boxes[0].r1}, columns {boxes[0].c0} to {boxes[0].c1} lie on no rank"
            )
