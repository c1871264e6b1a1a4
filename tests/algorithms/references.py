"""The formulas once more, token by token in plain Python floats, written from the papers and not from the package.

`detached`: the log-probabilities that a stop-gradient sees, so that differences in `logprobs` alone give gradients.
"""

from __future__ import annotations

import math


def loss(name, logprobs, detached, old, advantages, lengths, cfg):
    """Token losses of answers of `lengths`, one after another."""
    out, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        if length:
            out += _answer(name, *(list(x[part]) for x in (logprobs, detached, old, advantages)), cfg)
    return out


def _answer(name, logprobs, detached, old, advantages, cfg):
    n = len(logprobs)
    if name == "gspo":
        ratio = math.exp(sum(p - o for p, o in zip(logprobs, old)) / n)
        return [_clip(ratio, a, cfg) for a in advantages]
    if name == "gspo_token":
        s = math.exp(sum(d - o for d, o in zip(detached, old)) / n)
        return [_clip(s * math.exp(p - d), a, cfg) for p, d, a in zip(logprobs, detached, advantages)]
    if name == "gmpo":
        total = 0.0
        for p, o, a in zip(logprobs, old, advantages):
            x = p - o
            total += min(x, cfg.clip_high) if a > 0 else max(x, -cfg.clip_low)
        return [-math.exp(total / n) * sum(advantages) / n] * n
    return [_token(name, *each, cfg) for each in zip(logprobs, detached, old, advantages)]


def _token(name, p, d, o, a, cfg):
    ratio, fixed = math.exp(p - o), math.exp(d - o)
    if name == "ppo_clip":
        value = _clip(ratio, a, cfg)
        return min(value, -cfg.dual_clip * a) if a < 0 else value
    if name == "cispo":
        return -min(max(fixed, 1 - cfg.clip_low), 1 + cfg.clip_high) * a * p
    if name == "sapo":
        tau = cfg.sapo_tau_positive if a > 0 else cfg.sapo_tau_negative
        return -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if name == "dppo_tv":
        moved = math.exp(d) - math.exp(o)
        if (moved > cfg.clip_high) if a > 0 else (moved < -cfg.clip_low):
            return 0.0
        return -min(fixed, cfg.dppo_cap) * a * p
    assert name == "reinforce"
    return -a * p


def _clip(ratio, a, cfg):
    return -min(ratio * a, min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high) * a)


def weights(cfg, pi, old, mu, advantages, lags, lengths, bypass):
    """(weights, kept) of all tokens, as the settings of a correction say."""
    out, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        rows = [list(x[part]) for x in (pi, old, mu, advantages, lags)]
        out += [_weight(cfg, rows, t, bypass) for t in range(length)]
    return [w for w, _ in out], [kept for _, kept in out]


def _weight(cfg, rows, t, bypass):
    pi, old, mu, advantages, lags = rows
    weight, kept = 1.0, True
    if cfg.weight != "off":
        raw = _ratio(cfg.weight, old, mu, t)
        weight = min(max(raw, cfg.floor), cfg.cap)
        if cfg.beyond == "zero" and weight != raw:
            kept = False
    seen = pi if bypass else old
    if cfg.reject == "kpop":
        p, q = math.exp(seen[t]), math.exp(mu[t])
        forward = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        backward = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        kept = kept and max(forward, backward) <= cfg.reject_high
    elif cfg.reject != "off":
        kept = kept and cfg.reject_low <= _ratio(cfg.reject, seen, mu, t) <= cfg.reject_high
    if cfg.opsm_delta is not None and advantages[t] < 0:
        kept = kept and sum(m - p for m, p in zip(mu, pi)) / len(pi) <= cfg.opsm_delta
    return (weight * max(1.0, lags[t]) ** -cfg.stale_power if kept else 0.0), kept


def _ratio(level, above, below, t):
    each = [a - b for a, b in zip(above, below)]
    return math.exp({"token": each[t], "sequence": sum(each), "geometric": sum(each) / len(each)}[level])


def aggregate(mode, losses, counted, lengths, horizon):
    """One number of all token losses; tokens that are not `counted` are in no denominator."""
    answers, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        if any(counted[part]):
            answers.append([loss for loss, c in zip(losses[part], counted[part]) if c])
    if not answers:
        return 0.0
    total = sum(sum(a) for a in answers)
    if mode == "token-sum":
        return total
    if mode == "token-mean":
        return total / sum(len(a) for a in answers)
    if mode == "seq-mean-token-mean":
        return sum(sum(a) / len(a) for a in answers) / len(answers)
    return total / len(answers) / (horizon if mode == "seq-mean-token-sum-norm" else 1)


def kl(name, p, ref):
    d = p - ref
    return d * d / 2 if name == "k2" else math.exp(-d) + d - 1


def advantages(name, rewards, eps):
    """Of one group, by sums written out."""
    n = len(rewards)
    if n == 1 or max(rewards) == min(rewards):
        return [0.0] * n
    mean = sum(rewards) / n
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
    others = [(sum(rewards) - r) / (n - 1) for r in rewards]
    return {
        "grpo": [(r - mean) / (deviation + eps) for r in rewards],
        "grpo_batch": [r - mean for r in rewards],
        "grpo_loo": [(r - o) / (deviation + eps) for r, o in zip(rewards, others)],
        "dr_grpo": [r - mean for r in rewards],
        "rloo": [r - o for r, o in zip(rewards, others)],
        "maxrl": [r / (mean + eps) - mean / (mean + eps) for r in rewards],
        "reinforce_pp_baseline": [r - mean for r in rewards],
    }[name]
