"""Prompts that a client gives, in the place of the data set: in order, on disk before anybody is told that they are
taken, and counted, so that checkpoints, `--resume`, the ledger and `asyncflow audit` work as with a data set.

    put ─► prompts.jsonl ─► queue ─► a batch as soon as there are enough, or no more will come ─► feed loop

Prompt i of the run is (epoch 0, index i).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_asyncflow.errors import DataError, ServiceError
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.given import answers_of, as_plain

LAST = {"last": True}  # the line that says that no more will come


class ClientPrompts:
    """As `PromptStream`: an iterator over batches that has a position. Lives in the driver's event loop.

    `batch`: prompts of one batch; `wait`: waits for a change of the event it is given, while the client is there.
    """

    def __init__(self, path: Path, batch: int, wait: Callable[[asyncio.Event, str], Awaitable[None]]) -> None:
        self.path, self.batch, self._wait = path, batch, wait
        self.issues: list[Issue] = []
        self.position = 0  # prompts given out
        self.last = False  # no more will come
        self.closed = False  # nothing is given out any more, whatever is there
        self.changed = asyncio.Event()  # set, and replaced, at every change
        self._bytes = 0  # of the file, up to the end of the last call that was taken
        if path.is_file():
            self._read()

    def _read(self) -> None:
        """What an earlier driver took; a line that it has not written to its end is nobody's."""
        whole = self.path.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines()):
            try:
                record = json.loads(line)
                if record == LAST:
                    self.last = True
                else:
                    self.issues.append(_issue(len(self.issues), record))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{self.path} is damaged in line {number + 1}: {error}") from error
        with open(self.path, "r+b") as file:
            file.truncate(len(whole))
        self._bytes = len(whole)

    @property
    def queued(self) -> int:
        return len(self.issues) - self.position

    @property
    def exhausted(self) -> bool:
        return self.closed or (self.last and not self.queued)

    def add(self, issues: Sequence[Issue], last: bool) -> int:
        """All of these, numbered by their place; returns the index of the first one. They are on disk then.

        Raises `ServiceError` where they cannot be written: none is taken.
        """
        first = len(self.issues)
        lines = [_record(issue) for issue in issues] + ([LAST] if last else [])
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        try:
            self._append(text)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self._bytes)
            raise ServiceError(
                507, "full", f"the prompts cannot be written ({error}): send them again when the run folder has room"
            ) from error  # fmt: skip
        self._bytes += len(text)
        self.issues += [replace(issue, prompt_index=first + i) for i, issue in enumerate(issues)]
        self.last |= last
        self._tell()
        return first

    def _append(self, text: bytes) -> None:
        with open(self.path, "ab") as file:
            file.truncate(self._bytes)  # behind it is what a call has left that failed
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """No further batch is given out."""
        self.closed = True
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def ready(self, count: int) -> None:
        """Wait until `count` prompts are there, or what there is will not grow."""
        while not (self.queued >= count or self.last or self.closed):
            await self._wait(self.changed, f"{count} prompts for the next batch ({self.queued} are there)")

    async def room(self, count: int, most: int) -> None:
        """Wait until `count` further prompts may be queued, of `most`."""
        while self.queued + count > most and not self.closed:
            await self.changed.wait()

    def __iter__(self) -> ClientPrompts:
        return self

    def __next__(self) -> list[tuple[int, int, Issue]]:
        if self.closed or not self.queued:
            raise StopIteration
        chosen = self.issues[self.position : self.position + self.batch]
        self.position += len(chosen)
        self._tell()
        return [(issue.epoch, issue.prompt_index, issue) for issue in chosen]

    def facts(self) -> dict[str, Any]:
        """As those of a `PromptStream`: the prompts come in the order of their numbers."""
        return {"client": True, "batch": self.batch}

    def state(self) -> dict[str, Any]:
        """`exhausted` is for who goes on from here: a run that was stopped has prompts left."""
        return {"client": True, "position": self.position, "exhausted": self.last and not self.queued}

    def restore(self, state: dict[str, Any]) -> None:
        if not state.get("client"):
            raise DataError("the checkpoint is of a run with a data set; set service.prompts to data")
        if state["position"] > len(self.issues):
            raise DataError(
                f"{self.path} has {len(self.issues)} prompts, and the checkpoint has given out {state['position']}"
            )
        self.position = int(state["position"])
        self._tell()


def _record(issue: Issue) -> dict[str, Any]:
    record = {"ids": issue.prompt_ids.tolist(), "truth": issue.truth, "fields": issue.fields}
    return record if issue.given is None else record | {"given": as_plain(issue.given)}


def _issue(index: int, record: dict[str, Any]) -> Issue:
    given = answers_of(record["given"]) if "given" in record else None
    return Issue(0, index, np.array(record["ids"], np.int32), record["truth"], record["fields"], given)
