"""From trained rows to packed micro-batches: a plan made once for all ranks, and the packing that each rank does.

The plan depends on (group, member) order and on token counts only, never on arrival order, so that a step on a
fixed seed sums the same numbers in the same order.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.records import MicroBatch, TrainSample


@dataclass(frozen=True, slots=True)
class RowInfos:
    """What the plan needs to know of rows, [n] each."""

    rows: np.ndarray  # int64
    group_ids: np.ndarray  # int64
    members: np.ndarray  # int32
    tokens: np.ndarray  # int64, prompt + response


def plan(infos: RowInfos, data_parallel: int, max_tokens: int, count_multiple: int = 1) -> list[list[list[int]]]:
    """Row handles as [replica][micro-batch][row].

    Replicas get equal token loads, and so do the micro-batches of a replica: as few as their rows fit into, at most
    `max_tokens` tokens each. Every replica has the same number of them (empty ones at the end), a multiple of
    `count_multiple`: ranks that meet in collectives never wait for one another. Rows keep (group, member) order inside
    a micro-batch, and micro-batches that of their first rows. Raises ConfigError when one row exceeds `max_tokens`.
    """
    order = np.lexsort([infos.members, infos.group_ids])
    rows, tokens = np.asarray(infos.rows)[order], np.asarray(infos.tokens, np.int64)[order]
    longest = int(tokens.max(initial=0))
    if longest > max_tokens:
        raise ConfigError(f"a sample has {longest} tokens; raise trainer.micro_batch_tokens (now {max_tokens})")
    shares = _balance(tokens, np.arange(len(rows)), data_parallel)
    count = max(_fewest(tokens, share, max_tokens) for share in shares)
    count += -count % count_multiple
    return [[rows[batch].tolist() for batch in _cut(tokens, share, count)] for share in shares]


def _balance(tokens: np.ndarray, share: np.ndarray, parts: int) -> list[np.ndarray]:
    """The places `share`, which rise, in parts of places that rise: longest first onto the lightest part.

    The largest load is at most 4/3 - 1/(3 parts) of the best possible one (Graham 1969), and within a percent of it for
    dozens of rows per part.
    """
    if parts == 1:
        return [share]
    lightest = [(0, 0, i) for i in range(parts)]  # a heap of tokens, rows, part
    order = np.argsort(-tokens[share], kind="stable")
    owners = []
    for length in tokens[share[order]].tolist():
        load, count, part = lightest[0]
        owners.append(part)
        heapq.heapreplace(lightest, (load + length, count + 1, part))
    owner = np.empty(len(share), np.int64)
    owner[order] = owners
    by_part = np.argsort(owner, kind="stable")
    return np.split(share[by_part], np.cumsum(np.bincount(owner, minlength=parts))[:-1])


def _fewest(tokens: np.ndarray, share: np.ndarray, max_tokens: int) -> int:
    """Number of evenly filled micro-batches into which a replica's rows fit."""
    if not len(share):
        return 1
    total, longest = int(tokens[share].sum()), int(tokens[share].max())
    least = max(1, -(-total // max_tokens))
    # No part gets more than the mean and one row, so with `most` parts they fit for sure.
    most = len(share) if longest >= max_tokens else min(len(share), -(-total // (max_tokens - longest)))

    def fits(count: int) -> bool:
        return max(tokens[batch].sum() for batch in _balance(tokens, share, count)) <= max_tokens

    return bisect.bisect_left(range(most), True, lo=least, key=fits)


def _cut(tokens: np.ndarray, share: np.ndarray, count: int) -> list[np.ndarray]:
    """Places of a replica's rows in `count` micro-batches. More than the fewest are never filled higher: with a further
    part the loads, sorted, are nowhere larger after any row."""
    batches = [batch for batch in _balance(tokens, share, count) if len(batch)]
    batches.sort(key=lambda batch: batch[0])
    return batches + [share[:0]] * (count - len(batches))


def pack(samples: Sequence[TrainSample]) -> MicroBatch:
    """Put samples back to back without padding.

    A sample of P prompt and L response tokens takes P+L-1 positions: the last token is only ever a target. The loss
    mask follows the lengths that the engine reported, never a search for a pad or EOS id. No samples give one
    position of weight zero, so that a rank without rows still joins every collective.
    """
    if not samples:
        return _empty()
    lengths = np.array([s.tokens - 1 for s in samples], dtype=np.int64)  # [S]
    cu = np.zeros(len(samples) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu[1:])
    total = int(cu[-1])
    tokens = np.concatenate([x for s in samples for x in (s.prompt_ids, s.response_ids)]).astype(np.int64)
    ends = np.cumsum(lengths + 1)  # [S] past the last token of each sample in `tokens`
    keep = np.ones(len(tokens), dtype=bool)
    keep[ends - 1] = False
    is_target = np.ones(len(tokens), dtype=bool)
    is_target[np.concatenate([[0], ends[:-1]])] = False
    sample_index = np.repeat(np.arange(len(samples), dtype=np.int32), lengths)
    positions = np.arange(total, dtype=np.int64) - np.repeat(cu[:-1], lengths)
    first_response = np.array([len(s.prompt_ids) - 1 for s in samples], dtype=np.int64)
    mask = (positions >= np.repeat(first_response, lengths)).astype(np.float32)
    answer = mask > 0
    for s, start in zip(samples, cu[:-1] + first_response):
        if s.loss_mask is not None:
            mask[start : start + len(s.response_ids)] = s.loss_mask

    def spread(per_answer: Sequence[np.ndarray]) -> np.ndarray:
        """[L] of every answer -> float32 [T], 0 where nothing is trained."""
        values = np.zeros(total, dtype=np.float32)
        values[answer] = np.concatenate(per_answer)
        return values * (mask > 0)

    def spread_known(name: str) -> np.ndarray | None:
        """The same of a field that all samples have, or none."""
        per_answer = [getattr(s, name) for s in samples]
        return None if per_answer[0] is None else spread(per_answer)

    return MicroBatch(
        input_ids=tokens[keep],
        positions=positions,
        cu_seqlens=cu,
        targets=tokens[is_target],
        loss_mask=mask,
        rollout_logprobs=spread([s.rollout_logprobs for s in samples]),
        advantages=spread([np.broadcast_to(s.advantage, len(s.response_ids)) for s in samples]),
        sample_index=sample_index,
        rows=np.array([s.row for s in samples], dtype=np.int64),
        ref_logprobs=spread_known("ref_logprobs"),
        lags=spread_known("lags"),
        values=spread_known("values"),
        returns=spread_known("returns"),
    )


def _empty() -> MicroBatch:
    zero = np.zeros(1, dtype=np.float32)
    one_id = np.zeros(1, dtype=np.int64)
    return MicroBatch(
        input_ids=one_id,
        positions=one_id.copy(),
        cu_seqlens=np.array([0, 1], dtype=np.int32),
        targets=one_id.copy(),
        loss_mask=zero,
        rollout_logprobs=zero.copy(),
        advantages=zero.copy(),
        sample_index=np.zeros(1, dtype=np.int32),
        rows=np.array([-1], dtype=np.int64),
        values=zero.copy(),
        returns=zero.copy(),
    )
