"""Checkpoints of a running session, and how a session goes on from one.

    save      copy       ranks copy their state to host memory: the only time that training waits for
              cut        the dock on disk, frozen for that long; then, at once, the state of the driver
              write      beside training: ranks write their files, sums, manifest, one rename
    restore   dock       the cut, in any number of pairs, settled with the driver's book (workflow/checkpoint.py)
              ranks      load their parts, in any parallel sizes
              driver     counters, data position, recorder; files of the run are cut back to where they were

A checkpoint that cannot be written, or not in time, is a warning: the run goes on, and the one before stays the newest.
Only the last one of a run is an error.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mindspeed_asyncflow.config.load import dump_resolved
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.errors import AsyncFlowError, CheckpointError, DeadlineExceeded
from mindspeed_asyncflow.observe import checkpoints
from mindspeed_asyncflow.observe.checkpoints import SavedFile
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.reshard.hf_folder import export_hf
from mindspeed_asyncflow.service.starting import PARTITION, Starting
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.checkpoint import Held, settle
from mindspeed_asyncflow.workflow.events import digest_of
from mindspeed_asyncflow.workflow.run import Run
from mindspeed_asyncflow.workflow.state_keeping import bring

STATE, CONFIG, DOCK, HF = "state.json", "config.yaml", "dock", "hf"
PAIR_BACK_S = 5.0  # a pair that died is mostly there again by then; the end of a run may have to wait for so long
T = TypeVar("T")


@dataclass(slots=True)
class Resumed:
    """What a session goes on with."""

    version: int = 0
    state: dict[str, Any] | None = None  # of `Run.state`; None: from the beginning
    held: dict[int, Held] = field(default_factory=dict)


class Saving(Starting):
    """Base of `Session`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.run: Run | None = None
        self.resumed = Resumed()
        self._clean = copy.deepcopy({"stream": self.stream.state(), "recorder": self.recorder.state()})
        self._writing: asyncio.Task[None] | None = None
        self.complete: tuple[int, Path] | None = None  # newest checkpoint of this process: step and folder
        self.unsaved = ""  # why the newest one is none
        self._threads: set[asyncio.Future[Any]] = set()  # that write, also for somebody who waits no more

    # ---- save --------------------------------------------------------------------------------------------------------

    async def save(self, step: int, last: bool = False) -> None:
        """A checkpoint of the state between two steps, of which `step` are made. Returns when training may go on; of
        the `last` one, when it is complete. The one before is completed first."""
        await self.written()
        try:
            await self._threads_ended()
            partial = await self._in_thread(checkpoints.begin, self.folder.checkpoints, step)
            async with self.turns.training():
                self._progressed()
                copies = self._all_ranks("begin_save", str(partial))
                shared = await self._in_time(copies, "the trainer and critic ranks to copy their state to host memory")
            self._progressed()
            await self._in_time(self._cut_whole_dock(partial / DOCK), "the dock to be written")
        except AsyncFlowError as error:  # that of a rank which is lost too: whoever watches it knows what to do
            self._not_written(step, last, error)
            return
        self._progressed()
        text = self._cut(step)  # at once: the dock goes on already
        self._writing = asyncio.ensure_future(self._write(partial, step, text, shared, last))
        if last:
            await self.written()

    async def written(self) -> None:
        """Wait until no checkpoint is being written. Raises what the last one of the run failed with."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def abandon(self) -> None:
        """A checkpoint that is being written, perhaps by ranks that are gone, is given up; the next one removes it. One
        that is being completed becomes complete: nothing in the folder changes any more afterwards."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.cancel()
            await asyncio.wait([writing])
        await self._threads_ended()

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """A thread cannot be cancelled: it goes on without whoever waits for it, and `_threads_ended` waits then."""
        running = asyncio.ensure_future(asyncio.to_thread(work, *args))
        self._threads.add(running)
        running.add_done_callback(self._threads.discard)
        return await asyncio.shield(running)

    async def _threads_ended(self) -> None:
        if self._threads:
            await self._in_time(asyncio.wait(self._threads), "an earlier checkpoint, which was given up, to end")

    def _progressed(self) -> None:
        """A checkpoint has a deadline of its own, which may be later than the watchdog's."""
        assert self.run is not None
        self.run.job.progressed()

    def _ranks(self) -> Sequence[Any]:
        return [*self.trainers, *self.critics]

    async def _all_ranks(self, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(getattr(rank, method)(*args) for rank in self._ranks()))

    async def _in_time(self, work: Awaitable[T], whom: str) -> T:
        limit_s = self.config.checkpoint.timeout_s
        try:
            return await asyncio.wait_for(work, limit_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"waited {limit_s:g} s (checkpoint.timeout_s) for {whom}") from None

    def _own_client(self) -> DockClient:
        """A frozen dock serves nobody else, also not the driver's other calls."""
        spec, wait_s = self.spec, self.config.dock.wait_s
        return DockClient(spec.dock_addresses, spec.dock_secret, wait_s, restart_s=PAIR_BACK_S)

    async def _cut_whole_dock(self, folder: Path) -> None:
        """A pair that is started again in the middle does not know that it was frozen: the cut begins anew, once."""
        try:
            await self._in_thread(self._cut_dock, folder)
        except AsyncFlowError as error:
            get_logger("checkpoints").warning("the dock is cut once more for a checkpoint: %s", error)
            await self._in_thread(self._cut_dock, folder)

    def _cut_dock(self, folder: Path) -> None:
        client = self._own_client()
        try:
            client.snapshot(folder, self.config.checkpoint.timeout_s, only=(PARTITION,))  # others are their tenants'
        finally:
            client.close()

    def _cut(self, step: int) -> str:
        assert self.run is not None
        self.events.note("cut", version=step)
        self.events.flush()
        probe = [[p.tolist(), a.tolist()] for p, a in self.sync.probe]
        parts = {"run": self.run.state(), "stream": self.stream.state(), "probe": probe}
        files = {"marks": self.folder.marks(), "ledger": self.events.position()}
        return json.dumps({"version": step} | parts | files, default=_plain)

    async def _write(self, partial: Path, step: int, text: str, shared: Sequence[bool], last: bool) -> None:
        """`shared`: which ranks see `partial`; files of the others are fetched."""
        try:
            writing = self._all_ranks("finish_save")
            of_ranks = await self._in_time(writing, "the trainer and critic ranks to write their parts of a checkpoint")
            for rank, sees, named in zip(self._ranks(), shared, of_ranks, strict=True):
                if not sees:
                    await self._in_time(bring(partial, rank, named), f"{rank.name} to send its part of a checkpoint")
            files = [file for named in of_ranks for file in named]
            whole = last or self.config.checkpoint.hf
            target = await self._in_thread(self._complete, partial, step, text, files, whole)
        except AsyncFlowError as error:
            self._not_written(step, last, error)
            return
        self.folder.point_hf(target / HF)
        self.complete = step, target
        self.events.note("saved", version=step)
        get_logger("checkpoints").info("checkpoint of step %d: %s", step, target)

    def _complete(self, partial: Path, step: int, text: str, files: list[SavedFile], hf: bool) -> Path:
        config = dump_resolved(self.config)
        with checkpoints.explained(partial, "written"):
            (partial / STATE).write_text(text, encoding="utf-8")
            (partial / CONFIG).write_text(config, encoding="utf-8")
        if hf:
            export_hf(partial / "trainer", partial / HF)
        for part in (STATE, CONFIG, DOCK, *([HF] if hf else [])):
            files += checkpoints.sums(partial, part)
        self.events.settle()
        target = checkpoints.complete(partial, files, step=step, version=step, config=digest_of(config))
        checkpoints.retain(self.folder.checkpoints, self.config.checkpoint.keep)
        return target

    async def saved(self, step: int) -> Path:
        """The checkpoint of `step`, of which `save` has returned, when it is complete. Raises `CheckpointError`."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self.complete is None or self.complete[0] < step:
            raise CheckpointError(f"no checkpoint of step {step}: {self.unsaved or 'it was given up'}")
        return self.complete[1]

    def _not_written(self, step: int, last: bool, error: Exception) -> None:
        self.unsaved = str(error)
        if last:
            raise error
        get_logger("checkpoints").warning("no checkpoint of step %d, the run goes on without it: %s", step, error)

    # ---- go on -------------------------------------------------------------------------------------------------------

    async def restore(self, checkpoint: Path | None, undo: bool = False) -> None:
        """All is as in `checkpoint` (None: as before the first step), and `prepare` and `train` go on from there.

        Later checkpoints of the run are removed if `undo`, else set aside: they were passed over. Workers and dock are
        there; no loop runs. Callable again while the session lives. Raises `CheckpointError`.
        """
        await self.abandon()
        found = read_state(checkpoint) if checkpoint is not None else None
        state = found["run"] if found else None
        self.resumed = Resumed(found["version"] if found else 0, state)
        wanted = [group[0] for group in state["book"]["groups"]] if state else []
        cut = None if checkpoint is None else checkpoint / DOCK
        refill = asyncio.to_thread(self._refill_dock, cut, wanted)
        self.resumed.held = await self._in_time(refill, "the dock to be filled")
        if checkpoint is not None:
            await self._in_time(self._all_ranks("load_checkpoint", str(checkpoint)), "the ranks to load a checkpoint")
            await asyncio.to_thread(self._tidy, checkpoint, undo)
        self.stream.restore(found["stream"] if found else self._clean["stream"])
        self.recorder.restore(state["recorder"] if state else self._clean["recorder"])
        if found:
            self._probe = probe_of(found)
        self.events.flush()  # what is undone leaves the file with the rest
        own = checkpoint is not None and checkpoint.parent == self.folder.checkpoints
        with self.recorder.metrics.closed():  # those of another run are not in this folder
            self.folder.cut_back(found["marks"] if found and own else {}, self.resumed.version)
        config = dump_resolved(self.config)
        if config != self.folder.config.read_text(encoding="utf-8"):  # in place: the lock of the folder is on this file
            self.folder.config.write_text(config, encoding="utf-8")
        which = {"version": self.resumed.version, "checkpoint": checkpoint.name if checkpoint else ""}
        self.events.note("resumed", config=config, ledger=found["ledger"] if found else 0, **which)
        if found is None:
            self.note_begun()

    def _tidy(self, checkpoint: Path, undo: bool) -> None:
        """The newest checkpoint of the folder is `checkpoint`, or that of another run."""
        root = self.folder.checkpoints
        checkpoints.discard_after(root, self.resumed.version, keep=not undo)
        checkpoints.retain(root, self.config.checkpoint.keep)
        self.folder.point_hf(root / checkpoint.name / HF)

    def note_begun(self) -> None:
        """The record of a run begins."""
        self.events.note("begun", config=self.folder.config.read_text(encoding="utf-8"))
        self.events.note("data", group_size=self.config.algorithm.group_size, **self.stream.facts())

    def issue_of(self, epoch: int, index: int) -> Issue:
        if self.outside is not None and self.outside.prompts is not None:
            return self.outside.prompts.issues[index]
        p = self.prompts.train[index]
        return Issue(epoch, index, p.ids, p.truth, p.fields)

    def _refill_dock(self, cut: Path | None, wanted: Sequence[int]) -> dict[int, Held]:
        client = self._own_client()
        try:
            if PARTITION in client.stats()["partitions"]:
                client.close_partition(PARTITION)
            if cut is None:
                return {}
            client.restore(cut, self.config.checkpoint.timeout_s)
            return settle(client, PARTITION, set(wanted))
        finally:
            client.close()


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The driver's part of a checkpoint. Raises `CheckpointError`."""
    try:
        return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / STATE} cannot be read: {error}") from error


def probe_of(found: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The probe answers in what `read_state` gave."""
    return [(np.array(p, np.int32), np.array(a, np.int32)) for p, a in found["probe"]]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a checkpoint holds a {type(value).__name__}, which JSON does not have")
