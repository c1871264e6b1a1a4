"""The vocabulary operator in torch: against float64, over shards, chunk by chunk, and as torch sees it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_kernels import exactly
from mindspeed_asyncflow.errors import EngineError
from mindspeed_asyncflow.platforms import vocabulary_torch
from mindspeed_asyncflow.platforms.vocabulary import (
    logprob_and_entropy,
    rebased,
    vocabulary_stats,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def cases(draw):
    """(logits [N, V], targets, temperature), logits of widely different sizes"""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale, shift = draw(st.sampled_from([0.1, 1.0, 8.0, 30.0])), draw(st.sampled_from([0.0, -100.0, 1000.0]))
    logits = (torch.randn(rows, width, generator=generator) * scale + shift).to(draw(DTYPES))
    targets = torch.randint(0, width, (rows,), generator=generator)
    return logits, targets, draw(st.sampled_from([0.05, 0.7, 1.0, 3.0]))


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Chunks of 50 logits, so that rows are cut into several."""
    before, vocabulary_torch.CHUNK_ON_CPU = vocabulary_torch.CHUNK_ON_CPU, 50
    yield
    vocabulary_torch.CHUNK_ON_CPU = before


@given(cases(), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_values_agree_with_float64_however_the_vocabulary_is_cut(case, shards):
    logits, targets, temperature = case
    found = exactly.over_shards(exactly.cut(logits, shards), targets, temperature, logits.shape[1])
    exactly.assert_values(found, exactly.in_float64(logits, targets, temperature))


@given(cases(), st.integers(1, 4), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_gradients_agree_with_float64_however_the_vocabulary_is_cut(case, shards, by_logprob, by_entropy):
    logits, targets, temperature = case
    logits = logits.float()  # the rounding of the result is another test's
    slopes = torch.linspace(-1, 1, 2 * len(targets)).view(2, -1) * torch.tensor([[by_logprob], [by_entropy]])
    found = exactly.gradients(exactly.cut(logits, shards), targets, temperature, logits.shape[1], slopes)
    wanted = exactly.gradients_in_float64(logits, targets, temperature, slopes)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=2e-6 / min(temperature, 1.0))


@given(cases())
@settings(deadline=None, max_examples=50)
def test_the_gradient_is_rounded_once_to_the_type_of_the_logits(case):
    logits, targets, temperature = case
    leaf, wide = logits.clone().requires_grad_(), logits.float().requires_grad_()
    for x in (leaf, wide):
        stats = vocabulary_stats(x, targets, temperature=temperature)
        logprob, entropy = logprob_and_entropy(rebased(stats, stats.top, temperature), stats.top, temperature)
        (logprob + 0.1 * entropy).sum().backward()
    assert leaf.grad.dtype == logits.dtype
    torch.testing.assert_close(leaf.grad, wide.grad.to(logits.dtype))


@given(cases(), st.sampled_from([4.0, -64.0]))
@settings(deadline=None, max_examples=50)
def test_a_constant_on_all_logits_changes_nothing(case, constant):
    logits, targets, _ = case
    logits = logits.float().round()  # so that the sum is exact
    for a, b in zip(*(exactly.over_shards([x], targets, 1.0, x.shape[1]) for x in (logits, logits + constant))):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@given(cases())
@settings(deadline=None, max_examples=50)
def test_a_shard_of_padding_adds_nothing(case):
    logits, targets, temperature = case
    stats = vocabulary_stats(logits, targets, temperature=temperature)
    padding = vocabulary_stats(logits, targets, first=99, live=0, temperature=temperature)
    top = torch.maximum(stats.top, padding.top)
    own, none = (rebased(part, top, temperature) for part in (stats, padding))
    assert all(torch.equal(a + b, a) for a, b in zip(own, none))
    assert all(torch.isfinite(part).all() for part in none)


def test_likely_and_unlikely_tokens_of_large_logits_stay_exact():
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    for target, wanted in enumerate((0.0, -1e4, -2e4)):
        stats = vocabulary_stats(logits, torch.tensor([target]))
        logprob, entropy = logprob_and_entropy(rebased(stats, stats.top, 1.0), stats.top, 1.0)
        assert (float(logprob), float(entropy)) == (wanted, 0.0)


@pytest.mark.slow
def test_torch_finds_both_operators_well_formed():
    logits = torch.randn(4, 9, requires_grad=True)
    targets = torch.tensor([0, 8, 3, 20])  # 20 lies on another shard
    stats = torch.ops.asyncflow.vocabulary_stats.default
    for live in (9, 7, 0):
        torch.library.opcheck(stats, (logits, targets, 0, live, 0.7))
    slopes = [torch.randn(4) for _ in range(3)]
    checks = ("test_schema", "test_faketensor")  # it has no gradient itself
    for by_weighted in (slopes[1], None):
        arguments = (logits.detach(), targets, torch.randn(4), slopes[0], by_weighted, slopes[2], 0, 9, 0.7)
        torch.library.opcheck(torch.ops.asyncflow.vocabulary_gradient.default, arguments, test_utils=checks)


def test_shapes_and_types_are_known_without_data():
    logits, targets = torch.empty(3, 7, dtype=torch.bfloat16, device="meta"), torch.empty(3, device="meta").long()
    stats = vocabulary_stats(logits, targets)
    assert [(part.shape, part.dtype) for part in stats] == [((3,), torch.float32)] * 4


def test_logits_and_strangers_memory_are_left_as_they_were():
    wide = torch.randn(5, 12)
    before = wide.clone()
    logits = wide[:, 2:9].requires_grad_()
    found = exactly.over_shards([logits], torch.tensor([0, 1, 2, 3, 6]), 0.5, 5)
    sum(part.sum() for part in found).backward()
    assert torch.equal(wide.detach(), before)


def test_only_the_logits_are_kept_for_the_backward_pass():
    logits, kept = torch.randn(6, 40).bfloat16().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        exactly.over_shards([logits], torch.zeros(6, dtype=torch.int64), 1.0, 40)
    large = [t for t in kept if t.numel() > 6]
    assert {t.data_ptr() for t in large} == {logits.data_ptr()}


def test_an_entropy_outside_the_loss_costs_nothing(monkeypatch):
    seen = []
    plain = vocabulary_torch.gradient
    monkeypatch.setattr(vocabulary_torch, "gradient", lambda *args: seen.append(args[4]) or plain(*args))
    logits = torch.randn(2, 5, requires_grad=True)
    for entropy_weight, absent in ((0, True), (1, False)):
        logprob, entropy = exactly.over_shards([logits], torch.tensor([1, 2]), 1.0, 5)
        (logprob.sum() + entropy.sum() if entropy_weight else logprob.sum()).backward()
        assert (seen.pop() is None) == absent


@pytest.mark.parametrize(
    "options, words",
    [
        ({"live": 6}, "6 live columns"),
        ({"live": -1}, "-1 live columns"),
        ({"temperature": 0.0}, "temperature .* not 0.0"),
        ({"temperature": float("nan")}, "not nan"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, words):
    with pytest.raises(EngineError, match=words):
        vocabulary_stats(torch.zeros(2, 5), torch.tensor([0, 1]), **options)
    with pytest.raises(EngineError, match=r"targets \[3\]"):
        vocabulary_stats(torch.zeros(2, 5), torch.tensor([0, 1, 2]))
