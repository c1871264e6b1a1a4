"""The ledger of a run: what became of every prompt and sample, in SQLite, for people and for `asyncflow audit`.

A sink of the same notes as `workflow/events.py`. `note` costs the driver's loop a place in a queue; a thread turns
notes into rows and writes them in batches. Nothing is ever deleted: what a resumed run does again is marked as undone.

    table      a row for
    note       every note: its number, when, its kind, and the number of the resume that undid it
    issued     a prompt group put into the dock; `replaces`: the dropped group that it stands for
    answered   a sample in a round of a replica, which served version `since` when the round began: it was given the
               sample, and answered it, or was interrupted or lost
    scored     a sample; `score` is null where it got none. Also those whose scores a resume found in its checkpoint
    dropped    samples of a group, all that it has left where `samples` is null
    trained    a sample: step (which is the trainer's version), versions of its oldest and newest token, the oldest
               version whose tokens were not masked (null: none were masked), reward
    finished   an optimizer step and the version that it made
    standing   a group that was open when the run was resumed or ended, as the driver's book says
    fact       what the run is, as JSON: `data` (order of prompts), `cost_s` (seconds of a
               processor that the ledger took since the driver was started)
"""

from __future__ import annotations

import contextlib
import json
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_asyncflow.errors import LedgerError
from mindspeed_asyncflow.observe.log import get_logger


def _plain(scalar: Any) -> Any:
    return scalar.item()


for _kind in (np.int32, np.int64, np.float32):  # SQLite would store their bytes
    sqlite3.register_adapter(_kind, _plain)

FORMAT = 1
BATCH_S = 0.5
BUSY_S = 30.0  # an audit that reads holds a batch up for so long at most; then it is tried again
SETTLE_S = 120.0
TABLES = {
    "note": "seq INTEGER PRIMARY KEY, at REAL, kind TEXT, undone INTEGER",
    "issued": "seq INTEGER, grp INTEGER, batch INTEGER, epoch INTEGER, prompt INTEGER, replaces INTEGER",
    "answered": "seq INTEGER, grp INTEGER, member INTEGER, replica INTEGER, since INTEGER",
    "scored": "seq INTEGER, grp INTEGER, member INTEGER, score REAL",
    "dropped": "seq INTEGER, grp INTEGER, samples INTEGER, reason TEXT",
    "trained": "seq INTEGER, grp INTEGER, member INTEGER, step INTEGER, oldest INTEGER, newest INTEGER, "
    "bound INTEGER, reward REAL",
    "finished": "seq INTEGER, version INTEGER, applied INTEGER",
    "standing": "seq INTEGER, grp INTEGER",
    "fact": "key TEXT PRIMARY KEY, value TEXT",
}
Rows = Iterable[Sequence[Any]]


