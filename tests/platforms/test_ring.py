"""Ring attention of several ranks, which are threads here, against plain attention over whole samples in float64."""

import itertools
import queue
import threading

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.platforms import attention_block
from mindspeed_asyncflow.platforms.ring import ring_attention
from mindspeed_asyncflow.platforms.striping import held_tokens, ring_layout

WAIT_S = 20


class Thread:
    """One rank of a ring of queues; `events` tells what it did in order."""

    def __init__(self, lines, rank):
        self._lines, self._rank, self.events = lines, rank, []

    def shift(self, tensor):
        self.events.append("send")
        self._lines[(self._rank + 1) % len(self._lines)].put(tensor.clone())
        return self

    def wait(self):
        self.events.append("wait")
        return self._lines[self._rank].get(timeout=WAIT_S)


def on_ring(size, work):
    """`work(rank, ring)` of all ranks at once: results, and the rings."""
    lines = [queue.Queue() for _ in range(size)]
    rings, found = [Thread(lines, rank) for rank in range(size)], [None] * size

    def run(rank):
        found[rank] = work(rank, rings[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert all(line.empty() for line in lines)
    return found, rings


def plain(q, k, v, cu, scale):
    outs = []
    for a, b in itertools.pairwise(cu):
        qs, ks, vs = q[a:b], *(x[a:b].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", qs, ks) * scale
        scores = scores.masked_fill(torch.ones(b - a, b - a, dtype=torch.bool).triu(1), float("-inf"))
        outs.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1), vs).flatten(1))
    return torch.cat(outs)


def compare(lengths, size, heads=(4, 2), dims=(8, 8), dtype=torch.float64, spread=1.0):
    """Greatest difference of output and gradients, as a share of the greatest value of each where that is above 1."""
    cu = np.concatenate([[0], np.cumsum(lengths)])
    total = int(cu[-1])
    torch.manual_seed(0)
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    given = [(torch.randn(total, *shape, dtype=torch.float64) * spread).to(dtype) for shape in shapes]
    weights = torch.randn(total, heads[0] * dims[1], dtype=torch.float64)
    whole = [x.detach().double().clone().requires_grad_() for x in given]
    out = plain(*whole, cu, 0.3)
    (out * weights).sum().backward()

    def work(rank, ring):
        held = held_tokens(total, rank, size, True)
        mine = [x[held].requires_grad_() for x in given]
        part = ring_attention(*mine, ring_layout(cu, rank, size), 0.3, ring)
        (part.double() * weights[held]).sum().backward()
        return [part.detach(), *(x.grad for x in mine)]

    found, _ = on_ring(size, work)
    differences = []
    for number, wanted in enumerate([out.detach(), *(x.grad for x in whole)]):
        joined = torch.empty(wanted.shape, dtype=dtype)
        for rank in range(size):
            joined[held_tokens(total, rank, size, True)] = found[rank][number]
        differences.append(float((joined - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)))
    return max(differences)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize(
    "lengths", [(60,), (7, 1, 13, 2, 36, 1), (1,) * 12, (5, 5, 5, 5, 5, 5, 5, 1)], ids=["one", "odd", "ones", "fives"]
)
def test_ring_equals_whole_attention(lengths, size):
    assert compare(lengths, size) < 1e-12


@pytest.mark.parametrize(
    ("heads", "dims"),
    [((6, 6), (8, 8)), ((6, 1), (8, 8)), ((3, 3), (12, 8)), ((4, 2), (8, 12))],
    ids=["all", "one_key_head", "latent", "wide_values"],
)
def test_ring_takes_any_heads(heads, dims):
    assert compare((9, 30, 2, 7), 4, heads, dims) < 1e-12


def test_pieces_of_long_samples_give_the_same(monkeypatch):
    monkeypatch.setattr(attention_block, "SCORES_AT_ONCE", 200)
    monkeypatch.setattr(attention_block, "QUERIES_AT_ONCE", 5)
    assert compare((90, 3, 27), 4) < 1e-12


def test_large_scores_overflow_nowhere():
    """exp of a score of 1000 is infinite in every type."""
    assert compare((40, 24), 4, spread=40.0) < 1e-10


def test_bfloat16_is_joined_in_float32():
    """Sums over eight rounds in bfloat16 would be off by several units of its last place."""
    assert compare((256,), 8, dtype=torch.bfloat16) < 2**-7


def test_the_next_block_is_on_its_way_while_one_is_computed(monkeypatch):
    def work(rank, ring):
        forward, backward = attention_block.block_forward, attention_block.block_backward

        def noted(function, name):
            return lambda *args: (ring.events.append(name), function(*args))[1]

        local.forward, local.backward = noted(forward, "forward"), noted(backward, "backward")
        q, k, v = (torch.randn(4, 2, 8).requires_grad_() for _ in range(3))
        ring_attention(q, k, v, ring_layout(np.array([0, 12]), rank, 3), 1.0, ring).sum().backward()

    local = threading.local()
    module = "mindspeed_asyncflow.platforms.ring"
    monkeypatch.setattr(f"{module}.block_forward", lambda *args: local.forward(*args))
    monkeypatch.setattr(f"{module}.block_backward", lambda *args: local.backward(*args))
    _, rings = on_ring(3, work)
    for ring in rings:
        events = ring.events
        assert events[:8] == ["send", "forward", "wait", "send", "forward", "wait", "forward", "send"]
        rounds = " ".join(events[7:]).split("backward")
        # before each computation the next block leaves, and its own gradient after it
        assert [part.split() for part in rounds] == [
            ["send"],
            ["send", "wait", "send"],
            ["wait", "send", "wait"],
            ["wait", "send", "wait"],
        ]
