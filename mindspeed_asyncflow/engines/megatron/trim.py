"""Tokens that nothing depends on are never computed. Pure arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.records import MicroBatch


@dataclass(frozen=True, slots=True)
class Trimmed:
    """The K <= T tokens of a micro-batch that a trained position depends on.

    Tokens behind the last trained position of their sample influence nothing under causal attention: the last token
    of an answer, and every token of a sample that is masked out altogether, are never computed.
    """

    input_ids: np.ndarray  # int64 [K]
    positions: np.ndarray  # int64 [K]
    targets: np.ndarray  # int64 [K]
    trained: np.ndarray  # bool [K]
    ends: np.ndarray  # int64 [S'], end of each sample that is left
    origin: np.ndarray  # int64 [K], index in the micro-batch


def trim(batch: MicroBatch | None) -> Trimmed:
    """`batch` without the tokens that nothing depends on; None gives an empty one."""
    if batch is None:
        none = np.zeros(0, np.int64)
        return Trimmed(none, none, none, none.astype(bool), none, none)
    mask = batch.loss_mask != 0
    ends = batch.cu_seqlens[1:].astype(np.int64)
    starts = batch.cu_seqlens[:-1].astype(np.int64)
    trained_before = np.concatenate([[0], np.cumsum(mask)])  # [T+1]
    left = np.repeat(trained_before[ends], ends - starts) - trained_before[:-1]  # trained positions from t on
    keep = left > 0
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    return Trimmed(
        input_ids=batch.input_ids[keep],
        positions=batch.positions[keep],
        targets=batch.targets[keep],
        trained=mask[keep],
        ends=np.unique(kept_before[ends][kept_before[ends] > kept_before[starts]]),
        origin=np.flatnonzero(keep),
    )
