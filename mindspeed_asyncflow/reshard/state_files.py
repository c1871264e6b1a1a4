"""Train state on disk: a file for each rank, and any part of any full tensor out of all of them. Numpy only.

A rank writes *pieces*: flat ranges of its local parameters, of several kinds ("weight", "master", moments). Beside
each parameter stands which boxes of which full tensors lie in it (layout.py), so a file needs neither the settings nor
the parallel sizes of its run to be understood: `StateFiles.fill` finds the pieces that meet a box, whoever wrote them.

    a flat range of a [rows, cols] matrix  =  end of a row + whole rows + beginning of a row  =  at most three boxes
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_asyncflow.errors import CheckpointError
from mindspeed_asyncflow.observe.checkpoints import SavedFile
from mindspeed_asyncflow.reshard import tensor_file
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape, subtract
from mindspeed_asyncflow.reshard.layout import LocalParam, Segment

FORMAT = "asyncflow train state 1"
WEIGHT = "weight"


class Piece(NamedTuple):
    """Elements `start` to `start + size` of the flat local parameter `param`."""

    kind: str
    param: LocalParam
    start: int
    size: int
    dtype: str  # of tensor_file.WIDTHS
    parts: Sequence[Any]  # buffers that together are its bytes


def file_name(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"


def write_rank(
    folder: Path,
    rank: int,
    pieces: Sequence[Piece],
    tensors: Mapping[str, Sequence[int]],
    notes: Mapping[str, Any],
    wrote: Callable[[int], None] = lambda count: None,
) -> SavedFile:
    """Write what `rank` holds. `tensors`: shapes of the full tensors; `notes`: JSON, with "world", the count of ranks.

    Raises OSError.
    """
    params = {p.param.name: [p.param.shape, [(s.name, *s.box, s.row, s.col) for s in p.param.segments]] for p in pieces}
    about = {"format": FORMAT, "params": params, "tensors": dict(tensors), "notes": dict(notes)}
    entries = [
        tensor_file.Entry(f"{p.kind}|{p.param.name}|{p.start}", p.dtype, (p.size,), lambda p=p: p.parts)  # type: ignore[misc]
        for p in pieces
    ]
    return tensor_file.write(folder / file_name(rank), entries, {"state": json.dumps(about)}, wrote)


class _Held(NamedTuple):
    """`box` of a full tensor as a view of a file."""

    box: Box
    view: np.ndarray
    dtype: str


class StateFiles:
    """The files of all ranks of one save. Nothing but headers is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises `CheckpointError` unless all ranks' files are there."""
        self.folder = folder
        self.tensors: dict[str, tuple[int, ...]] = {}
        self.notes: list[dict[str, Any]] = []  # of each rank
        self._held: dict[tuple[str, str], list[_Held]] = {}
        world = 1
        while len(self.notes) < world:
            stored, about = self._open(len(self.notes))
            self._add(stored, about)
            self.notes.append(about["notes"])
            world = int(about["notes"]["world"])

    def _open(self, rank: int) -> tuple[dict[str, tensor_file.Stored], dict[str, Any]]:
        path = self.folder / file_name(rank)
        stored, about = tensor_file.read(path)
        state = json.loads(about.get("state", "{}"))
        if state.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no train state of this version (it says {state.get('format')!r})")
        return stored, state

    def _add(self, stored: Mapping[str, tensor_file.Stored], about: Mapping[str, Any]) -> None:
        self.tensors |= {name: tuple(shape) for name, shape in about["tensors"].items()}
        params = {
            name: (tuple(shape), [Segment(s[0], Box(*s[1:5]), s[5], s[6]) for s in segments])
            for name, (shape, segments) in about["params"].items()
        }
        for name, tensor in stored.items():
            kind, param, start = name.split("|")
            shape, segments = params[param]
            flat = tensor.matrix()[:, 0]
            for local, view in _boxes_of_range(flat, int(start), matrix_shape(shape)[1]):
                for segment in segments:
                    common = local.meet(segment.local)
                    if common is None:
                        continue
                    box = common.moved(segment.box.r0 - segment.row, segment.box.c0 - segment.col)
                    held = _Held(box, _inside(view, local, common), tensor.dtype)
                    self._held.setdefault((kind, segment.name), []).append(held)

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self._held}

    def dtype(self, kind: str, name: str) -> str:
        """Of a full tensor. Raises `CheckpointError` for one that is not there."""
        return self._pieces(kind, name)[0].dtype

    def _pieces(self, kind: str, name: str) -> list[_Held]:
        found = self._held.get((kind, name))
        if not found:
            raise CheckpointError(f"{self.folder} holds no {kind} of {name!r}: it is the state of another model")
        return found

    def fill(self, kind: str, name: str, box: Box, out: np.ndarray, dtype: str) -> None:
        """Copy `box` of a full tensor to `out`, [rows, cols] of unsigned integers as wide as an element of `dtype`.

        Raises `CheckpointError` where a part of it is in no file, or it has another type.
        """
        left = [box]
        for held in self._pieces(kind, name):
            rest = []
            for part in left:
                common = part.meet(held.box)
                if common is None:
                    rest.append(part)
                    continue
                if held.dtype != dtype:
                    raise CheckpointError(f"{self.folder} has the {kind} of {name!r} as {held.dtype}, not as {dtype}")
                _inside(out, box, common)[...] = _inside(held.view, held.box, common)
                rest += subtract(part, common)
            left = rest
            if not left:
                return
        raise CheckpointError(f"{self.folder}: rows {left[0].r0} to {left[0].r1} of the {kind} of {name!r} are missing")

    def local(self, kind: str, param: LocalParam, rows: tuple[int, int], dtype: str) -> np.ndarray:
        """Rows [first, last) of a local parameter, as unsigned integers [rows, cols]; padding is 0."""
        cols = matrix_shape(param.shape)[1]
        wanted = Box(*rows, 0, cols)
        out = np.zeros((wanted.rows, cols), tensor_file.UNSIGNED[tensor_file.WIDTHS[dtype]])
        for segment in param.segments:
            common = wanted.meet(segment.local)
            if common is not None:
                box = common.moved(segment.box.r0 - segment.row, segment.box.c0 - segment.col)
                self.fill(kind, segment.name, box, _inside(out, wanted, common), dtype)
        return out


