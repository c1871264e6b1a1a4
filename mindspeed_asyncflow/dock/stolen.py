"""Claims that another pair serves: what it is asked, and what becomes of its grant for a team."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.leases import LeaseBook
from mindspeed_asyncflow.dock.link import Reply
from mindspeed_asyncflow.dock.node import DockNode
from mindspeed_asyncflow.dock.partition import Grant
from mindspeed_asyncflow.dock.teams import divide, part_of
from mindspeed_asyncflow.dock.wire import Message, Verb
from mindspeed_asyncflow.errors import AsyncFlowError

Call = Callable[[Verb, dict[str, Any], Callable[[Reply], None]], Any]
Team = tuple[str, str, str]  # partition, task, team
_LOCAL = ("key", "connection", "caller", "hold_end", "columns", "copy", "team", "rank", "ranks", "split")


def team_of(message: Message) -> Team | None:
    """The team of a claim."""
    return (message["partition"], message["task"], message["team"]) if message.get("team") else None


class Lent:
    """Claims that this pair has granted for consumers of other pairs, by the connection that took the answer away.

    Until such a claim is used nobody knows whether its consumer has heard of it: the pair in between may be dead.
    """

    def __init__(self, leases: LeaseBook) -> None:
        self._leases = leases
        self._deadlines: dict[object, dict[int, float]] = {}  # by connection and claim, at the grant

    def note(self, connection: object, claims: Iterable[int]) -> None:
        kept = {n: deadline for n, deadline in self._deadlines.get(connection, {}).items() if self._unused(n, deadline)}
        new = {n: self._leases.open[n].deadline for n in claims if n in self._leases.open}
        self._deadlines[connection] = kept | new

    def take_unused(self, connection: object) -> list[int]:
        """Those of a connection that is gone."""
        return [n for n, deadline in self._deadlines.pop(connection, {}).items() if self._unused(n, deadline)]

    def _unused(self, claim: int, deadline: float) -> bool:
        found = self._leases.open.get(claim)
        return found is not None and found.deadline == deadline  # every use renews it


def for_peers(message: Message) -> dict[str, Any]:
    """The claim that other pairs are asked for on behalf of `message`: of a team, its whole next round."""
    asked = {name: value for name, value in message.items() if name not in _LOCAL}
    team, shares = message.text("team"), 1
    if team:
        asked["worker"] = f"team {team}"
        shares = message.whole("ranks") if message.text("split") != "same" else 1
    return asked | {
        "count": message.whole("count") * shares, "at_least": message.whole("at_least") * shares, "forwarded": True,
        "claim_id": 0, "columns": [], "copy": False, "team": "", "rank": 0, "ranks": 1, "split": "same",
    }  # fmt: skip


def _nobody_waits(reply: Reply) -> None:
    """The answer changes nothing."""


def as_shares(
    node: DockNode, message: Message, reply: Message | dict[str, Any], call: Call | None, lost: Callable[[], None],
    now: float,
) -> None:  # fmt: skip
    """A round of a team came from another pair: every rank gets its share of it.

    `call` reaches the pair that granted it; None: the stream has ended everywhere. `lost()`: it went away with the
    round, or nobody wants it any more.
    """
    matrix = reply["grant"]
    whole = Grant(
        reply["claim_id"], matrix[0], matrix[1], matrix[2].astype(np.int32), matrix[3].astype(np.int32),
        matrix[4].astype(np.int32), matrix[5], [], reply["sealed"], reply["ready"],
    )  # fmt: skip
    key = (message.text("partition"), message.text("task"), message.text("team"))
    ranks, split = message.whole("ranks"), message.text("split")
    teams = node.controller.teams
    if key not in teams:  # its partition was closed
        if call is not None and len(whole.rows):
            call(Verb.RELEASE, {"claim_id": whole.claim_id, "rows": whole.rows}, _nobody_waits)
        lost()
        return
    if split == "same" or not len(whole.rows) or call is None:
        node.controller.offer_round(key, [whole] * ranks, now)
        node.settle(now)
        return
    units = whole.rows if message.text("unit") == "rows" else whole.group_ids
    index = divide(whole.tokens, units, ranks, split)

    def divided(answer: Reply) -> None:
        if isinstance(answer, AsyncFlowError):
            lost()
            return
        ids = answer.ints("claim_ids").tolist()
        if key not in teams:
            lost()
            return
        node.controller.offer_round(key, [part_of(whole, i, c) for i, c in zip(index, ids)], now)
        node.settle(now)

    call(Verb.DIVIDE, {
        "claim_id": whole.claim_id, "rows": np.concatenate([whole.rows[i] for i in index]),
        "counts": np.array([len(i) for i in index], np.int64),
        "workers": [f"team {key[2]} rank {rank}" for rank in range(ranks)], "spread": 0,
    }, divided)  # fmt: skip
