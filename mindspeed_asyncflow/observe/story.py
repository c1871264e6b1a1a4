"""What the ledger of a run tells of one prompt, from its issue to the steps that trained its samples."""

from __future__ import annotations

import sqlite3
import time

QUERIES = (  # what is said of a note, made of the columns that the query gives after the number of the note
    (
        "SELECT seq, grp, batch, replaces FROM issued WHERE grp = ?",
        lambda grp, batch, old: (
            f"group {grp} issued for step {batch}" + ("" if old is None else f" in place of group {old}")
        ),
    ),
    (
        "SELECT seq, GROUP_CONCAT(member, ' '), replica, since FROM answered WHERE grp = ? GROUP BY seq",
        lambda members, replica, since: (
            f"rollout{replica}, serving version {since}, answers samples {members}"
            if replica >= 0
            else f"answers samples {members} came with it, sampled by version {since} or newer ones"
        ),
    ),
    (
        "SELECT seq, GROUP_CONCAT(IIF(score IS NULL, 'none', printf('%g', score)), ' ') FROM scored WHERE grp = ? "
        "GROUP BY seq",
        lambda scores: f"scores {scores}",
    ),
    (
        "SELECT seq, samples, reason FROM dropped WHERE grp = ?",
        lambda samples, reason: f"{'all that was left' if samples is None else f'{samples} samples'} dropped: {reason}",
    ),
    (
        "SELECT seq, member, step, oldest, newest, reward FROM trained WHERE grp = ?",
        lambda member, step, oldest, newest, reward: (
            f"sample {member} trained in step {step} at version {step}, tokens of "
            + (f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}")
            + f" (lag {step - oldest}), reward {reward:g}"
        ),
    ),
)


def story(db: sqlite3.Connection, epoch: int, index: int) -> list[str]:
    """One line per thing that happened to the prompt, in order; empty where it was never issued."""
    groups = db.execute("SELECT DISTINCT grp FROM issued WHERE epoch = ? AND prompt = ?", (epoch, index)).fetchall()
    told = [
        (seq, words(*columns))
        for (group,) in groups
        for query, words in QUERIES
        for seq, *columns in db.execute(query, (group,)).fetchall()
    ]
    lines = []
    for seq, words in sorted(told, key=lambda each: each[0]):
        at, undone = db.execute("SELECT at, undone FROM note WHERE seq = ?", (seq,)).fetchone()
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
        lines.append(f"{when}  {words}" + ("" if undone is None else "  [undone by a resume]"))
    return lines
