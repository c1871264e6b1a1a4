"""A rank's train state: to host memory in one pause, from there to a file beside training, and back into any layout.

    begin   every tensor that no other rank writes is copied to the host         [the pause: nothing but these copies]
      -> thread   the file of this rank (reshard/state_files.py); no collective, no process, nothing of the device
    finish  what was written, as soon as it is on the disk

Kept are weights, float32 master weights, moments, the number of applied steps (of which the learning rate is a
function) and random states. Files name boxes of full tensors, so other sizes of TP, PP, EP and DP can load them. What
an optimizer remembers, and where, is the engine's: `Trained`.
"""

from __future__ import annotations

import base64
import functools
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from mindspeed_asyncflow.errors import CheckpointError, DeadlineExceeded, EngineError
from mindspeed_asyncflow.observe.checkpoints import SavedFile, explained, sums
from mindspeed_asyncflow.platforms.base import Platform
from mindspeed_asyncflow.platforms.memory import HostPool
from mindspeed_asyncflow.reshard.boxes import matrix_shape, whole
from mindspeed_asyncflow.reshard.hf_folder import MODEL, MODEL_FILES
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment
from mindspeed_asyncflow.reshard.state_files import WEIGHT, Piece, StateFiles, file_name, write_rank

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


MASTER = "master"


