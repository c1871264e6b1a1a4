"""The one table of metrics: each row has a name, a unit, a reducer, a definition and, where one exists, verl's name.

`docs/metrics.md` is generated from here. A new metric is one new row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reducer = Literal["mean", "sum", "max", "min", "last", "ess"]

TOKENS = "actor/tokens_count"
CRITIC_TOKENS = "critic/tokens_count"
SAMPLES = "samples_count"
GROUPS = "groups_count"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Workers send *parts* that can be merged in any order: `part` is the key of the numerator (or of the value itself)
    and `per` the key of the denominator of a mean. `last` metrics have one owner and travel under their own name.
    """

    name: str
    unit: str
    reducer: Reducer
    per: str  # "" where there is no denominator
    alias: str
    definition: str

    @property
    def part(self) -> str:
        """Key of the part. Mean: `a/b` and `a/b/mean` and `a/b_mean` -> `a/b_sum`; other reducers end in their word."""
        if self.reducer == "mean":
            stem = self.name[:-5] if self.name.endswith(("/mean", "_mean")) else self.name
            return stem + "_sum"
        if self.reducer in ("max", "min"):
            return self.name if self.name.endswith(self.reducer) else f"{self.name}_{self.reducer}"
        if self.reducer == "sum":
            return self.name if self.name.endswith(("_sum", "_count")) else self.name + "_sum"
        return self.name


_WORDS: tuple[tuple[Reducer, str], ...] = (("mean", "Mean"), ("max", "Largest"), ("min", "Smallest"))


def _three(prefix: str, unit: str, what: str, per: str, alias: str = "") -> tuple[Metric, ...]:
    return tuple(
        Metric(
            f"{prefix}/{reducer}",
            unit,
            reducer,
            per if reducer == "mean" else "",
            f"{alias}/{reducer}" if alias else "",
            f"{word} {what}",
        )
        for reducer, word in _WORDS
    )


def _timing(name: str, definition: str, alias: str = "") -> Metric:
    return Metric(f"timing_s/{name}", "s", "max", "", alias, definition + " Slowest rank or replica.")


