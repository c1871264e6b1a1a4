"""Which packed tokens a rank of ring attention holds, and what its queries see of each other rank's keys.

Striped: rank r of n holds tokens r, r + n, r + 2n, ... Every rank has the same number of tokens and, within every
sample of any length, almost the same number of (query, key) pairs with each other rank. As stripes interleave, what
the queries of one rank see of the keys of another is again a causal square per sample, at most without the first query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mindspeed_asyncflow.platforms.packing import PackedLayout, pack_layout


@dataclass(frozen=True, slots=True)
class Round:
    """This rank's queries over the keys of rank `source`: sample by sample, query i of them sees keys 0 to i."""

    source: int
    queries: torch.Tensor | None  # int64 [B], which of this rank's tokens; None: all
    keys: torch.Tensor | None  # int64 [B], which of the source's tokens; None: all
    layout: PackedLayout | None  # of the B pairs; None: there are none


@dataclass(frozen=True, slots=True)
class RingLayout:
    """`rounds` in the order in which keys come by: this rank's own, then those of the rank before it, and so on."""

    rounds: tuple[Round, ...]


def held_tokens(total: int, rank: int, size: int, striped: bool) -> np.ndarray:
    """int64 [total/size], the tokens of a context-parallel rank: a stripe, or a contiguous slice."""
    share = total // size
    return np.arange(rank, total, size) if striped else np.arange(rank * share, (rank + 1) * share)


def gathered_places(tokens: np.ndarray, total: int, size: int, striped: bool) -> np.ndarray:
    """Where `tokens` are when what all ranks hold is laid end to end in the order of ranks."""
    return tokens % size * (total // size) + tokens // size if striped else tokens


def ring_layout(cu_seqlens: np.ndarray, rank: int, size: int, device: torch.device | str = "cpu") -> RingLayout:
    """For the samples that start at `cu_seqlens` (int [S+1], first entry 0, last a multiple of `size`)."""
    sources = [(rank - step) % size for step in range(size)]
    return RingLayout(tuple(_round(cu_seqlens.astype(np.int64), rank, source, size, device) for source in sources))


def _round(cu: np.ndarray, rank: int, source: int, size: int, device: torch.device | str) -> Round:
    queries, keys = (-((of - cu) // size) for of in (rank, source))  # [S+1], where each sample starts in the stripes
    first_query, first_key = queries[:-1], keys[:-1]
    # The first query of a sample that lies before its first key sees nothing. All later ones come after as many keys
    # as there are queries up to them, because stripes take turns.
    first_query = first_query + (first_key * size + source > first_query * size + rank)
    counts = np.maximum(queries[1:] - first_query, 0)
    share = int(cu[-1]) // size
    if not counts.any():
        return Round(source, None, None, None)

    def chosen(first: np.ndarray) -> torch.Tensor | None:
        ends = np.cumsum(counts)
        index = np.arange(ends[-1]) + np.repeat(first - (ends - counts), counts)
        return None if len(index) == share else torch.from_numpy(index).to(device)

    lengths = counts[counts > 0]
    return Round(
        source, chosen(first_query), chosen(first_key), pack_layout(np.concatenate([[0], np.cumsum(lengths)]), device)
    )