class Apart(NamedTuple):
    """A float32 copy that is not kept as one: how it is made and taken, flat."""

    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank's optimizer has of one weight: a parameter, or an expert's part of one."""

    name: str  # of the weight
    start: int  # first element of the range, in the flat weight
    main: torch.Tensor  # what the optimizer steps on: the weight, a range of it, or a float32 copy of either
    copied: bool  # it is a copy
    state: MutableMapping[str, Any]  # moments by name; empty before the first step
    sharded: bool  # over data-parallel ranks
    apart: Apart | None = None  # has the copy; `main` has its shape only


class Trained(Protocol):
    """What one rank has of training beside its weights."""

    applied: int  # optimizer steps; the learning rate is a function of it

    def shares(self, weights: Mapping[str, torch.Tensor]) -> Iterable[Share]:
        """One for each parameter of which this rank has state, in the order of `weights` (by name)."""
        ...

    def steps_taken(self) -> int:
        """By which Adam corrects its moments; 0 before the first step."""
        ...

    def set_steps_taken(self, steps: int) -> None:
        """After `shares` have got their moments."""
        ...

    def random_state(self) -> dict[str, Any]:
        """As JSON."""
        ...

    def restore_random(self, saved: Mapping[str, Any]) -> None: ...


class _Held(NamedTuple):
    """Something that a rank writes."""

    kind: str
    name: str  # of the parameter
    start: int  # its first element there
    tensor: torch.Tensor
    read: Callable[[], torch.Tensor] | None = None  # gives its elements; None: they are in it


@dataclass
class _Writing:
    """What goes to the disk for one save."""

    rank: int
    folder: Path
    pieces: Callable[[], Sequence[Piece]]
    model_files: Sequence[Path]
    tensors: Mapping[str, tuple[int, ...]]
    notes: Mapping[str, Any]
    written: int = 0  # bytes so far
    unwanted: bool = False

    def run(self) -> list[SavedFile]:
        with explained(self.folder / file_name(self.rank), "written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = write_rank(self.folder, self.rank, self.pieces(), self.tensors, self.notes, self._wrote)
            if not self.model_files:
                return [file]
            (self.folder / MODEL).mkdir(exist_ok=True)
            for source in self.model_files:
                shutil.copyfile(source, self.folder / MODEL / source.name)
            return [file, *sums(self.folder, MODEL)]

    def _wrote(self, count: int) -> None:
        self.written += count
        if self.unwanted:
            raise CheckpointError(f"the checkpoint in {self.folder} was given up")


class Checkpointer:
    """Not collective: every rank saves and loads by itself, and all must do so between the same two steps."""

    def __init__(
        self,
        platform: Platform,
        layout: Layout,
        rank: int,
        weights: Mapping[str, torch.Tensor],
        trained: Trained,
        *,
        model_folder: str,
        timeout_s: float,
    ) -> None:
        """`weights`: the rank's parameters by their names in `layout`; those that are not in it (the critic's head) are
        whole on every rank that has them. `timeout_s`: a disk that takes no byte for so long is given up."""
        self._platform, self._rank, self._trained, self._timeout_s = platform, rank, trained, timeout_s
        self._model_folder, self._world = Path(model_folder), layout.world_size
        self._weights = dict(weights)
        known = {param.name: param for param in layout.ranks[rank]}
        self._params = {name: known.get(name) or _whole_param(name, tensor) for name, tensor in weights.items()}
        self._tensors = {name: tuple(tensor.shape) for name, tensor in layout.tensors.items()}
        self._mine = _written_here(layout, rank, self._params)
        self._pool = HostPool(platform)
        self._host: dict[tuple[str, str, int], list[torch.Tensor]] = {}  # kept: pinning costs more than copying
        self._writing: tuple[_Writing, Future[list[SavedFile]]] | None = None
        # a thread that is there already: starting one would wait for it inside the pause
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    # -- out -----------------------------------------------------------------------------------------------------------

    def begin(self, folder: str) -> None:
        """Copy the state to host memory, and have it written to `folder` (made if missing) from now on.

        A save that nobody has finished is given up.
        """
        self._give_up()
        self._platform.synchronize()
        state = self._state()
        copies = [copy for held in state if held.read is None for copy in self._copies(held, held.tensor)]
        for host, part in copies:  # nothing else between two copies: it would run with cold caches
            host.copy_(part, non_blocking=True)
        for held in state:
            if held.read is not None:  # one at a time: together they may not fit the device
                for host, part in self._copies(held, held.read()):
                    host.copy_(part, non_blocking=True)
        self._platform.synchronize()  # the copies are done
        notes = {
            "world": self._world,
            "applied_steps": self._trained.applied,
            "adam_steps": self._trained.steps_taken(),
            "random": self._trained.random_state(),
        }
        named = [self._model_folder / name for name in MODEL_FILES] if self._rank == 0 else []
        beside = [path for path in named if path.is_file()]
        pieces = functools.partial(self._pieces, state)
        writing = _Writing(self._rank, Path(folder), pieces, beside, self._tensors, notes)
        self._writing = writing, self._thread.submit(writing.run)

    def finish(self) -> list[SavedFile]:
        """What `begin` had written, names relative to its folder, as soon as it is on the disk. May run beside anything
        but `begin`. Raises `CheckpointError` for what the disk refused."""
        if self._writing is None:
            raise EngineError(f"rank {self._rank} has begun no checkpoint")
        writing, future = self._writing
        self._wait(writing, future)
        return future.result()

    def _give_up(self) -> None:
        if self._writing is not None:
            writing, future = self._writing
            writing.unwanted = True
            self._wait(writing, future)

    def _wait(self, writing: _Writing, future: Future[list[SavedFile]]) -> None:
        seen = -1
        while not wait([future], self._timeout_s).done:
            if seen == writing.written:
                raise DeadlineExceeded(
                    f"rank {self._rank}: the disk of {writing.folder} has taken nothing of the checkpoint for "
                    f"{self._timeout_s:g} s, after {seen} bytes"
                )
            seen = writing.written

    def close(self) -> None:
        """What is being written is written to its end."""
        self._thread.shutdown()

    def _state(self) -> list[_Held]:
        """All that this rank writes."""
        found = [_Held(WEIGHT, name, 0, w.detach()) for name, w in self._weights.items() if name in self._mine]
        for share in self._trained.shares(self._weights):
            if not share.sharded and share.name not in self._mine:
                continue
            if share.copied:
                read = share.apart.read if share.apart else None
                found.append(_Held(MASTER, share.name, share.start, share.main.detach(), read))
            moments = {kind: value for kind, value in share.state.items() if torch.is_tensor(value)}
            found += [_Held(kind, share.name, share.start, value) for kind, value in moments.items()]
        return found

    def _copies(self, held: _Held, contents: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(host buffer, bytes of `contents`, the elements of `held`, that go there)"""
        if held.tensor.dtype not in DTYPES:
            raise EngineError(
                f"{held.kind} of {held.name} is {held.tensor.dtype}; a checkpoint can have {list(DTYPES)}"
            )
        source = contents.contiguous().view(-1).view(torch.uint8)
        if (host := self._host.get(held[:3])) is None:
            host = self._host[held[:3]] = self._pool.take(source.numel())
        return list(zip(host, source.split([piece.numel() for piece in host])))

    def _pieces(self, state: Sequence[_Held]) -> list[Piece]:
        return [
            Piece(h.kind, self._params[h.name], h.start, h.tensor.numel(), DTYPES[h.tensor.dtype], self._buffers(h))
            for h in state
        ]

    def _buffers(self, held: _Held) -> list[Any]:
        return [piece.numpy() for piece in self._host[held[:3]]]

    # -- back ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: str) -> None:
        """Restore what all ranks of any layout wrote to `folder`.

        Raises `CheckpointError`, naming the tensor, where it is the state of another model, type or optimizer.
        """
        files = StateFiles(Path(folder))
        self._check_model(files)
        for name, weight in self._weights.items():
            self._fill(files, WEIGHT, name, 0, weight)
        notes = files.notes[0]
        kinds = sorted(files.kinds() - {WEIGHT, MASTER}) if notes["adam_steps"] else []
        shares = list(self._trained.shares(self._weights))
        for share in shares:  # all before the first is filled: several may be parts of one tensor
            share.state.clear()
        for share in shares:
            if share.apart:
                whole_copy = torch.empty_like(share.main)
                self._fill(files, MASTER, share.name, share.start, whole_copy)
                share.apart.write(whole_copy.view(-1))
            elif share.copied:
                self._fill(files, MASTER, share.name, share.start, share.main)
            for kind in kinds:
                share.state[kind] = torch.empty_like(share.main)
                self._fill(files, kind, share.name, share.start, share.state[kind])
        self._trained.set_steps_taken(int(notes["adam_steps"]))
        self._trained.applied = int(notes["applied_steps"])
        if len(files.notes) == self._world:
            self._trained.restore_random(files.notes[self._rank]["random"])
        self._platform.synchronize()

    def _check_model(self, files: StateFiles) -> None:
        for name in {**self._tensors, **files.tensors}:
            here, there = self._tensors.get(name), files.tensors.get(name)
            if here != there:
                raise CheckpointError(
                    f"{files.folder} is the state of another model: {name} is {there or 'absent'} there and "
                    f"{here or 'absent'} in {self._model_folder}"
                )

    def _fill(self, files: StateFiles, kind: str, name: str, start: int, target: torch.Tensor) -> None:
        """`target`: elements from `start` on of a parameter."""
        count = target.numel()
        if not count:
            return
        param = self._params[name]
        cols = matrix_shape(param.shape)[1]
        first, last = start // cols, -(-(start + count) // cols)
        found = files.local(kind, param, (first, last), DTYPES[target.dtype])
        flat = torch.from_numpy(found.reshape(-1).view("u1"))
        width, begin = target.element_size(), start - first * cols
        target.view(-1).copy_(flat[begin * width : (begin + count) * width].view(target.dtype))


def _whole_param(name: str, tensor: torch.Tensor) -> LocalParam:
    shape = tuple(tensor.shape)
    return LocalParam(name, shape, (Segment(name, whole(shape)),))


def _written_here(layout: Layout, rank: int, params: Mapping[str, LocalParam]) -> set[str]:
    """The parameters that `rank` writes of those that several ranks hold the same of; each is some rank's."""
    ranks_of: dict[int, list[int]] = {}  # replicas share one tuple
    for other, held in enumerate(layout.ranks):
        ranks_of.setdefault(id(held), []).append(other)
    holders: dict[LocalParam, list[int]] = {}
    for same in ranks_of.values():
        for param in layout.ranks[same[0]]:
            holders.setdefault(param, []).extend(same)
    mine = set()
    for name, param in params.items():
        able = sorted(holders.get(param, [rank]))
        if able[zlib.crc32(name.encode()) % len(able)] == rank:
            mine.add(name)
    return mine


def random_text(state: torch.Tensor) -> str:
    """State of a generator for JSON."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def random_state_of(text: str) -> torch.Tensor:
    """The state again, uint8."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
