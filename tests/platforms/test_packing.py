"""Index arrays between packed tokens and padded rows, and attention through them."""

import itertools

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.platforms.kernels import attention_packed
from mindspeed_asyncflow.platforms.packing import WASTE_SHARE, WASTE_TOKENS, cut_buckets, pack_layout


def ends(*lengths):
    return np.concatenate([[0], np.cumsum(lengths)])


def qkv(tokens, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]


def one_by_one(q, k, v, cu):
    """Plain softmax attention of each sample alone, key/value heads repeated."""
    outs = []
    for a, b in itertools.pairwise(cu):
        qs, ks, vs = q[a:b], k[a:b].repeat_interleave(2, 1), v[a:b].repeat_interleave(2, 1)
        scores = torch.einsum("qnd,knd->nqk", qs, ks) * 8**-0.5
        scores = scores.masked_fill(torch.triu(torch.ones(b - a, b - a, dtype=torch.bool), 1), float("-inf"))
        outs.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1), vs).flatten(1))
    return torch.cat(outs)


@pytest.mark.parametrize("lengths", [(3, 2, 4), (5, 5, 5), (1,), (1, 900, 2, 30, 31, 1), (7, 1, 1, 1)])
def test_packed_attention_equals_each_sample_alone(lengths):
    """B78: no sample sees another; forward and gradients."""
    cu = ends(*lengths)
    q, k, v = qkv(cu[-1])
    weights = torch.randn(int(cu[-1]), 32)
    found = {}
    for name, out in (
        ("packed", attention_packed(q, k, v, pack_layout(cu), 8**-0.5)),
        ("alone", one_by_one(q, k, v, cu)),
    ):
        (out * weights).sum().backward()
        found[name] = [out.detach(), *(t.grad.clone() for t in (q, k, v))]
        for t in (q, k, v):
            t.grad = None
    for a, b in zip(found["packed"], found["alone"]):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_changing_one_sample_leaves_the_others_bit_equal():
    """B78: lengths [3, 2, 4], one token of the first changed."""
    cu = ends(3, 2, 4)
    q, k, v = (t.detach() for t in qkv(9))
    before = attention_packed(q, k, v, pack_layout(cu), 1.0)
    for t in (q, k, v):
        t[1] += 1.0
    after = attention_packed(q, k, v, pack_layout(cu), 1.0)
    assert torch.equal(before[3:], after[3:])
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1:3], after[1:3])


def test_equal_lengths_need_no_index():
    layout = pack_layout(ends(4, 4, 4))
    assert layout.index is None
    assert [(b.rows, b.length) for b in layout.buckets] == [(3, 4)]


def test_each_token_owns_one_slot_and_padding_repeats_its_own_sample():
    cu = ends(3, 2, 4)
    layout = pack_layout(cu)
    index = layout.index
    assert torch.equal(index.token_of_slot[index.slot_of_token], torch.arange(9))
    sample_of = np.repeat([0, 1, 2], [3, 2, 4])
    for bucket in layout.buckets:
        rows = index.token_of_slot[bucket.start :][: bucket.rows * bucket.length].view(bucket.rows, bucket.length)
        assert all(len({sample_of[t] for t in row}) == 1 for row in rows.tolist())


def test_padding_is_bounded_for_very_different_lengths():
    lengths = np.random.default_rng(0).integers(1, 4000, size=300)
    buckets = cut_buckets(lengths)
    assert sorted(np.concatenate(buckets)) == list(range(300))
    for members in buckets:
        real = lengths[members].sum()
        assert lengths[members].max() * len(members) - real <= max(WASTE_SHARE * real, WASTE_TOKENS)
    assert len(buckets) < 20


def test_short_answers_share_one_bucket():
    assert len(cut_buckets(np.array([6, 7, 8, 9, 10] * 20))) == 1
