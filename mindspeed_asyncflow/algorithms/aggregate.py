"""From token losses to one number over the *global* batch, whatever micro-batches it is cut into.

The loss of a micro-batch is the sum of weight x token loss; the sums of all micro-batches, ranks and replicas
added up and divided once by `loss_denominator` are the aggregate. No part ever divides by a count of its own.
"""

from __future__ import annotations

import numpy as np

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.records import MicroBatch

_PER_TOKEN = "token-mean"
_PER_SEQUENCE = ("seq-mean-token-mean", "seq-mean-token-sum")


def token_weights(batch: MicroBatch, mode: str) -> np.ndarray:
    """float32 [T] weight of each token loss: 0 where masked, 1, or 1 / (trained tokens of the token's sample).

    `batch` must hold whole samples: a part of one cannot know how many tokens the rest has.
    """
    mask = np.asarray(batch.loss_mask)
    _known(mode)
    if mode != "seq-mean-token-mean":
        return mask
    counts = np.bincount(batch.sample_index, weights=mask)  # [S] trained tokens
    return (mask / np.maximum(counts, 1)[batch.sample_index]).astype(np.float32)


def loss_denominator(mode: str, tokens: float, sequences: float) -> float:
    """What the loss sum of a global batch is divided by.

    `tokens`: trained tokens; `sequences`: samples with at least one trained token. Both are counted after masking,
    so samples that are masked out altogether weigh nothing. An all-masked batch gives 1: its loss is 0, not NaN.
    """
    _known(mode)
    count = tokens if mode == _PER_TOKEN else sequences
    return float(count) if count > 0 else 1.0


def _known(mode: str) -> None:
    if mode != _PER_TOKEN and mode not in _PER_SEQUENCE:
        raise ConfigError(
            f"algorithm.aggregation {mode!r} is unknown; there are: {_PER_TOKEN}, {', '.join(_PER_SEQUENCE)}"
        )