def _inside(view: np.ndarray, box: Box, part: Box) -> np.ndarray:
    """The part of `view`, which shows `box`, that shows `part`."""
    return view[part.r0 - box.r0 : part.r1 - box.r0, part.c0 - box.c0 : part.c1 - box.c0]


def _boxes_of_range(flat: np.ndarray, start: int, cols: int) -> Iterator[tuple[Box, np.ndarray]]:
    """The boxes that the elements from `start` on make in a matrix with `cols` columns, and their part of `flat`."""
    at, stop = start, start + len(flat)
    while at < stop:
        row, col = divmod(at, cols)
        rows = max((stop - at) // cols, 1) if col == 0 else 1
        width = min(cols - col, stop - at)
        size = rows * width
        yield Box(row, row + rows, col, col + width), flat[at - start : at - start + size].reshape(rows, width)
        at += size


def whole_tensor(files: StateFiles, kind: str, name: str, chunk_rows: int) -> Iterable[np.ndarray]:
    """A full tensor, `chunk_rows` rows at a time, in order."""
    rows, cols = matrix_shape(files.tensors[name])
    dtype = files.dtype(kind, name)
    for first in range(0, rows, chunk_rows):
        box = Box(first, min(first + chunk_rows, rows), 0, cols)
        out = np.empty((box.rows, cols), tensor_file.UNSIGNED[tensor_file.WIDTHS[dtype]])
        files.fill(kind, name, box, out, dtype)
        yield out
