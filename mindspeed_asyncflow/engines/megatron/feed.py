"""Micro-batches as one rank's model reads them: padded, cut over context-parallel ranks, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mindspeed_asyncflow.engines.megatron.model import Selection
from mindspeed_asyncflow.platforms.modules import PackedBatch
from mindspeed_asyncflow.platforms.packing import pack_layout
from mindspeed_asyncflow.records import MicroBatch

PAD_SAMPLE_TOKENS = 64  # padding is cut into samples of this length, so that its attention stays cheap


@dataclass(frozen=True, slots=True)
class RankBatch:
    """T tokens after padding, of which this rank holds T/cp."""

    source: MicroBatch | None  # None: made by the engine to fill a schedule; no loss
    tokens: int  # T
    input_ids: torch.Tensor  # int64 [1, T/cp]
    positions: torch.Tensor  # int64 [T/cp]
    selection: Selection  # the N trained positions of this rank
    packed: PackedBatch


def padded_tokens(tokens: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that holds `tokens` tokens."""
    return -(-tokens // multiple) * multiple


def make_rank_batch(
    batch: MicroBatch | None, tokens: int, cp_rank: int, cp_size: int, device: torch.device
) -> RankBatch:
    """Pad `batch` to `tokens` with samples of weight zero and keep the slice of this context-parallel rank."""
    real = 0 if batch is None else len(batch.input_ids)
    pad = tokens - real
    ids, positions, targets, mask = (np.zeros(tokens, np.int64) for _ in range(4))
    cu = np.zeros(1, np.int64)
    if batch is not None:
        ids[:real], positions[:real], targets[:real] = batch.input_ids, batch.positions, batch.targets
        mask[:real] = batch.loss_mask != 0
        cu = batch.cu_seqlens.astype(np.int64)
    if pad:
        positions[real:] = np.arange(pad) % PAD_SAMPLE_TOKENS
        ends = np.minimum(np.arange(PAD_SAMPLE_TOKENS, pad + PAD_SAMPLE_TOKENS, PAD_SAMPLE_TOKENS), pad)
        cu = np.concatenate([cu, real + ends])
    share = tokens // cp_size
    mine = slice(cp_rank * share, (cp_rank + 1) * share)
    index = np.flatnonzero(mask[mine])

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return RankBatch(
        source=batch,
        tokens=tokens,
        input_ids=put(ids[mine])[None],
        positions=put(positions[mine]),
        selection=Selection(put(index), put(targets[mine][index])),
        packed=PackedBatch(layout=pack_layout(cu, device)),
    )


def make_rank_batches(
    batches: Sequence[MicroBatch],
    *,
    count: int,
    multiple: int,
    same_length: bool,
    cp_rank: int,
    cp_size: int,
    device: torch.device,
) -> list[RankBatch]:
    """`count` batches (missing ones are filler), each a multiple of `multiple` tokens; one length if `same_length`."""
    sizes = [padded_tokens(len(b.input_ids), multiple) for b in batches]
    sizes += [multiple] * (count - len(batches))
    if same_length:
        sizes = [max(sizes)] * len(sizes)
    sources: list[MicroBatch | None] = [*batches, *[None] * (count - len(batches))]
    return [make_rank_batch(b, size, cp_rank, cp_size, device) for b, size in zip(sources, sizes)]
