"""The whole loss against formulas written token by token, whatever batch, cut, order and padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.algorithms.aggregate import loss_denominator
from mindspeed_asyncflow.algorithms.losses import LOSSES
from mindspeed_asyncflow.algorithms.policy_loss import make_policy_loss
from mindspeed_asyncflow.config.algorithm import AGGREGATIONS
from mindspeed_asyncflow.config.schema import AlgorithmConfig, CorrectionConfig
from mindspeed_asyncflow.observe.metrics import merge_parts
from tests.algorithms import references
from tests.algorithms.cases import micro_batch, on_tokens

HORIZON = 7
CORRECTIONS = [
    CorrectionConfig(),
    CorrectionConfig(weight="token", cap=1.4, floor=0.6),
    CorrectionConfig(weight="token", cap=1.4, floor=0.6, beyond="zero", rejected="leave_out"),
    CorrectionConfig(weight="sequence", cap=2.0, beyond="zero"),
    CorrectionConfig(weight="geometric", cap=1.1, reject="kpop", reject_high=0.2),
    CorrectionConfig(reject="sequence", reject_low=0.4, reject_high=2.5, rejected="leave_out"),
    CorrectionConfig(reject="geometric", reject_low=0.8, reject_high=1.2, opsm_delta=0.1),
    CorrectionConfig(reject="token", reject_low=0.5, reject_high=1.5, stale_power=0.5, rejected="leave_out"),
]


class Batch:
    """Random answers, some of their tokens masked, with what the reference says of them."""

    def __init__(self, seed, lengths, cfg, how):
        rng = np.random.default_rng(seed)
        self.lengths, self.cfg, self.how = lengths, cfg, how
        n = sum(lengths)
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.pi, self.mu, self.ref = (-rng.random(n) * 1.5 - 0.05 for _ in range(3))
        self.mu = self.pi + (self.mu - self.pi) * 0.5
        self.advantages = rng.normal(size=len(lengths))
        self.lags = rng.integers(0, 4, n).astype(float)
        self.mask = (rng.random(n) < 0.8).astype(float)

    def run(self, order, prompt):
        """(loss sum, gradient of all tokens, parts) of the answers `order` in one micro-batch."""
        batch = micro_batch(self.lengths, self.advantages, self.mu, self.mask, self.ref, order, prompt)
        where = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in order])
        where = where[self.mask[where] > 0]
        trained = batch.loss_mask > 0
        lags = np.zeros(len(trained))
        lags[trained] = self.lags[where]
        batch = type(batch)(**{**{f: getattr(batch, f) for f in batch.__slots__}, "lags": lags})
        logprobs = on_tokens(batch, self.pi[where], fill=float("nan")).requires_grad_()
        loss, parts = make_policy_loss(self.cfg, self.how)(logprobs, logprobs.detach(), batch)
        loss.backward()
        gradient = np.zeros(len(self.pi))
        gradient[where] = logprobs.grad[trained].numpy()
        return loss.item(), gradient, {k: float(v) for k, v in parts.items()}

    def old(self, pi):
        if self.cfg.loss == "reinforce" or self.cfg.proximal == "current":
            return pi
        if self.cfg.proximal == "rollout":
            return self.mu
        alpha = [(lag - 1) / lag if lag else 1.0 for lag in self.lags]
        return np.array([m + a * (p - m) for m, a, p in zip(self.mu, alpha, pi)])

    def expected(self, pi):
        """The aggregate by the formulas alone; `pi` differs from self.pi only to find gradients."""
        cfg, t = self.cfg, self.mask > 0
        lengths = [int(self.mask[a:b].sum()) for a, b in zip(self.starts, self.starts[1:])]
        old = self.old(self.pi)
        adv = np.repeat(self.advantages, self.lengths)
        values = [x[t] for x in (pi, self.pi, old, adv)]
        losses = references.loss(cfg.loss, *values, lengths, cfg)
        bypass = cfg.proximal == "rollout" and cfg.loss != "reinforce"
        weights, kept = references.weights(
            self.how, self.pi[t], old[t], self.mu[t], adv[t], self.lags[t], lengths, bypass
        )
        losses = [loss * w for loss, w in zip(losses, weights)]
        if cfg.kl_coef:
            for i, (p, o, r) in enumerate(zip(pi[t], old[t], self.ref[t])):
                losses[i] += cfg.kl_coef * references.kl(cfg.kl_type, p, r) * (np.exp(p - o) if cfg.kl_weighted else 1)
        counted = kept if self.how.rejected == "leave_out" else [True] * len(losses)
        return references.aggregate(cfg.aggregation, losses, counted, lengths, HORIZON)


def total(cfg, parts):
    counted = parts["actor/loss_tokens_count"], parts["actor/loss_sequences_count"]
    return loss_denominator(cfg.aggregation, *counted, HORIZON)


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    aggregation=st.sampled_from(AGGREGATIONS),
    proximal=st.sampled_from(["rollout", "current", "log_linear"]),
    how=st.sampled_from(CORRECTIONS),
    kl=st.sampled_from([(0.0, "k3", False), (0.1, "k2", False), (0.1, "k3", True)]),
    data=st.data(),
)
def test_loss_and_gradient_equal_the_formulas_in_every_cut(loss, seed, lengths, aggregation, proximal, how, kl, data):
    """B06, B09: any micro-batches, ranks, order and prompt lengths; the whole, and each answer alone."""
    if proximal == "rollout" and loss != "reinforce" and how.weight != "off":
        proximal = "current"  # the other is refused by the configuration
    cfg = AlgorithmConfig(
        loss=loss,
        aggregation=aggregation,
        proximal=proximal,
        clip_low=0.3,
        clip_high=0.4,
        dual_clip=3.0 if loss == "ppo_clip" else None,
        loss_horizon=HORIZON,
        kl_coef=kl[0],
        kl_type=kl[1],
        kl_weighted=kl[2],
    )
    batch = Batch(seed, lengths, cfg, how)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(1, len(lengths) - 1))
    found = []
    for parts_of in ([list(range(len(lengths)))], [order[:cut], order[cut:]], [[i] for i in order]):
        results = [batch.run(part, prompt=1 + len(parts_of)) for part in parts_of]
        metrics = merge_parts([r[2] for r in results])
        scale = total(cfg, metrics)
        assert metrics["actor/loss_sum"] / scale == pytest.approx(sum(r[0] for r in results) / scale, abs=1e-6)
        found.append((sum(r[0] for r in results) / scale, sum(r[1] for r in results) / scale, metrics))
    expected = batch.expected(batch.pi)
    for value, gradient, metrics in found:
        assert value == pytest.approx(expected, abs=1e-6)
        np.testing.assert_allclose(gradient, found[0][1], atol=1e-6)
        assert metrics == pytest.approx(found[0][2], abs=1e-6)
    token = data.draw(st.integers(0, len(batch.pi) - 1))
    step = np.zeros(len(batch.pi))
    step[token] = 1e-6
    slope = (batch.expected(batch.pi + step) - batch.expected(batch.pi - step)) / 2e-6
    assert found[0][1][token] == pytest.approx(slope, abs=1e-5)
