"""Where packed tokens sit: index arrays between a packed sequence and right-padded rows, without a loop over samples.

A packed micro-batch holds S samples back to back. Attention wants rows of equal length: samples are sorted by
length and cut into a few buckets, each padded to its own longest sample. Right padding needs no mask under a causal
rule: a real query never looks at a later position, and the rows of padding queries are thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

WASTE_SHARE = 0.25  # padding allowed in a bucket, as a share of its real tokens ...
WASTE_TOKENS = 512  # ... or in tokens, where one more bucket would cost more than computing the padding


@dataclass(frozen=True, slots=True)
class Bucket:
    """`rows` samples, padded to `length` tokens each."""

    rows: int
    length: int
    start: int  # first padded slot of this bucket


@dataclass(frozen=True, slots=True)
class SlotIndex:
    """Between T packed tokens and P >= T padded slots."""

    token_of_slot: torch.Tensor  # int64 [P]; a padding slot repeats its sample's last token
    slot_of_token: torch.Tensor  # int64 [T]
    padding_slots: torch.Tensor | None  # int64 [P - T]; None: no padding


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How the samples of one micro-batch lie; shared by all layers."""

    lengths: tuple[int, ...]  # tokens of each sample
    buckets: tuple[Bucket, ...]
    index: SlotIndex | None  # None: one bucket without padding, tokens are slots

    def padded(self, tokens: torch.Tensor, zero: bool = False) -> torch.Tensor:
        """[T, ...] -> [P, ...] without autograd; padding slots repeat a token, or are 0."""
        if self.index is None:
            return tokens
        slots = tokens.index_select(0, self.index.token_of_slot)
        if zero and self.index.padding_slots is not None:
            slots.index_fill_(0, self.index.padding_slots, 0.0)
        return slots

    def unpadded(self, slots: torch.Tensor) -> torch.Tensor:
        """[P, ...] -> [T, ...] without autograd."""
        return slots if self.index is None else slots.index_select(0, self.index.slot_of_token)


def cut_buckets(lengths: np.ndarray) -> list[np.ndarray]:
    """Sample indices of each bucket, longest samples first; padding stays below the two limits above."""
    order = np.argsort(-lengths, kind="stable")
    buckets, first = [], 0
    while first < len(order):
        rest = lengths[order[first:]]
        real = np.cumsum(rest)
        waste = rest[0] * np.arange(1, len(rest) + 1) - real
        fits = waste <= np.maximum(WASTE_SHARE * real, WASTE_TOKENS)
        count = len(rest) if fits.all() else int(np.argmin(fits))
        buckets.append(order[first : first + count])
        first += count
    return buckets


def pack_layout(cu_seqlens: np.ndarray, device: torch.device | str = "cpu") -> PackedLayout:
    """Layout of the samples that start at `cu_seqlens` (int [S+1], first entry 0)."""
    starts = cu_seqlens[:-1].astype(np.int64)
    lengths = np.diff(cu_seqlens).astype(np.int64)
    if (lengths == lengths[0]).all():
        bucket = Bucket(rows=len(lengths), length=int(lengths[0]), start=0)
        return PackedLayout(tuple(lengths.tolist()), (bucket,), None)
    total = int(cu_seqlens[-1])
    slot_of_token = np.empty(total, np.int64)
    token_of_slot, padding, buckets, start = [], [], [], 0
    for members in cut_buckets(lengths):
        longest = int(lengths[members].max())
        column = np.arange(longest)[None, :]  # [1, L]
        last = (lengths[members] - 1)[:, None]  # [B, 1]
        tokens = starts[members][:, None] + np.minimum(column, last)  # [B, L]
        slots = start + np.arange(tokens.size).reshape(tokens.shape)
        real = column <= last
        slot_of_token[tokens[real]] = slots[real]
        token_of_slot.append(tokens.ravel())
        padding.append(slots[~real])
        buckets.append(Bucket(rows=len(members), length=longest, start=start))
        start += tokens.size

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    pads = np.concatenate(padding)
    index = SlotIndex(put(np.concatenate(token_of_slot)), put(slot_of_token), put(pads) if len(pads) else None)
    return PackedLayout(tuple(lengths.tolist()), tuple(buckets), index)
