"""Rules of the delta: what comes out is what the sender had, or nothing is accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard import delta


def bytes_of(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@settings(max_examples=200, deadline=None)
@given(
    nbytes=st.integers(0, 3000),
    changes=st.lists(st.tuples(st.integers(0, 2999), st.integers(0, 255)), max_size=40),
    block=st.sampled_from(delta.BLOCKS),
)
def test_any_change_survives_the_round_trip_and_is_shorter_or_not_offered(nbytes, changes, block) -> None:  # type: ignore[no-untyped-def]
    anchor = bytes_of(nbytes, nbytes)
    target = anchor.copy()
    for place, value in changes:
        if place < nbytes:
            target[place] = value
    message = delta.encode(anchor, target, block)
    if message is None:
        assert np.count_nonzero(anchor != target) * (block + 2) + 40 + nbytes / (8 * block) >= nbytes
        return
    assert len(message) < nbytes
    out = bytes_of(7, nbytes)
    delta.apply(message, anchor, out)
    assert (out == target).all()


@pytest.mark.parametrize("where", [[0], [65534], [65535], [65536], [0, 131071], [199_999], [3, 65539, 131_074]])
def test_changes_far_apart_are_found_again(where: list[int]) -> None:
    """Distances around the longest step of 65535 blocks."""
    anchor = bytes_of(1, 400_000)
    target = anchor.copy()
    target.view(np.uint16)[where] += 1
    message = delta.encode(anchor, target, 2)
    assert message is not None and len(message) <= 32 + 2 * (len(where) + 3) + 2 * len(where)
    out = np.empty_like(anchor)
    delta.apply(message, anchor, out)
    assert (out == target).all()


def test_equal_bytes_cost_a_header() -> None:
    anchor = bytes_of(1, 10_000)
    message = delta.encode(anchor, anchor)
    assert message is not None and len(message) == 32
    out = np.empty_like(anchor)
    delta.apply(message, anchor, out)
    assert (out == anchor).all()


def test_other_bytes_altogether_are_not_worth_a_delta() -> None:
    assert delta.encode(bytes_of(1, 10_000), bytes_of(2, 10_000)) is None


def test_another_anchor_and_damage_anywhere_are_refused() -> None:
    anchor = bytes_of(1, 4000)
    target = anchor.copy()
    target[::97] ^= 255
    message = delta.encode(anchor, target)
    assert message is not None
    out = np.empty_like(anchor)
    other = anchor.copy()
    other[5] ^= 1
    with pytest.raises(WeightSyncError, match="another anchor"):
        delta.apply(message, other, out)
    with pytest.raises(WeightSyncError, match="does not fit"):
        delta.apply(message, anchor[:-1], out[:-1])
    for cut in (0, 31, len(message) - 1):
        with pytest.raises(WeightSyncError):
            delta.apply(message[:cut], anchor, out)
    for place in [p for p in range(len(message)) if p not in (2, 3)]:  # two bytes of the header mean nothing
        damaged = bytearray(message)
        damaged[place] ^= 0x41
        try:
            delta.apply(bytes(damaged), anchor, out)
        except WeightSyncError:
            continue
        assert (out == target).all(), f"damage at byte {place} changed the result unnoticed"


def test_one_percent_of_changed_bfloat16_weights_saves_over_nine_tenths() -> None:
    weights = torch.randn(200_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    later = weights.clone()
    later[torch.randperm(200_000, generator=torch.Generator().manual_seed(2))[:2000]] += 1.0
    raw = [w.view(torch.uint8).numpy() for w in (weights, later)]
    message = delta.encode(*raw)
    assert message is not None and len(message) < 0.05 * len(raw[0])
    with pytest.raises(WeightSyncError, match="1 or 2 or 4 or 8 bytes"):
        delta.encode(*raw, block=3)
