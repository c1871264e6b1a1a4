"""Micro-batches as one rank's model reads them: trimmed, padded, cut over context-parallel ranks, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mindspeed_asyncflow.engines.megatron.model import Selection
from mindspeed_asyncflow.engines.megatron.trim import Trimmed, trim
from mindspeed_asyncflow.platforms.modules import PackedBatch
from mindspeed_asyncflow.platforms.packing import pack_layout
from mindspeed_asyncflow.platforms.striping import gathered_places, held_tokens, ring_layout
from mindspeed_asyncflow.records import MicroBatch

PAD_SAMPLE_TOKENS = 64  # padding is cut into samples of this length, so that its attention stays cheap


@dataclass(frozen=True, slots=True)
class RankBatch:
    """P tokens after trimming and padding, of which this rank holds P/cp."""

    source: MicroBatch | None  # None: made by the engine to fill a schedule; no loss
    tokens: int  # P
    input_ids: torch.Tensor  # int64 [1, P/cp]
    selection: Selection  # the N trained positions of this rank
    packed: PackedBatch
    origin: torch.Tensor  # int64 [M], place in the source of each trained position of all ranks
    trained: torch.Tensor  # int64 [M], the same positions among the P as gathered from all ranks in their order


def make_rank_batch(
    batch: MicroBatch | None,
    part: Trimmed,
    tokens: int,
    *,
    cp_rank: int,
    cp_size: int,
    ring: bool,
    prune: bool,
    inv_freq: torch.Tensor,
) -> RankBatch:
    """Pad `part` to `tokens` with samples of weight zero and keep what this context-parallel rank holds."""
    pad = tokens - len(part.input_ids)
    fill = np.zeros(pad, np.int64)
    ids = np.concatenate([part.input_ids, fill])
    positions = np.concatenate([part.positions, np.arange(pad) % PAD_SAMPLE_TOKENS])
    pad_ends = np.minimum(np.arange(PAD_SAMPLE_TOKENS, pad + PAD_SAMPLE_TOKENS, PAD_SAMPLE_TOKENS), pad)
    cu = np.concatenate([[0], part.ends, len(part.input_ids) + pad_ends]) if pad else np.concatenate([[0], part.ends])
    trained = np.flatnonzero(part.trained)
    share, striped = tokens // cp_size, ring and cp_size > 1
    held = held_tokens(tokens, cp_rank, cp_size, striped)
    places = gathered_places(trained, tokens, cp_size, striped)
    mine = places // share == cp_rank

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(inv_freq.device)

    rows = put(places[mine] - cp_rank * share)
    return RankBatch(
        source=batch,
        tokens=tokens,
        input_ids=put(ids[held])[None],
        selection=Selection(rows, put(part.targets[trained[mine]])),
        packed=PackedBatch.make(
            ring_layout(cu, cp_rank, cp_size, inv_freq.device) if striped else pack_layout(cu, inv_freq.device),
            put(positions[held]),
            inv_freq,
            rows=rows if prune and 0 < len(rows) < share else None,
        ),
        origin=put(part.origin[trained]),
        trained=put(places),
    )


def make_rank_batches(
    batches: Sequence[MicroBatch],
    *,
    count: int,
    multiple: int,
    same_length: bool,
    cp_rank: int,
    cp_size: int,
    ring: bool,
    prune: bool,
    inv_freq: torch.Tensor,
) -> list[RankBatch]:
    """`count` batches (missing ones are filler), each a multiple of `multiple` tokens; one length if `same_length`.

    ring: context-parallel ranks hold stripes of the tokens in place of slices.
    prune: the last layer may leave out positions that are not trained; false where it holds a part of the sequence.
    inv_freq: float32 [D/2], the model's rotary frequencies, on the device where the batches shall be.
    """
    sources: list[MicroBatch | None] = [*batches, *[None] * (count - len(batches))]
    parts = [trim(source) for source in sources]
    sizes = [-(-max(1, len(part.input_ids)) // multiple) * multiple for part in parts]
    if same_length:
        sizes = [max(sizes)] * len(sizes)
    return [
        make_rank_batch(source, part, size, cp_rank=cp_rank, cp_size=cp_size, ring=ring, prune=prune, inv_freq=inv_freq)
        for source, part, size in zip(sources, parts, sizes)
    ]
