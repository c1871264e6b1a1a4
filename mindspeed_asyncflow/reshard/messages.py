"""What ranks send each other in one step of a plan: boxes, packed into flat messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mindspeed_asyncflow.reshard.boxes import Box
from mindspeed_asyncflow.reshard.places import BoxView
from mindspeed_asyncflow.reshard.plan import Move


class Packed(NamedTuple):
    """A box in a message, row after row."""

    box: Box
    dtype: torch.dtype  # in which it travels: that of the target
    pieces: list[BoxView]  # views of local tensors: it is gathered from them, or written to them

    @property
    def nbytes(self) -> int:
        return self.box.size * self.dtype.itemsize


@dataclass(slots=True)
class Message:
    """All boxes that travel between this rank and one peer in one step, those of the largest elements first."""

    peer: int
    incoming: bool
    boxes: list[Packed]
    data: torch.Tensor | None = None  # uint8 [nbytes]: staging, or the tensors themselves
    direct: bool = False  # `data` is the tensors themselves

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for packed in self.boxes)

    @property
    def buffer(self) -> torch.Tensor:
        assert self.data is not None, f"a message was started before it had a place: {self}"
        return self.data

    def __str__(self) -> str:
        return f"{self.nbytes} bytes {'from' if self.incoming else 'to'} rank {self.peer}"

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(part of the message, view of a local tensor) of every piece."""
        start = 0
        for packed in self.boxes:
            box = packed.box
            matrix = self.buffer[start : start + packed.nbytes].view(packed.dtype).view(box.rows, box.cols)
            start += packed.nbytes
            for piece in packed.pieces:
                part = piece.box.moved(-box.r0, -box.c0)
                yield matrix[part.r0 : part.r1, part.c0 : part.c1], piece.view


@dataclass(slots=True)
class Copy:
    """A box that stays on this rank: pieces that together are the box, and all places that want it."""

    box: Box
    sources: list[BoxView]
    targets: list[BoxView]


@dataclass(slots=True)
class ResolvedStep:
    messages: list[Message] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)


def by_peer(moves: Iterable[Move]) -> list[tuple[int, list[Move]]]:
    """Moves of each peer in the given order, peers in ascending order."""
    found: dict[int, list[Move]] = {}
    for move in moves:
        found.setdefault(move.peer, []).append(move)
    return sorted(found.items())


def pack(messages: Sequence[Message]) -> None:
    """Local tensors -> outgoing messages, with the cast to their type."""
    for message in messages:
        if not message.incoming and not message.direct:
            for part, view in message.parts():
                part.copy_(view)


def unpack(messages: Sequence[Message]) -> None:
    """Incoming messages -> local tensors."""
    for message in messages:
        if message.incoming and not message.direct:
            for part, view in message.parts():
                view.copy_(part)


def copy(copies: Sequence[Copy]) -> None:
    for one in copies:
        for source in one.sources:
            for target in one.targets:
                common = source.box.meet(target.box)
                if common is not None:
                    target.inside(common).copy_(source.inside(common))
