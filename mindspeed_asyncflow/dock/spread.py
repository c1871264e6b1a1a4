"""Claims over all pairs of a dock: who is asked, and claims that gather rows of several."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mindspeed_asyncflow.dock import arguments
from mindspeed_asyncflow.dock.fleet import Fleet
from mindspeed_asyncflow.dock.gather import join_claims, unit_count
from mindspeed_asyncflow.dock.homes import named_home
from mindspeed_asyncflow.dock.leases import PAIR_SHIFT, SPREAD_CLAIM
from mindspeed_asyncflow.dock.pair import Claim, PairClient
from mindspeed_asyncflow.errors import (
    AsyncFlowError,
    ClaimLost,
    ClaimUnknown,
    DeadlineExceeded,
    Unanswered,
    WorkerLost,
)


class SpreadClaims(Fleet):
    """See `DockClient`."""

    def _some(self, ask: dict[str, Any], timeout_s: float) -> Claim:
        """Rows of the first pair that has any; without time to wait each is asked in turn."""
        if timeout_s > 0:
            return self._at_home(partial(_claim, ask | {"timeout_s": timeout_s}))
        alive = self._alive()
        late: AsyncFlowError | None = None
        sealed: Claim | None = None
        for number in sorted(alive, key=lambda n: (n - self._home) % len(self.addresses)):
            try:
                claim = _claim(ask | {"timeout_s": 0.0}, self._pair(number))
            except (DeadlineExceeded, WorkerLost) as error:
                late = late or error
                continue
            if not claim.sealed:
                return claim
            sealed = sealed or claim
        if late is not None or sealed is None:
            raise late or WorkerLost("no pair of this dock is left")
        return sealed

    def _for_team(self, ask: dict[str, Any], partition: str, team: str) -> Claim:
        """All ranks ask the pair that the name of their team gives; another one when that is lost for good."""
        home = named_home(partition, f"team {team}", self._alive())
        try:
            return _claim(ask, self._pair(home))
        except WorkerLost:
            if not self._was_forgotten(home):
                raise
        return _claim(ask, self._pair(named_home(partition, f"team {team}", self._alive())))

    def _at_home(self, claim: Callable[[PairClient], Claim]) -> Claim:
        """Asks the home pair, or the next one when it is lost: a claim that got no answer holds nothing for long."""
        lost: WorkerLost | None = None
        alive = self._alive()
        for number in sorted(alive, key=lambda n: (n - self._home) % len(self.addresses)):
            self._home = number
            try:
                return claim(self._pair(number))
            except WorkerLost as error:
                self._let_go(number)
                lost = lost or error
            except Unanswered:  # the next claim goes elsewhere
                self._home = alive[(alive.index(number) + 1) % len(alive)]
                raise
        raise lost or WorkerLost("no pair of this dock is left")

    def _gather(self, task: str, count: int, at_least: int, patience_s: float, ask: dict[str, Any]) -> Claim:
        """Grants of several pairs under one claim id, until `at_least` units are there; else all are given back."""
        count = arguments.whole("count", count, 1)
        at_least = arguments.whole("at_least", at_least, 1, count)
        deadline = time.monotonic() + patience_s
        claim_id = SPREAD_CLAIM | secrets.randbits(61)
        parts: list[Claim] = []
        wanted = ask.get("group_ids")
        have = 0
        try:
            while True:
                left = max(0.0, deadline - time.monotonic())
                more = ask | {"task": task, "count": count - have, "claim_id": claim_id}
                got = self._some(more, left)
                parts.append(got)
                have = sum(unit_count(part, ask.get("unit", "rows")) for part in parts)
                if have >= at_least or got.sealed or got.dropped:
                    return join_claims(parts, claim_id if have else 0, wanted)
                if wanted is not None:
                    taken = set(got.group_ids.tolist())
                    ask["group_ids"] = [g for g in ask["group_ids"] if g not in taken]
        except BaseException as error:  # boundary: however the gathering ends, nothing stays held by it
            if have:
                with contextlib.suppress(AsyncFlowError):  # what cannot be given back now is offered again by its lease
                    self._at_holders(claim_id, lambda pair: pair.release(claim_id))
            if isinstance(error, DeadlineExceeded):
                words = f"{error}; {have} of at least {at_least} were there and are given back"
                raise DeadlineExceeded(words) from None
            raise

    def _at_holders(self, claim_id: int, call: Callable[[PairClient], None]) -> None:
        """Calls every pair that holds rows of the claim."""
        claim_id = arguments.whole("claim_id", claim_id)
        if not claim_id & SPREAD_CLAIM:
            call(self._pair(claim_id >> PAIR_SHIFT))
            return
        known, failed = self._ask_all(call)
        failed.sort(key=lambda error: isinstance(error, ClaimLost))  # a pair that is gone comes first
        for error in failed:
            if not known or not isinstance(error, ClaimUnknown):  # pairs without rows of it do not know it
                raise error


def _claim(ask: Mapping[str, Any], pair: PairClient) -> Claim:
    return pair.claim(**ask)
