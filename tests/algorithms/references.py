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