class Ledger:
    """Opens `path`, or goes on with one that is there. One per driver; raises `LedgerError` where that is no ledger."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = path, clock
        self._queue: queue.SimpleQueue[tuple[int, float, str, Mapping[str, Any]] | threading.Event] = (
            queue.SimpleQueue()
        )
        self._hurry, self._closing = threading.Event(), False
        self._failed: Exception | None = None
        self._noted_s = self._written_s = 0.0  # seconds of a processor that the driver's loop and the thread spent
        try:
            db = connect(path)
            with db:
                for name, columns in TABLES.items():
                    db.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
                db.execute("INSERT OR IGNORE INTO fact VALUES ('format', ?)", (json.dumps(FORMAT),))
            check_format(db, path)
            self.position: int = db.execute("SELECT COALESCE(MAX(seq), 0) FROM note").fetchone()[0]
            db.close()
        except sqlite3.Error as error:
            raise LedgerError(f"cannot write the ledger {path}: {error}; set run.folder to another folder") from error
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def note(self, kind: str, **fields: Any) -> None:
        """Fields as `EventLog.note` gets them, which nobody changes afterwards; other kinds are only counted."""
        began = time.perf_counter()
        self.position += 1
        self._queue.put((self.position, self._clock(), kind, fields))
        self._noted_s += time.perf_counter() - began

    def settle(self) -> None:
        """Wait until everything noted so far is on disk. Raises `LedgerError` where it cannot be written."""
        written = threading.Event()
        self._queue.put(written)
        self._hurry.set()
        if not written.wait(SETTLE_S):
            raise LedgerError(f"the ledger {self.path} was not written within {SETTLE_S:g} s: is its disk very slow?")
        if self._failed is not None:
            raise LedgerError(f"cannot write the ledger {self.path}: {self._failed}") from self._failed

    def close(self) -> None:
        """Write the rest; a warning where that is not possible."""
        if self._closing:
            return
        self._closing = True
        self._hurry.set()
        self._queue.put(threading.Event())
        self._thread.join(SETTLE_S)
        if self._thread.is_alive() or self._failed is not None:
            get_logger("observe").warning("the end of the ledger %s is not written: %s", self.path, self._failed)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        db = connect(self.path)
        notes: list[tuple[int, float, str, Mapping[str, Any]]] = []
        last = False
        while not last:
            waiting: list[threading.Event] = []
            item = self._queue.get()
            self._hurry.wait(BATCH_S)
            self._hurry.clear()
            last = self._closing
            while True:
                (waiting if isinstance(item, threading.Event) else notes).append(item)  # type: ignore[arg-type]
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            if self._commit(db, notes):
                notes = []
            for written in waiting:
                written.set()
        db.close()

    def _commit(self, db: sqlite3.Connection, notes: Sequence[tuple[int, float, str, Mapping[str, Any]]]) -> bool:
        """One transaction; what fails is kept, and tried again with the next batch."""
        began = time.thread_time()
        try:
            with db:
                for seq, at, kind, fields in notes:
                    db.execute("INSERT INTO note VALUES (?, ?, ?, NULL)", (seq, at, kind))
                    _FORMS.get(kind, _nothing)(db, seq, fields)
                self._written_s += time.thread_time() - began
                cost_s = json.dumps(self._noted_s + self._written_s)
                db.execute("INSERT OR REPLACE INTO fact VALUES ('cost_s', ?)", (cost_s,))
        except Exception as error:  # boundary of the thread: whoever settles or closes is told
            if self._failed is None:
                get_logger("observe").warning(
                    "the ledger %s cannot be written, and is tried again: %s", self.path, error
                )
            self._failed = error
            return False
        self._failed = None
        return True


def inherit(source: Path, target: Path) -> None:
    """A run that goes on from a checkpoint of another run in a folder of its own begins with the ledger of that; where
    it has none, a warning. The other run may be on. Raises `LedgerError`."""
    if not source.is_file():
        words = "there is no ledger %s: an audit of the run that goes on cannot know what was before its checkpoint"
        get_logger("observe").warning(words, source)
        return
    partial = target.with_name(f".{target.name}.partial")  # a driver that is killed leaves none, or the whole
    partial.unlink(missing_ok=True)
    try:
        with contextlib.closing(connect(source)) as theirs, contextlib.closing(sqlite3.connect(partial)) as mine:
            check_format(theirs, source)
            theirs.backup(mine)
        partial.replace(target)
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(f"cannot copy the ledger {source} to {target}: {error}") from error


def connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S)
    db.execute("PRAGMA journal_mode = DELETE")  # a write-ahead log would need shared memory, which NFS has not
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def check_format(db: sqlite3.Connection, path: Path) -> None:
    found = db.execute("SELECT value FROM fact WHERE key = 'format'").fetchone()
    if found is None or json.loads(found[0]) != FORMAT:
        raise LedgerError(f"{path} has format {found and found[0]}, this program reads format {FORMAT}")


def _fill(db: sqlite3.Connection, table: str, rows: Rows) -> None:
    places = ", ".join("?" * (TABLES[table].count(",") + 1))
    db.executemany(f"INSERT INTO {table} VALUES ({places})", rows)


def _nothing(db: sqlite3.Connection, seq: int, fields: Mapping[str, Any]) -> None: ...


def _issued(db: sqlite3.Connection, seq: int, f: Mapping[str, Any]) -> None:
    groups, replaces = f["groups"], f.get("replaces") or [None] * len(f["groups"])
    _fill(db, "issued", [(seq, g, f["batch"], *prompt, old) for g, prompt, old in zip(groups, f["prompts"], replaces)])


def _answering(db: sqlite3.Connection, seq: int, f: Mapping[str, Any]) -> None:
    _fill(db, "answered", [(seq, *row, f["replica"], f["since"]) for row in f["rows"]])


def _scored(db: sqlite3.Connection, seq: int, f: Mapping[str, Any]) -> None:
    _fill(db, "scored", [(seq, *row, score) for row, score in zip(f["rows"], f["scores"])])  # SQLite makes NaN null


def _dropped(db: sqlite3.Connection, seq: int, f: Mapping[str, Any]) -> None:
    groups = f["groups"] if "groups" in f else [f["group"]]
    _fill(db, "dropped", [(seq, group, f.get("samples"), f["reason"]) for group in groups])


def _trained(db: sqlite3.Connection, seq: int, f: Mapping[str, Any]) -> None:
    groups, versions, rewards, bound = f["groups"], f["versions"], f["rewards"], f["rules"].oldest_allowed
    handles = (row for replica in f["plan"] for batch in replica for row in batch)
    _fill(db, "trained", [(seq, *groups[h], f["step"], *versions[h], bound, rewards[h]) for h in handles])


def _finished(db: sqlite3.Connection, seq: int, f: Mapping[str, Any]) -> None:
    _fill(db, "finished", [(seq, f["version"], bool(f["optim"].applied))])


def _standing(db: sqlite3.Connection, seq: int, f: Mapping[str, Any]) -> None:
    _fill(db, "standing", [(seq, group) for group in f["open"]])


def _restored(db: sqlite3.Connection, seq: int, f: Mapping[str, Any]) -> None:
    _standing(db, seq, f)
    _fill(db, "scored", [(seq, *row, score) for row, score in zip(f["rows"], f["scores"])])


def _resumed(db: sqlite3.Connection, seq: int, f: Mapping[str, Any]) -> None:
    """What was noted after the checkpoint is undone; what an earlier resume undid after it was taken is not."""
    position = f["ledger"]
    db.execute("UPDATE note SET undone = NULL WHERE seq <= ? AND undone > ?", (position, position))
    db.execute("UPDATE note SET undone = ? WHERE seq > ? AND seq < ? AND undone IS NULL", (seq, position, seq))


def _data(db: sqlite3.Connection, seq: int, f: Mapping[str, Any]) -> None:
    db.execute("INSERT OR REPLACE INTO fact VALUES ('data', ?)", (json.dumps(dict(f)),))


_FORMS: dict[str, Callable[[sqlite3.Connection, int, Mapping[str, Any]], None]] = {
    "issued": _issued,
    "answering": _answering,
    "scored": _scored,
    "dropped": _dropped,
    "trained": _trained,
    "finished": _finished,
    "ended": _standing,
    "restored": _restored,
    "resumed": _resumed,
    "data": _data,
}