# fmt: off
METRICS: tuple[Metric, ...] = (
    # reward
    *_three("reward", "score", "reward in the global batch: scores with length and KL punishments.", SAMPLES,
            "critic/rewards"),
    *_three("score", "score", "score of the answers that were scored during the step, without punishments.", SAMPLES,
            "critic/score"),
    Metric("scorer/*", "score", "last", "", "",
           "Mean score of one of `reward.scorers`, by its name, before its weight."),
    Metric("reward/std", "score", "last", "", "",
           "Standard deviation of the reward over the global batch."),
    Metric("reward/zero_std_fraction", "share", "mean", GROUPS, "",
           "Share of prompt groups whose answers all scored the same: they give no gradient."),
    Metric("reward/abstained_fraction", "share", "mean", SAMPLES, "",
           "Share of answers that the scorer gave no score."),
    # policy
    Metric("actor/loss", "1", "last", "", "",
           "The number whose gradient is taken: policy loss and KL term, aggregated as `algorithm.aggregation` says."),
    Metric("actor/loss_sum", "1", "sum", "", "",
           "The same before it is divided by its denominator."),
    Metric("actor/pg_loss", "1", "mean", TOKENS, "actor/pg_loss",
           "Policy loss without the KL term, mean over trained response tokens."),
    Metric("actor/kl_loss", "nat", "mean", TOKENS, "actor/kl_loss",
           "KL estimate to the reference policy per trained response token, before `algorithm.kl_coef`."),
    Metric("actor/entropy", "nat", "mean", TOKENS, "actor/entropy",
           "Entropy of the policy per trained response token."),
    Metric("actor/ppo_kl", "nat", "mean", TOKENS, "actor/ppo_kl",
           "Mean of -(log pi - log pi_old) per trained response token."),
    Metric("actor/pg_clipfrac", "share", "mean", TOKENS, "actor/pg_clipfrac",
           "Share of trained response tokens where the clipped term wins."),
    Metric("actor/pg_clipfrac_low", "share", "mean", TOKENS, "",
           "Part of `actor/pg_clipfrac` at the lower bound."),
    Metric("actor/pg_clipfrac_high", "share", "mean", TOKENS, "",
           "Part of `actor/pg_clipfrac` at the upper bound."),
    Metric("actor/pg_clipfrac_lower", "share", "mean", TOKENS, "actor/pg_clipfrac_lower",
           "Share of trained response tokens bounded by `algorithm.dual_clip`."),
    Metric("actor/ratio_mean", "1", "mean", TOKENS, "",
           "Mean of pi / pi_old per trained response token."),
    Metric("actor/ratio_max", "1", "max", "", "",
           "Largest pi / pi_old of a trained response token."),
    Metric("actor/ratio_min", "1", "min", "", "",
           "Smallest pi / pi_old of a trained response token."),
    Metric("actor/grad_norm", "1", "last", "", "actor/grad_norm",
           "Gradient norm before clipping."),
    Metric("actor/lr", "1", "last", "", "actor/lr",
           "Learning rate of this step."),
    Metric(TOKENS, "tokens", "sum", "", "",
           "Trained response tokens of the global batch."),
    Metric("actor/loss_tokens_count", "tokens", "sum", "", "",
           "Tokens that the loss denominator counts: trained ones, less those that `correction.rejected` leaves out."),
    Metric("actor/loss_sequences_count", "answers", "sum", "", "",
           "Answers that the loss denominator counts: those with such a token."),
    Metric(SAMPLES, "answers", "sum", "", "",
           "Answers in the global batch."),
    Metric(GROUPS, "groups", "sum", "", "",
           "Prompt groups in the global batch."),
    # trainer against rollout
    Metric("rollout_corr/kl", "nat", "mean", TOKENS, "rollout_corr/kl",
           "Mean of log mu - log pi per trained response token; mu sampled the token, pi is the trainer that "
           "consumes it. Grows with lag."),
    Metric("rollout_corr/k3_kl", "nat", "mean", TOKENS, "rollout_corr/k3_kl",
           "Mean of exp(x) - x - 1 with x = log pi - log mu."),
    Metric("rollout_corr/abs_diff_mean", "nat", "mean", TOKENS, "",
           "Mean of |log pi - log mu|."),
    Metric("rollout_corr/abs_diff_max", "nat", "max", "", "",
           "Largest |log pi - log mu| of a trained response token."),
    Metric("rollout_corr/is_mean", "1", "mean", TOKENS, "rollout_corr/rollout_is_mean",
           "Mean importance weight pi / mu after truncation."),
    Metric("rollout_corr/is_max", "1", "max", "", "rollout_corr/rollout_is_max",
           "Largest importance weight after truncation."),
    Metric("rollout_corr/is_min", "1", "min", "", "rollout_corr/rollout_is_min",
           "Smallest importance weight after truncation."),
    Metric("rollout_corr/is_sq_mean", "1", "mean", TOKENS, "",
           "Mean squared importance weight after truncation."),
    Metric("rollout_corr/is_clipfrac", "share", "mean", TOKENS, "rollout_corr/rollout_is_ratio_fraction_high",
           "Share of tokens whose pi / mu is above `correction.cap` (2 where no weight is set)."),
    Metric("rollout_corr/is_eff_sample_size", "share", "ess", TOKENS, "rollout_corr/rollout_is_eff_sample_size",
           "(sum w)^2 / (n sum w^2) over the truncated weights w of n tokens: 1 means that all count alike."),
    Metric("rollout_corr/chi2_token", "1", "mean", TOKENS, "rollout_corr/chi2_token",
           "Mean of (pi / mu)^2 - 1: what an importance weight adds to the variance of a gradient."),
    Metric("rollout_corr/weight_outside", "share", "mean", TOKENS, "",
           "Share of tokens whose weight (`correction.weight`) was outside [floor, cap]."),
    Metric("rollout_corr/weight_log_raw", "nat", "mean", TOKENS, "",
           "Mean logarithm of the weight before it was bounded."),
    Metric("rollout_corr/rejected", "share", "mean", TOKENS, "rollout_corr/rollout_rs_masked_fraction",
           "Share of tokens that `correction.reject` masked."),
    Metric("rollout_corr/opsm", "share", "mean", TOKENS, "opsm_clipfrac",
           "Share of tokens in answers that `correction.opsm_delta` masked."),
    Metric("rollout_corr/masked", "share", "mean", TOKENS, "",
           "Share of tokens that a correction gave the weight 0, whatever its name."),
    Metric("rollout_corr/stale_weight_mean", "1", "mean", TOKENS, "",
           "Mean weight by lag (`correction.stale_power`)."),
    # critic
    Metric("critic/vf_loss", "1", "mean", CRITIC_TOKENS, "critic/vf_loss",
           "Value loss per trained response token."),
    Metric("critic/vf_clipfrac", "share", "mean", CRITIC_TOKENS, "critic/vf_clipfrac",
           "Share of tokens where the clipped value is what counts."),
    Metric("critic/values_mean", "score", "mean", CRITIC_TOKENS, "critic/values/mean",
           "Mean value of trained response tokens."),
    Metric("critic/returns_mean", "score", "mean", CRITIC_TOKENS, "critic/returns/mean",
           "Mean return of trained response tokens."),
    Metric("critic/returns_sq_mean", "1", "mean", CRITIC_TOKENS, "",
           "Mean squared return."),
    Metric("critic/residual_mean", "score", "mean", CRITIC_TOKENS, "",
           "Mean of return minus the value when the answer was scored."),
    Metric("critic/residual_sq_mean", "1", "mean", CRITIC_TOKENS, "",
           "Mean square of the same."),
    Metric("critic/vf_explained_var", "share", "last", "", "critic/vf_explained_var",
           "1 - variance of return minus value / variance of the return: 1 is a perfect critic, 0 a constant one."),
    Metric("critic/grad_norm", "1", "last", "", "critic/grad_norm",
           "Gradient norm of the critic before clipping."),
    Metric("critic/lr", "1", "last", "", "critic/lr",
           "Learning rate of the critic."),
    Metric(CRITIC_TOKENS, "tokens", "sum", "", "",
           "Response tokens that the critic was trained on."),
    _timing("values", "Values and advantages of the critic.", "timing_s/values"),
    # staleness
    Metric("staleness/mean", "versions", "mean", SAMPLES, "training/off_policy/trajectory_staleness/mean",
           "Trainer version that consumes an answer minus the version that sampled its newest token."),
    Metric("staleness/max", "versions", "max", "", "training/off_policy/trajectory_staleness/max",
           "Largest such lag in the global batch."),
    Metric("staleness/worst_mean", "versions", "mean", SAMPLES, "training/off_policy/trajectory_staleness_worst/mean",
           "The same lag, counted from the oldest token."),
    Metric("staleness/worst_max", "versions", "max", "", "training/off_policy/trajectory_staleness_worst/max",
           "Largest lag counted from the oldest token; `workflow.max_lag` bounds this one."),
    Metric("staleness/version_span_mean", "versions", "mean", SAMPLES, "training/off_policy/trajectory_spans/mean",
           "Policy versions inside one answer."),
    Metric("staleness/version_span_max", "versions", "max", "", "training/off_policy/trajectory_spans/max",
           "Most policy versions inside one answer."),
    # queues and idle time
    Metric("queue/rollout", "answers", "last", "", "",
           "Prompts that wait for a rollout replica when the step ends."),
    Metric("queue/reward", "answers", "last", "", "",
           "Answers that wait for a score when the step ends."),
    Metric("queue/train", "answers", "last", "", "",
           "Scored answers that wait for the trainer when the step ends. Always 0: rollout is the limit; always "
           "full: the trainer is."),
    Metric("dock/used_ratio", "share", "last", "", "tq_storage_utilization_ratio",
           "Share of the dock's shared memory that rows take at the end of the step, over all pairs."),
    Metric("dock/back_pressure_s", "s", "last", "", "",
           "Time that puts and writes have waited for room in the dock since the start."),
    Metric("dock/redelivered", "answers", "last", "", "",
           "Rows offered again since the start, after a lease ran out or a worker gave them back."),
    Metric("dock/served_by_other_pairs", "answers", "last", "", "",
           "Rows since the start that a worker's own pair did not have and another pair gave."),
    Metric("idle/trainer", "share", "last", "", "trainer/idle_ratio",
           "Share of wall time since the previous step in which the trainer had nothing to do."),
    Metric("idle/rollout", "share", "last", "", "rollouter/idle_ratio",
           "The same for rollout: neither generating nor loading weights, mean over replicas."),
    # throughput: the clock is wall time between the ends of two steps
    Metric("perf/samples_per_s", "answers/s", "last", "", "",
           "Trained answers per second of wall time."),
    Metric("perf/tokens_per_s", "tokens/s", "last", "", "",
           "Prompt and response tokens trained per second of wall time, all devices."),
    Metric("perf/tokens_per_s_per_device", "tokens/s", "last", "", "perf/throughput",
           "The same for each device of the run: trainer, critic and rollout."),
    Metric("perf/gen_tokens_per_s", "tokens/s", "last", "", "",
           "Response tokens generated per second of wall time."),
    Metric("perf/host_memory_bytes", "bytes", "last", "", "",
           "Memory in use on the driver's node, all processes."),
    _timing("step", "Wall time of the step.", "timing_s/step"),
    _timing("forward_backward", "Forward and backward passes.", "timing_s/update_actor"),
    _timing("optim_step", "Gradient reduction, clipping and optimizer."),
    _timing("reference", "Log-probabilities of the reference policy.", "timing_s/ref"),
    _timing("gen", "Longest generation batch that ended during the step.", "timing_s/gen"),
    _timing("reward", "Longest scoring call that ended during the step.", "timing_s/reward"),
    _timing("update_weights", "A replica loaded and checked new weights.", "timing_s/update_weights"),
    _timing("give", "Shared devices: train state leaves them for the replicas."),
    _timing("take_back", "Shared devices: replicas go to rest and train state comes back."),
    # lengths
    *_three("response_length", "tokens", "response length.", SAMPLES, "response_length"),
    *_three("num_turns", "turns", "number of the model's turns in answers that ended in the step, where an environment "
            "answers it.", SAMPLES, "num_turns"),
    Metric("turns/replies", "replies", "last", "", "",
           "Replies of the environment that went into answers."),
    Metric("turns/failures", "answers", "last", "", "",
           "Answers that ended because the environment raised, hung, died, or said what has no tokens."),
    Metric("turns/cut", "answers", "last", "", "",
           "Answers that ended because a reply did not fit into `rollout.max_new_tokens`."),
    Metric("turns/drifted", "replies", "last", "", "",
           "Replies after which the chat template would show earlier turns in other words than the model saw."),
    Metric("response_length/clip_ratio", "share", "mean", SAMPLES, "response_length/clip_ratio",
           "Share of answers that ended at `rollout.max_new_tokens`."),
    *_three("prompt_length", "tokens", "prompt length.", SAMPLES, "prompt_length"),
    # weights
    Metric("weight_sync/publish_s", "s", "last", "", "",
           "Trainer ranks wrote the newest version into the relay, beside their next step; slowest rank."),
    Metric("weight_sync/publish_exposed_s", "s", "last", "", "",
           "Part of that for which the optimizer had to wait; slowest rank."),
    Metric("weight_sync/load_s", "s", "max", "", "",
           "A replica loaded one version; slowest replica."),
    Metric("weight_sync/fetch_s", "s", "max", "", "",
           "A mirror fetched one version to its node, beside generation; slowest node. 0 without mirrors."),
    Metric("weight_sync/saved_share", "share", "last", "", "",
           "Share of the fetched bytes that needed not to be sent (`workflow.relay_delta`), over all mirrors."),
    Metric("weight_sync/bytes", "bytes", "last", "", "",
           "Size of one version."),
    Metric("weight_sync/unchanged_share", "share", "last", "", "",
           "Share of the newest version's bytes in shards that are bit for bit those of the version before. 1 after a "
           "step: the weights did not move (`trainer.lr` too small for bfloat16)."),
    Metric("weight_sync/version", "versions", "last", "", "",
           "Newest version that every replica serves."),
    Metric("weight_sync/behind_max", "versions", "last", "", "",
           "Most versions that a replica was behind the newest published one while it answered."),
    Metric("weight_sync/probe_gap_max", "nat", "max", "", "",
           "Largest |log pi - log mu| on the fixed probe answers, trainer and engine at the same version: numerical "
           "difference only."),
    # data and ledger
    Metric("data/epoch", "passes", "last", "", "training/epoch",
           "Pass over the training prompts that the newest prompt belongs to."),
    Metric("samples/issued", "answers", "last", "", "",
           "Prompt rows issued since the start."),
    Metric("samples/trained", "answers", "last", "", "",
           "Answers trained since the start."),
    Metric("samples/dropped", "answers", "last", "", "",
           "Answers dropped since the start, for any reason."),
    Metric("samples/dropped_stale", "answers", "last", "", "",
           "Dropped because the lag law would have been broken."),
    Metric("samples/dropped_reward", "answers", "last", "", "",
           "Dropped because scoring failed, abstained or timed out."),
    Metric("samples/dropped_flat", "answers", "last", "", "",
           "Answers dropped because all rewards of their prompt were equal (`algorithm.dynamic_sampling`)."),
    Metric("samples/dropped_surplus", "answers", "last", "", "",
           "Answers dropped because their step was complete without them (`workflow.oversample` without lag)."),
    Metric("samples/masked", "answers", "last", "", "",
           "Answers of this step none of whose tokens was young enough to be trained (`workflow.stale` mask)."),
    Metric("staleness/masked_tokens", "tokens", "last", "", "",
           "Response tokens of this step that were too old to be trained (`workflow.stale` mask)."),
    Metric("samples/unfinished", "answers", "last", "", "",
           "Times in this step that an answer was interrupted, to be continued later."),
    Metric("samples/open", "answers", "last", "", "",
           "Issued, neither trained nor dropped yet."),
    Metric("train/skipped_steps", "steps", "last", "", "",
           "Steps since the start that left the weights as they were: a gradient was not finite, or the step had no "
           "token to train."),
    # evaluation
    Metric("eval/mean_at_k", "score", "last", "", "val-core/mean@N",
           "Mean score of all answers that got one, `evaluation.answers` to each prompt; greedy at temperature 0."),
    Metric("eval/pass_at_k", "share", "last", "", "",
           "Share of prompts with at least one answer of score 1 or more."),
    Metric("eval/maj_at_k", "score", "last", "", "val-core/maj@N",
           "Mean score of each prompt's most frequent answer text; of equally frequent ones the first."),
    Metric("eval/unscored", "share", "last", "", "",
           "Share of answers that the scorer gave no score: not in the means, and no pass."),
    Metric("eval/prompts", "prompts", "last", "", "",
           "Prompts that were asked."),
    Metric("eval/k", "answers", "last", "", "",
           "Answers to each of them."),
    Metric("eval/version", "versions", "last", "", "",
           "Policy version that gave all of them. The step of the line is the one in which the evaluation ended."),
    Metric("eval/seconds", "s", "last", "", "",
           "Time that the evaluation took, beside training or not."),
)
# fmt: on
