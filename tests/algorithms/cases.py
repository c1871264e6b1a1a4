"""The base case of the golden values: two answers of 2 and 4 tokens, in float64."""

from __future__ import annotations

import numpy as np
import torch

from mindspeed_asyncflow.records import MicroBatch

LENGTHS = [2, 4]
ADVANTAGES = [1.0, -1.0]
LOG_PI = [-0.5, -1.0, -0.2, -2.0, -0.7, -0.1]
LOG_RATIO = [0.1, -0.2, 0.3, 0.0, -0.4, 0.05]  # log pi - log old
OLD_OVER_MU = [0.05, -0.9, 1.2, 0.0, -0.1, 2.0]  # log old - log mu


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def micro_batch(lengths, advantages, rollout, masks=None, ref=None, order=None, prompt=1):
    """Answers of `lengths` after prompts of `prompt` tokens, packed in `order`; per-answer lists in, float64 kept.

    `rollout`, `masks`, `ref`: flat over the response tokens of all answers, in answer order.
    """
    order = range(len(lengths)) if order is None else order
    starts = np.concatenate([[0], np.cumsum(lengths)])
    totals = [lengths[i] + prompt for i in order]

    def spread(flat, fill=0.0):
        rows = []
        for i in order:
            row = np.full(lengths[i] + prompt, fill, dtype=np.float64)
            row[prompt - 1 : prompt - 1 + lengths[i]] = flat[starts[i] : starts[i + 1]]
            rows.append(row)
        return np.concatenate(rows)

    ones = np.ones(starts[-1]) if masks is None else np.asarray(masks, dtype=np.float64)
    mask = spread(ones)
    tokens = sum(totals)
    return MicroBatch(
        input_ids=np.zeros(tokens, np.int64),
        positions=np.concatenate([np.arange(n) for n in totals]),
        cu_seqlens=np.concatenate([[0], np.cumsum(totals)]).astype(np.int32),
        targets=np.zeros(tokens, np.int64),
        loss_mask=mask.astype(np.float32),
        rollout_logprobs=spread(rollout) * mask,
        advantages=spread(np.repeat(advantages, lengths)) * mask,
        sample_index=np.repeat(np.arange(len(totals)), totals).astype(np.int32),
        rows=np.asarray(list(order), dtype=np.int64),
        ref_logprobs=None if ref is None else spread(ref) * mask,
    )


def on_tokens(batch, flat, fill=0.0):
    """[T] float64 with `flat` at the trained positions in order and `fill` elsewhere."""
    values = torch.full((len(batch.input_ids),), fill, dtype=torch.float64)
    values[torch.from_numpy(np.flatnonzero(batch.loss_mask))] = tensor(flat)
    return values
