"""Settings of the training mathematics. Formulas, sources and what other toolkits call them: docs/algorithms.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mindspeed_asyncflow.config.section import Section

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")


class AlgorithmConfig(Section):
    advantage: Literal[
        "grpo", "grpo_batch", "grpo_loo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "gae"
    ] = Field("grpo", description="How rewards become advantages; gae needs no groups and trains a critic (PPO).")
    group_size: int = Field(8, ge=1, description="Answers per prompt.")
    dynamic_sampling: bool = Field(
        False, description="Groups whose scores are all equal are dropped and replaced (DAPO)."
    )
    advantage_eps: float = Field(1e-6, ge=0, description="Added to the standard deviation, or to the mean in maxrl.")
    whiten: bool = Field(
        True,
        description="gae, reinforce_pp and reinforce_pp_baseline: advantages get mean 0 and variance 1 over all "
        "trained tokens of the global batch.",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token: gae and reinforce_pp.")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="Lambda of gae.")
    loss: Literal["ppo_clip", "gspo", "gspo_token", "gmpo", "cispo", "sapo", "dppo_tv", "reinforce"] = Field(
        "ppo_clip", description="Policy loss."
    )
    clip_low: float = Field(
        0.2, ge=0, le=1, description="Ratio is clipped below 1 - clip_low; gmpo: log-ratio below -clip_low."
    )
    clip_high: float = Field(
        0.28, ge=0, description="Ratio is clipped above 1 + clip_high; gmpo: log-ratio above clip_high."
    )
    dual_clip: float | None = Field(None, gt=1, description="Bound of the loss for negative advantages; off if null.")
    sapo_tau_positive: float = Field(1.0, gt=0, description="Temperature of sapo's gate, positive advantages.")
    sapo_tau_negative: float = Field(1.05, gt=0, description="Temperature of sapo's gate, negative advantages.")
    dppo_cap: float = Field(20.0, gt=0, description="Ratio is capped here in dppo_tv.")
    proximal: Literal["rollout", "current", "log_linear"] = Field(
        "rollout",
        description="Policy that the PPO ratio refers to. rollout: the one that sampled (bypass); current: the one "
        "that is trained, as it is before the step (recomputed); log_linear: between the two by each token's lag.",
    )
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"
    ] = Field("token-mean", description="How token losses become one number, over the global batch.")
    loss_horizon: int | None = Field(
        None, ge=1, description="Constant that seq-mean-token-sum-norm divides by, usually rollout.max_new_tokens."
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL term to the reference; 0: no reference.")
    kl_type: Literal["k1", "k2", "k3", "k3+"] = Field(
        "k3", description="KL estimator; k3+: value of k3, gradient of k2. k1 is for kl_in reward only."
    )
    kl_in: Literal["loss", "reward"] = Field("loss", description="The KL term is part of the loss or of the reward.")
    kl_weighted: bool = Field(False, description="The KL loss of a token is multiplied by pi / pi_old.")
    mask_truncated: bool = Field(
        False, description="Answers cut off at rollout.max_new_tokens are not trained, nor counted in denominators."
    )

    @property
    def with_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def kl_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def token_level(self) -> bool:
        """Whether advantages differ from token to token of one answer."""
        return self.advantage == "gae" or (self.advantage == "reinforce_pp" and (self.kl_reward or self.gamma < 1))

    @property
    def batch_level(self) -> bool:
        """Whether advantages depend on the whole global batch, so that a step waits for all of it."""
        return self.advantage == "grpo_batch" or (
            self.whiten and self.advantage in ("gae", "reinforce_pp", "reinforce_pp_baseline")
        )


class CorrectionConfig(Section):
    """Off-policy correction: weights and masks from the ratio proximal / rollout (`algorithm.proximal` rollout: from
    current / rollout, masks only)."""

    weight: Literal["off", "token", "sequence", "geometric"] = Field(
        "off",
        description="Importance weight of the loss, from the ratio of each token, of all tokens of its answer "
        "(product) or their geometric mean.",
    )
    cap: float = Field(2.0, gt=0, description="Largest weight.")
    floor: float = Field(0.0, ge=0, description="Smallest weight.")
    beyond: Literal["clamp", "zero"] = Field(
        "clamp", description="A weight outside [floor, cap] is set to the bound (TIS), or to 0 (MIS, IcePop)."
    )
    reject: Literal["off", "token", "sequence", "geometric", "kpop"] = Field(
        "off",
        description="Tokens or answers whose ratio is outside [reject_low, reject_high] are masked; kpop: tokens whose "
        "larger Bernoulli KL is above reject_high.",
    )
    reject_low: float = Field(0.5, ge=0, description="See reject.")
    reject_high: float = Field(2.0, gt=0, description="See reject.")
    opsm_delta: float | None = Field(
        None,
        description="Answers with negative advantage are masked where the mean of log rollout - log current is above "
        "it; off if null.",
    )
    stale_power: float = Field(
        0.0, ge=0, description="Tokens of lag n > 0 weigh n to the power of minus this; 0: all weigh the same."
    )
    rejected: Literal["count", "leave_out"] = Field(
        "count", description="Whether masked tokens and answers count in the loss denominator."
    )


class CriticConfig(Section):
    """Used with `algorithm.advantage` gae. The critic starts from `model.source`, its value head at 0. From the trainer
    it has what is not named here: parallel sizes, `lr_decay`, `betas`, `weight_decay`, `micro_batch_tokens`."""

    lr: float = Field(1e-3, gt=0, description="Peak learning rate of the critic.")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises from 0.")
    value_clip: float | None = Field(
        0.5, gt=0, description="Values move at most so far from what they were in one step; off if null."
    )
    warmup_steps: int = Field(0, ge=0, description="First steps in which only the critic learns.")
    grad_clip: float = Field(1.0, gt=0, description="Gradient norm of the critic is clipped here.")
    threads: int = Field(1, ge=1, description="CPU threads of each critic rank.")
