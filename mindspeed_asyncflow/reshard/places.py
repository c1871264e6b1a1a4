"""Where boxes of full tensors lie in the tensors of one rank, as views. No copies, no collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape, subtract
from mindspeed_asyncflow.reshard.layout import LocalParam


class BoxView(NamedTuple):
    """`box` of a full tensor, and the view [rows, cols] of a local tensor in which it lies."""

    box: Box
    view: torch.Tensor

    def inside(self, box: Box) -> torch.Tensor:
        """The part of the view that shows `box`, which lies within."""
        row, col = box.r0 - self.box.r0, box.c0 - self.box.c0
        return self.view[row : row + box.rows, col : col + box.cols]


class _Held(NamedTuple):
    box: Box  # of the full tensor
    matrix: torch.Tensor  # the whole local parameter
    row: int  # of the box's first element there
    col: int

    def piece(self, box: Box) -> BoxView:
        row, col = self.row + box.r0 - self.box.r0, self.col + box.c0 - self.box.c0
        return BoxView(box, self.matrix[row : row + box.rows, col : col + box.cols])


def as_matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A view [rows, cols] of `tensor`, dimensions after the first are columns. Raises `WeightSyncError` if only a copy
    would do."""
    if tensor.dim() == 2:
        return tensor.detach()
    try:
        return tensor.detach().view(matrix_shape(tensor.shape))
    except RuntimeError as error:
        raise WeightSyncError(
            f"tensor {name!r} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is no matrix in memory; "
            "hand over a contiguous one"
        ) from error


class Places:
    """The boxes that one rank holds. `what` names the side in errors ("rank 3, source")."""

    def __init__(self, params: Sequence[LocalParam], tensors: Mapping[str, torch.Tensor], what: str) -> None:
        self._what = what
        self._held: dict[str, list[_Held]] = {}
        missing = [p.name for p in params if p.name not in tensors]
        if missing:
            raise WeightSyncError(f"{what}: {len(missing)} parameters of the layout are missing, first {missing[0]!r}")
        for param in params:
            tensor = tensors[param.name]
            if tuple(tensor.shape) != tuple(param.shape):
                raise WeightSyncError(
                    f"{what}: {param.name!r} has shape {tuple(tensor.shape)}, its layout says {tuple(param.shape)}"
                )
            matrix = as_matrix(param.name, tensor)
            for segment in param.segments:
                self._held.setdefault(segment.name, []).append(_Held(segment.box, matrix, segment.row, segment.col))

    def read(self, name: str, box: Box) -> list[BoxView] | None:
        """Disjoint views that together are `box`; None unless this rank holds all of it."""
        left, pieces = [box], []
        for held in self._held.get(name, ()):
            rest = []
            for part in left:
                common = part.meet(held.box)
                if common is None:
                    rest.append(part)
                else:
                    pieces.append(held.piece(common))
                    rest += subtract(part, common)
            left = rest
            if not left:
                return pieces
        return None

    def write(self, name: str, box: Box) -> list[BoxView]:
        """All views that show a part of `box` (a tied weight may lie in two parameters). Raises `WeightSyncError` when
        a part of it has no place."""
        if self.read(name, box) is None:
            raise WeightSyncError(f"{self._what}: no parameter has a place for all of {name!r}, {box}")
        held = self._held[name]
        return [h.piece(common) for h in held if (common := box.meet(h.box)) is not None]


def one_run(pieces: Sequence[BoxView], dtype: torch.dtype) -> torch.Tensor | None:
    """The pieces as one view, uint8 [bytes], if they follow each other in memory in row-major order and have `dtype`;
    else None."""
    first = pieces[0].view
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for piece in pieces:
        view = piece.view
        if view.dtype != dtype or not view.is_contiguous():
            return None
        if view.untyped_storage().data_ptr() != storage or view.storage_offset() != end:
            return None
        end += view.numel()
    return first.as_strided((end - first.storage_offset(),), (1,)).view(torch.uint8)
