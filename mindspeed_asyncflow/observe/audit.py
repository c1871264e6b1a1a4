"""What the ledger of a run proves: every prompt issued in its order, every sample trained once, dropped or open.

    law      what must hold
    order    prompts were issued in the order of the data stream, each as often as that has it; a group that stands
             for another has its prompt, and the other was dropped; no group was issued twice
    lost     a group that is neither trained nor dropped is in the driver's book wherever that was noted (after a
             resume, at the end), and no finished step has left behind what was issued for it
    twice    no sample is trained twice, no group in two steps, none more often trained and dropped than it has samples
    lag      step - version of the oldest token <= workflow.max_lag, older tokens masked (`workflow.stale: mask`)
    made     a sample that was trained was given to a replica, has tokens, and was scored (a replica or scorer that dies
             does not take that out of the ledger: it is noted before the next loop may have the sample)
    steps    versions rise by one from 1 on, and nothing is trained in a step that had ended or not begun

What a resume has undone is left out: it was done again, or is open.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.errors import LedgerError
from mindspeed_asyncflow.observe.ledger import check_format, connect

LAWS = ("order", "lost", "twice", "lag", "made", "steps")
MOST_NAMED = 20  # per law, in words
_MADE = (("answered", ""), ("scored", "AND score IS NOT NULL"))


@dataclass(frozen=True, slots=True)
class Rules:
    """What the settings of the run promise."""

    group_size: int
    max_lag: int
    leaves_none: bool  # every finished step has trained or dropped all that was issued for it or before


@dataclass(slots=True)
class Audit:
    """What was counted, and what is wrong by law: (group or sample or prompt, in words)."""

    groups: int = 0
    samples: int = 0
    steps: int = 0
    trained: int = 0  # samples
    dropped: Counter[str] = field(default_factory=Counter)  # samples by reason
    open: int = 0  # groups
    in_step: int = 0  # samples trained in a step that has not ended
    resumes: int = 0
    undone: int = 0  # trained samples that a resume undid
    worst_lag: int = 0
    wrong: dict[str, list[str]] = field(default_factory=lambda: {law: [] for law in LAWS})
    prompts: dict[int, tuple[int, int]] = field(default_factory=dict)  # (epoch, index) of each group

    @property
    def holds(self) -> bool:
        return not any(self.wrong.values())

    def facts(self) -> dict[str, Any]:
        """All numbers, as JSON has them."""
        names = ("groups", "samples", "steps", "trained", "open", "in_step", "resumes", "undone", "worst_lag")
        counted = {name: getattr(self, name) for name in names}
        return counted | {"dropped": dict(self.dropped), "wrong": {law: len(ids) for law, ids in self.wrong.items()}}


class Book:
    """A ledger as it stood when note `until` had been written; None: as it stands."""

    def __init__(self, db: sqlite3.Connection, group_size: int, until: int | None = None) -> None:
        self.db, self.group_size = db, group_size
        self.live = "undone IS NULL" if until is None else f"seq <= {until} AND (undone IS NULL OR undone > {until})"

    def rows(self, columns: str, table: str, rest: str = "") -> list[tuple[Any, ...]]:
        return self.db.execute(
            f"SELECT {columns} FROM {table} JOIN note USING (seq) WHERE {self.live} {rest}"
        ).fetchall()

    def open_groups(self) -> set[int]:
        issued = {g for (g,) in self.rows("grp", "issued")}
        trained = {g for (g,) in self.rows("DISTINCT grp", "trained")}
        return issued - trained - self.dropped_whole()

    def dropped_whole(self) -> set[int]:
        """Groups of which nothing is left: dropped with all that they had, or sample by sample."""
        size = dict(self.rows("grp, SUM(samples)", "dropped", "GROUP BY grp"))
        whole = {g for (g,) in self.rows("DISTINCT grp", "dropped", "AND samples IS NULL")}
        return whole | {g for g, samples in size.items() if samples is not None and samples >= self.group_size}


def open_ledger(path: Path) -> sqlite3.Connection:
    """Raises `LedgerError` where `path` is no ledger that can be read."""
    if not path.is_file():
        raise LedgerError(f"there is no ledger {path}: the run has not started its workers, or is of an older program")
    try:
        db = connect(path)
        check_format(db, path)
    except sqlite3.DatabaseError as error:
        raise LedgerError(f"{path} is damaged or no ledger: {error}") from error
    return db


def fact(db: sqlite3.Connection, key: str) -> Any:
    found = db.execute("SELECT value FROM fact WHERE key = ?", (key,)).fetchone()
    if found is None:
        raise LedgerError(f"the ledger does not say what {key!r} is: the run ended before its data was ready")
    return json.loads(found[0])


def audit(db: sqlite3.Connection, rules: Rules, prompts: Iterator[tuple[int, int]]) -> Audit:
    """`prompts`: (epoch, index) in the order in which the data stream gives them out, without end or to its end."""
    db.execute("BEGIN")  # one view of all tables, whatever a run that goes on writes meanwhile
    try:
        return _audit(db, rules, prompts)
    finally:
        db.rollback()


def _audit(db: sqlite3.Connection, rules: Rules, prompts: Iterator[tuple[int, int]]) -> Audit:
    found, book = Audit(), Book(db, rules.group_size)
    dropped = book.dropped_whole()
    _order(found, book, dropped, prompts)
    _fates(found, book, rules)
    _steps(found, book)
    _lags(found, book, rules)
    _made(found, book)
    _lost(found, book, rules)
    found.resumes = db.execute("SELECT COUNT(*) FROM note WHERE kind = 'resumed'").fetchone()[0]
    undone = "SELECT COUNT(*) FROM trained JOIN note USING (seq) WHERE undone IS NOT NULL"
    found.undone = db.execute(undone).fetchone()[0]
    return found


def _order(found: Audit, book: Book, dropped: set[int], prompts: Iterator[tuple[int, int]]) -> None:
    wrong, replaced = found.wrong["order"], set()
    of_group = found.prompts
    fresh: list[tuple[int, tuple[int, int]]] = []
    for group, epoch, prompt, old in book.rows("grp, epoch, prompt, replaces", "issued", "ORDER BY seq, issued.rowid"):
        if group in of_group:
            wrong.append(f"group {group} was issued twice")
        elif old is None:
            fresh.append((group, (epoch, prompt)))
        elif of_group.get(old) != (epoch, prompt):
            wrong.append(f"group {group} (prompt {epoch}:{prompt}) replaces group {old}, which has another prompt")
        elif old not in dropped or old in replaced:
            why = "is replaced twice" if old in replaced else "was not dropped"
            wrong.append(f"group {old} (prompt {epoch}:{prompt}) {why}, and group {group} replaces it")
        replaced.add(old)
        of_group[group] = (epoch, prompt)
    found.groups = len(of_group)
    due = [next(prompts, None) for _ in fresh]
    first = next((i for i, ((_, prompt), meant) in enumerate(zip(fresh, due)) if prompt != meant), None)
    if first is None:
        return
    group, (epoch, prompt) = fresh[first]
    meant = "nothing" if due[first] is None else "prompt {}:{}".format(*due[first])  # type: ignore[misc]
    wrong.append(f"group {group} is prompt {epoch}:{prompt}, the data stream gives {meant} there")
    there, expected = Counter(p for _, p in fresh), Counter(p for p in due if p is not None)
    wrong += [
        f"prompt {e}:{i} was issued {n} times more than the stream has it" for (e, i), n in (there - expected).items()
    ]
    missing = [f"prompt {e}:{i} was not issued" for (e, i) in (expected - there)]
    found.wrong["lost"] += missing


def _fates(found: Audit, book: Book, rules: Rules) -> None:
    size, twice, lost = rules.group_size, found.wrong["twice"], found.wrong["lost"]
    known = {g for (g,) in book.rows("grp", "issued")}
    found.samples = size * len(known)
    dropped: Counter[int] = Counter()
    rest: dict[int, str] = {}
    for group, samples, reason in book.rows("grp, samples, reason", "dropped", "ORDER BY seq"):
        if samples is None:
            if group in rest:
                twice.append(f"group {group} was dropped twice: {rest[group]}, {reason}")
            rest[group] = reason
        else:
            dropped[group] += samples
            found.dropped[reason] += samples
    for group, reason in rest.items():
        found.dropped[reason] += size - dropped[group]
    each = "grp, COUNT(*), COUNT(DISTINCT member), MIN(step), MAX(step)"
    trained = {g: others for g, *others in book.rows(each, "trained", "GROUP BY grp")}
    for group, (count, members, first, last) in trained.items():
        found.trained += count
        if first != last:
            twice.append(f"group {group} was trained in the steps {first} and {last}")
        elif count > members:
            twice.append(f"group {group}: {count - members} samples were trained twice in step {first}")
        elif count + dropped[group] > size or group in rest:
            twice.append(
                f"group {group}: {count} samples trained, and {size if group in rest else dropped[group]} dropped"
            )
        elif count + dropped[group] < size:
            lost.append(
                f"group {group}: {size - count - dropped[group]} of {size} samples are neither trained nor dropped"
            )
    strangers = (trained.keys() | dropped.keys() | rest.keys()) - known
    found.wrong["order"] += [f"group {group} was never issued" for group in sorted(strangers)]


def _steps(found: Audit, book: Book) -> None:
    wrong, made_at = found.wrong["steps"], {0: 0}
    for seq, version in book.rows("seq, version", "finished", "ORDER BY seq"):
        if version != found.steps + 1:
            wrong.append(f"version {version} was made after version {found.steps}")
        found.steps = version
        made_at[version] = seq
    for step, count, first, last in book.rows("step, COUNT(*), MIN(seq), MAX(seq)", "trained", "GROUP BY step"):
        if first < made_at.get(step, first + 1):
            wrong.append(f"step {step} trained before version {step} was made (note {first})")
        if last > made_at.get(step + 1, last):
            wrong.append(f"step {step} trained after it had ended (note {last})")
        found.in_step += count if step + 1 not in made_at else 0


def _lags(found: Audit, book: Book, rules: Rules) -> None:
    found.worst_lag = book.rows("COALESCE(MAX(step - MAX(oldest, COALESCE(bound, oldest))), 0)", "trained")[0][0]
    beyond = f"AND step - MAX(oldest, COALESCE(bound, oldest)) > {rules.max_lag}"
    for group, member, step, oldest in book.rows("grp, member, step, oldest", "trained", beyond):
        found.wrong["lag"].append(
            f"sample {group}/{member}: lag {step - oldest} in step {step}, workflow.max_lag is {rules.max_lag}"
        )
    for group, member, oldest, newest, step in book.rows(
        "grp, member, oldest, newest, step", "trained", "AND (newest > step OR oldest > newest)"
    ):
        found.wrong["lag"].append(f"sample {group}/{member}: versions {oldest} to {newest} trained in step {step}")


def _made(found: Audit, book: Book) -> None:
    answered, scored = (set(book.rows("DISTINCT grp, member", table, rest)) for table, rest in _MADE)
    for group, member, step, oldest in book.rows("grp, member, step, oldest", "trained"):
        lacks = "was given to no replica" if (group, member) not in answered else ""
        lacks = lacks or ("has no tokens" if oldest < 0 else "")
        lacks = lacks or ("has no score" if (group, member) not in scored else "")
        if lacks:
            found.wrong["made"].append(f"sample {group}/{member} {lacks}, and was trained in step {step}")


def _lost(found: Audit, book: Book, rules: Rules) -> None:
    lost, now_open = found.wrong["lost"], book.open_groups()
    found.open = len(now_open)
    standing = "SELECT seq, kind FROM note WHERE kind IN ('restored', 'ended') AND undone IS NULL"
    for seq, kind in book.db.execute(standing).fetchall():
        noted = {g for (g,) in book.db.execute("SELECT grp FROM standing WHERE seq = ?", (seq,))}
        due = Book(book.db, rules.group_size, seq).open_groups()
        where = "after the resume" if kind == "restored" else "at the end"
        lost += [f"group {g} is open {where} (note {seq}), and the run does not know it" for g in sorted(due - noted)]
        found.wrong["twice"] += [
            f"group {g} is closed {where} (note {seq}), and the run still has it" for g in sorted(noted - due)
        ]
    if rules.leaves_none:
        for group, batch in book.rows("grp, batch", "issued", f"AND batch < {found.steps}"):
            if group in now_open:
                lost.append(f"group {group} was issued for step {batch}, which has ended without it")
