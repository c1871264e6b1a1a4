"""Which settings of the training mathematics fit together: advantages, losses, corrections, KL and critic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mindspeed_asyncflow.config.schema import Config

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]

WITHOUT_GROUPS = ("gae", "reinforce_pp")  # advantages that need no second answer to a prompt
OF_ANSWERS = {"gspo": "GSPO", "gmpo": "GMPO", "sapo": "SAPO"}  # published with seq-mean-token-mean
NO_RATIO = ("reinforce",)
CLIPPED = ("ppo_clip", "gspo", "gspo_token", "gmpo")


def rules(c: Config) -> Iterator[Raw]:
    yield from _advantages(c)
    yield from _losses(c)
    yield from _kl(c)
    yield from _correction(c)
    yield from _overlong(c)


def _overlong(c: Config) -> Iterator[Raw]:
    buffer, longest = c.reward.overlong_buffer, c.rollout.max_new_tokens
    if buffer is not None and buffer > longest:
        yield (
            "error",
            ("reward.overlong_buffer", "rollout.max_new_tokens"),
            f"a buffer of {buffer} tokens before {longest} punishes every answer; make it {longest} or less",
        )


def _advantages(c: Config) -> Iterator[Raw]:
    a, w = c.algorithm, c.workflow
    if a.group_size < 2 and a.advantage not in WITHOUT_GROUPS:
        yield (
            "error",
            ("algorithm.group_size", "algorithm.advantage"),
            f"{a.advantage} compares the answers of one prompt with each other, so one answer never learns; "
            "set algorithm.group_size to 2 or more",
        )
    if a.group_size < 2 and a.dynamic_sampling:
        yield (
            "error",
            ("algorithm.dynamic_sampling", "algorithm.group_size"),
            "one answer per prompt never differs from itself: every group would be dropped; "
            "set dynamic_sampling to false, or group_size to 2 or more",
        )
    if a.batch_level and w.max_lag > 0 and not w.lend and w.schedule == "separated":
        yield (
            "warning",
            ("algorithm.advantage", "algorithm.whiten"),
            f"{a.advantage} normalises over the whole batch, so a step begins when its last answer is scored; "
            "an advantage inside groups (grpo, rloo) trains the first answers while the last are generated",
        )


def _losses(c: Config) -> Iterator[Raw]:
    a = c.algorithm
    if a.loss in CLIPPED and a.clip_high < a.clip_low:
        yield "warning", ("algorithm.clip_high",), "clip_high below clip_low lets the policy only unlearn; usual is >="
    if a.loss in OF_ANSWERS and a.aggregation != "seq-mean-token-mean":
        yield (
            "warning",
            ("algorithm.aggregation", "algorithm.loss"),
            f"{OF_ANSWERS[a.loss]} is published with seq-mean-token-mean; with {a.aggregation} long answers weigh more"
            "; set aggregation to seq-mean-token-mean",
        )
    if a.loss in ("gspo", "gspo_token") and a.clip_high > 0.05:
        yield (
            "warning",
            ("algorithm.clip_high", "algorithm.loss"),
            f"ratios of whole answers are close to 1: {a.clip_high} never clips; published are 3e-4 and 4e-4; lower it",
        )
    if a.aggregation == "seq-mean-token-sum-norm" and a.loss_horizon is None:
        yield (
            "error",
            ("algorithm.loss_horizon", "algorithm.aggregation"),
            "seq-mean-token-sum-norm divides by a constant: set loss_horizon, usually to rollout.max_new_tokens "
            f"({c.rollout.max_new_tokens})",
        )
    if a.aggregation == "token-sum":
        yield (
            "warning",
            ("algorithm.aggregation",),
            "token-sum grows with the batch, and so does the gradient: trainer.lr and grad_clip must fit",
        )


def _kl(c: Config) -> Iterator[Raw]:
    a = c.algorithm
    if a.kl_coef == 0:
        return
    if a.kl_in == "loss" and a.kl_type == "k1":
        yield (
            "error",
            ("algorithm.kl_type", "algorithm.kl_in"),
            "k1 as a loss has a gradient without the reference in it; use k2, k3 or k3+, or kl_in reward",
        )
    if a.kl_in == "reward" and a.kl_type == "k3+":
        yield (
            "error",
            ("algorithm.kl_type", "algorithm.kl_in"),
            "k3+ is a gradient of k2; in the reward use k1, k2 or k3",
        )
    if a.kl_in == "reward" and a.kl_weighted:
        yield (
            "error",
            ("algorithm.kl_weighted", "algorithm.kl_in"),
            "weighs a loss term; the KL is in the reward; set it to false",
        )


def _correction(c: Config) -> Iterator[Raw]:
    a, w, k = c.algorithm, c.workflow, c.correction
    corrected = k.weight != "off" or k.reject != "off" or k.opsm_delta is not None
    if w.max_lag > 0 and a.loss in NO_RATIO and not corrected:
        yield (
            "warning",
            ("algorithm.loss", "correction.weight"),
            f"answers may be {w.max_lag} versions old and nothing corrects for it; set correction.weight to token",
        )
    if k.weight != "off" and a.proximal == "rollout" and a.loss not in NO_RATIO:
        yield (
            "error",
            ("correction.weight", "algorithm.proximal"),
            "the weight is proximal / rollout policy, and these are the same; set proximal to current or log_linear",
        )
    if k.floor > k.cap:
        yield (
            "error",
            ("correction.floor", "correction.cap"),
            f"the smallest weight {k.floor:g} is above the largest; lower it",
        )
    if k.reject not in ("off", "kpop") and not k.reject_low <= 1 <= k.reject_high:
        yield (
            "error",
            ("correction.reject_low", "correction.reject_high"),
            f"equal policies have the ratio 1, which [{k.reject_low:g}, {k.reject_high:g}] does not hold: every answer "
            "would be masked; set them below and above 1",
        )
