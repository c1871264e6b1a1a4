"""From token losses to one number over the *global* batch, whatever micro-batches it is cut into.

The loss of a micro-batch is the sum of weight x token loss; the sums of all micro-batches, ranks and replicas
added up and divided once by `loss_denominator` are the aggregate. No part ever divides by a count of its own.

    mode                      token loss l, mask m, B answers with a token that counts
    token-mean                sum m l / sum m
    seq-mean-token-mean       sum over answers of (mean of l inside it) / B
    seq-mean-token-sum        sum m l / B
    seq-mean-token-sum-norm   sum m l / (B x horizon)          (Dr. GRPO, arXiv 2503.20783)
    token-sum                 sum m l
"""

from __future__ import annotations

import numpy as np

from mindspeed_asyncflow.config.algorithm import AGGREGATIONS
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.records import MicroBatch


def token_weights(batch: MicroBatch, mode: str, mask: np.ndarray | None = None) -> np.ndarray:
    """float32 [T] weight of each token loss: 0 where masked, 1, or 1 / (trained tokens of the token's sample).

    `batch` must hold whole samples: a part of one cannot know how many tokens the rest has. `mask` [T] counts in place
    of the batch's own.
    """
    mask = np.asarray(batch.loss_mask if mask is None else mask)
    _known(mode)
    if mode != "seq-mean-token-mean":
        return mask
    counts = np.bincount(batch.sample_index, weights=mask)  # [S] trained tokens
    return (mask / np.maximum(counts, 1)[batch.sample_index]).astype(np.float32)


def loss_denominator(mode: str, tokens: float, sequences: float, horizon: int | None = None) -> float:
    """What the loss sum of a global batch is divided by.

    `tokens`: trained tokens; `sequences`: samples with at least one trained token. Both are counted after masking,
    so samples that are masked out altogether weigh nothing. An all-masked batch gives 1: its loss is 0, not NaN.
    `horizon`: `algorithm.loss_horizon`.
    """
    _known(mode)
    if mode == "token-sum":
        return 1.0
    count = float(tokens if mode == "token-mean" else sequences)
    if mode == "seq-mean-token-sum-norm":
        if horizon is None:
            raise ConfigError(f"algorithm.aggregation {mode} needs algorithm.loss_horizon")
        count *= horizon
    return count if count > 0 else 1.0


def _known(mode: str) -> None:
    if mode not in AGGREGATIONS:
        raise ConfigError(f"algorithm.aggregation {mode!r} is unknown; there are: {', '.join(AGGREGATIONS)}")
