"""Answers that take several rounds: when a round ends, and what of an unfinished answer lies in the dock meanwhile.

The rule of rounds. With `workflow.partial_rounds` N and a longest answer of M tokens, a share is Q = ceil(M / N). A
call samples an answer that has K tokens up to the next multiple of Q of its *total* length, (K // Q + 1) * Q, at most
M. So a round that its budget ends leaves Q, 2Q, ... tokens, and the last one M: there are at most N of them, however
often the answer is interrupted in between (a stop, a device that is taken back, repacking).

An unfinished answer keeps its tokens, their log-probabilities and version spans in renewable columns of its row. The
row is released and may go on at any replica, at any later version. While an answer runs its worker puts what it has
into the same columns every `faults.stream_out_s`, so that it goes on elsewhere from there if the process dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.columns import FINISH_CODES
from mindspeed_asyncflow.records import Completion, GenRequest, SamplingSpec, VersionSpan

PARTIAL_COLUMNS = ["partial_ids", "partial_logprobs", "partial_spans"]


def round_end(answered: int, longest: int, rounds: int | None) -> int:
    """Total tokens at which the next round of an answer of `answered` tokens ends; see the rule above."""
    if rounds is None:
        return longest
    share = -(-longest // rounds)
    return min(longest, (answered // share + 1) * share)


def span_table(spans: Sequence[VersionSpan]) -> np.ndarray:
    """int32 [S, 3]: version, start, end."""
    return np.array([(s.version, s.start, s.end) for s in spans], dtype=np.int32).reshape(-1, 3)


def spans_of(table: np.ndarray) -> tuple[VersionSpan, ...]:
    """What `span_table` was made of."""
    return tuple(VersionSpan(*map(int, row)) for row in table)


def versions_per_token(table: np.ndarray) -> np.ndarray:
    """int32 [L] from spans [S, 3] that tile [0, L)."""
    return np.repeat(table[:, 0], table[:, 2] - table[:, 1])


def request_of(
    row: int, sampling: SamplingSpec, seed: int, columns: dict[str, Any], i: int, rounds: int | None
) -> GenRequest:
    """The next round of row number `i` of `columns` (`prompt_ids` and `PARTIAL_COLUMNS`, as the dock gave them).

    Arrays are copied: the dock may replace a part while its continuation runs.
    """
    ids = np.array(columns["partial_ids"][i])
    begun = len(ids) > 0
    return GenRequest(
        request_id=str(row),
        prompt_ids=np.array(columns["prompt_ids"][i]),
        sampling=replace(sampling, max_tokens=round_end(len(ids), sampling.max_tokens, rounds)),
        seed=seed,
        resume_ids=ids if begun else None,
        resume_logprobs=np.array(columns["partial_logprobs"][i]) if begun else None,
        resume_spans=spans_of(columns["partial_spans"][i]),
    )


def resumed_tokens(request: GenRequest) -> int:
    return 0 if request.resume_ids is None else len(request.resume_ids)


def versions_of(answers: Sequence[Completion]) -> tuple[np.ndarray, np.ndarray]:
    """(oldest, newest) policy version of each, int32 [n]."""
    return (
        np.array([a.version_min for a in answers], dtype=np.int32),
        np.array([a.version_max for a in answers], dtype=np.int32),
    )


def whole_values(answers: Sequence[Completion], continued: bool, masked: bool = False) -> dict[str, Any]:
    """Columns of complete answers; `continued`: parts of them are in the dock and go now; `masked`: all have masks."""
    values = {
        "response_ids": [a.token_ids for a in answers],
        "rollout_logprobs": [a.logprobs for a in answers],
        "response_spans": [span_table(a.spans) for a in answers],
        "finish": np.array([FINISH_CODES[a.finish_reason] for a in answers], dtype=np.uint8),
    }
    masks = [a.mask for a in answers if a.mask is not None]
    if masked and not masks:
        masks = [np.ones(len(a.token_ids), np.uint8) for a in answers]
    if masks:  # all answers have one
        values["response_mask"] = masks
    if continued:
        nothing = np.empty(0, np.int32), np.empty(0, np.float32), span_table(())
        values |= {name: [empty] * len(answers) for name, empty in zip(PARTIAL_COLUMNS, nothing)}
    return values


def part_values(answers: Sequence[Completion]) -> dict[str, Any]:
    """Columns of answers that are to be continued."""
    return {
        "partial_ids": [a.token_ids for a in answers],
        "partial_logprobs": [a.logprobs for a in answers],
        "partial_spans": [span_table(a.spans) for a in answers],
    }


def shortened(answer: Completion) -> Completion:
    """A complete answer of at least 2 tokens without its last one, as a part that can be continued."""
    count = len(answer.token_ids) - 1
    spans = [s if s.end <= count else VersionSpan(s.version, s.start, count) for s in answer.spans if s.start < count]
    return replace(answer, token_ids=answer.token_ids[:count], logprobs=answer.logprobs[:count], spans=tuple(spans))


class Tray:
    """Complete answers of one call until they are committed, `units` at a time.

    A unit is a whole group, whose members go together once all of them have ended (nobody can use one before), or,
    where other members are not in the call, a single answer. `group_size` None: groups are never spread over calls.
    """

    def __init__(self, rows: np.ndarray, group_ids: np.ndarray, group_size: int | None, units: int) -> None:
        self._group = dict(zip(map(str, rows.tolist()), group_ids.tolist()))
        found, counts = np.unique(group_ids, return_counts=True)
        whole = {g: n for g, n in zip(found.tolist(), counts.tolist()) if group_size is None or n == group_size}
        self._open = whole  # members that have not ended, of groups that are here as a whole
        self._waiting: dict[int, list[Completion]] = {g: [] for g in whole}
        self._ready: list[Completion] = []
        self._count, self._units = 0, units

    def ended(self, answer: Completion, complete: bool) -> list[Completion]:
        """Takes the end of one answer's round; returns what is to be committed now."""
        group = self._group[answer.request_id]
        if group not in self._open:
            self._ready += [answer] if complete else []
            self._count += complete
        else:
            self._waiting[group] += [answer] if complete else []
            self._open[group] -= 1
            if not self._open[group]:
                self._ready += self._waiting.pop(group)
                self._count += 1
        return self.rest() if self._count >= self._units else []

    def waiting(self) -> list[Completion]:
        """Complete answers that are not committed yet."""
        return [*self._ready, *(a for answers in self._waiting.values() for a in answers)]

    def rest(self) -> list[Completion]:
        """All that is ready, whatever the number of units. At the end of a call nothing else is left."""
        ready, self._ready, self._count = self._ready, [], 0
        return ready
