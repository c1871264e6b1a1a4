"""What the dock and the driver's book say of the groups that are open in a checkpoint, brought together.

The book is the truth of which groups are open, the dock of what they have: the dock is cut a moment before the book.

    open in      goes on
    both         with what the dock has: tokens of unfinished answers, answers, scores
    the book     put again (its put was under way, or its last samples were being dropped)
    the dock     not at all (trained or dropped meanwhile)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.pair import PairClient
from mindspeed_asyncflow.dock.table import NO_VERSION

MADE_BY = {"rollout": "response_ids", "reward": "reward", "reference": "ref_logprobs", "value": "values"}


@dataclass(frozen=True, slots=True)
class Held:
    """What the dock has of one group."""

    samples: int  # that may still be trained
    sampled: int | None = None  # oldest version of any token; None: there is none
    scores: tuple[tuple[int, float], ...] = ()  # (member, score) of its samples; empty: it is not scored

    @property
    def scored(self) -> bool:
        return bool(self.scores)


def settle(dock: DockClient, partition: str, wanted: Collection[int]) -> dict[int, Held]:
    """Take out of a restored `partition` what is not `wanted`, and say what it has of each other group.

    A task that wrote its columns has done its work, also where the cut came before it said so. A group of which only a
    part is scored is taken out too: scoring is of whole groups. Nobody may hold claims.
    """
    held: dict[int, Held] = {}
    for pair in dock.pairs():
        if partition not in pair.stats()["partitions"]:
            continue
        about = pair.export(partition)
        ids, counts = about.ints("ids"), about.ints("counts")
        rows, ready, oldest = about.ints("rows"), about.ints("ready"), about.ints("version_min", "int32")
        has = {task: (ready & dock.schema.bit[column]) != 0 for task, column in MADE_BY.items()}
        ends = np.cumsum(counts)
        scores = _scores(pair, rows, about.ints("members", "int32"), has["reward"])
        gone = []
        for group, first, last in zip(ids.tolist(), (ends - counts).tolist(), ends.tolist()):
            scored = has["reward"][first:last]
            if group not in wanted or scored.any() != scored.all():
                gone += rows[first:last].tolist()
                continue
            known = oldest[first:last][oldest[first:last] != NO_VERSION]
            found = tuple(scores[row] for row in rows[first:last].tolist() if row in scores)
            held[group] = Held(last - first, int(known.min()) if len(known) else None, found)
        for task in dock.schema.tasks.keys() & MADE_BY.keys():
            if has[task].any():
                dock.finish(task, rows[has[task]])
        if gone:
            dock.free(np.array(gone, np.int64))
    return held


def _scores(pair: PairClient, rows: np.ndarray, members: np.ndarray, has: np.ndarray) -> dict[int, tuple[int, float]]:
    """(member, score) by row, of those of `rows` that are scored."""
    if not has.any():
        return {}
    found = pair.read(rows[has], ["score"])["score"].tolist()
    return dict(zip(rows[has].tolist(), zip(members[has].tolist(), found)))
