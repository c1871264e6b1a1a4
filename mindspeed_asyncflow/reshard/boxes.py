"""Boxes: rectangular parts of tensors. Pure numbers, no device.

Every weight is seen as a matrix [rows, cols]; a vector of length n is [n, 1]. All parallel layouts that we know cut
weights along rows or columns only, so a part is a box of four numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """Rows [r0, r1) and columns [c0, c1) of a matrix."""

    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def rows(self) -> int:
        return self.r1 - self.r0

    @property
    def cols(self) -> int:
        return self.c1 - self.c0

    @property
    def size(self) -> int:
        """Elements."""
        return (self.r1 - self.r0) * (self.c1 - self.c0)

    def meet(self, other: Box) -> Box | None:
        """The common part; None where there is none."""
        r0, r1 = max(self.r0, other.r0), min(self.r1, other.r1)
        c0, c1 = max(self.c0, other.c0), min(self.c1, other.c1)
        return Box(r0, r1, c0, c1) if r0 < r1 and c0 < c1 else None

    def moved(self, rows: int, cols: int) -> Box:
        return Box(self.r0 + rows, self.r1 + rows, self.c0 + cols, self.c1 + cols)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, cols) of a tensor of `shape`: all dimensions but the first are columns."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def whole(shape: Sequence[int]) -> Box:
    rows, cols = matrix_shape(shape)
    return Box(0, rows, 0, cols)


def subtract(box: Box, other: Box) -> list[Box]:
    """The parts of `box` outside `other`, at most four, disjoint."""
    common = box.meet(other)
    if common is None:
        return [box]
    parts = [
        Box(box.r0, common.r0, box.c0, box.c1),
        Box(common.r1, box.r1, box.c0, box.c1),
        Box(common.r0, common.r1, box.c0, common.c0),
        Box(common.r0, common.r1, common.c1, box.c1),
    ]
    return [p for p in parts if p.r0 < p.r1 and p.c0 < p.c1]
