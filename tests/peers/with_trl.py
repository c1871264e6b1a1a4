"""Prints {case: largest difference} between TRL 1.16.0's GRPOTrainer and us, as JSON. Run in the peers' venv.

`_compute_loss` is called on a stand-in for the trainer that has the attributes it reads. Importance ratios and
advantages are computed in the middle of a long method: these lines are taken out of its source and run as they stand.
"""

from __future__ import annotations

import inspect
import json
import math
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import nanstd

from mindspeed_asyncflow.algorithms.advantages import group_advantages
from mindspeed_asyncflow.algorithms.moments import Moments, rescale
from mindspeed_asyncflow.algorithms.overlong import overlong_penalty
from mindspeed_asyncflow.config.schema import AlgorithmConfig, CorrectionConfig
from tests.peers.batch import ANSWERS, WIDTH, Batch, apart, ours

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # theirs, our algorithm, our correction
    "dapo": ({}, {}, {}),
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "seq-mean-token-mean"}, {}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "seq-mean-token-sum-norm"}, {}),
    "sequence level": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
        {},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.3},
        {},
    ),
    "sapo": ({"loss_type": "sapo"}, {"loss": "sapo", "aggregation": "seq-mean-token-mean"}, {}),
    "delta": ({"delta": 1.5}, {"dual_clip": 1.5}, {}),
    "beta": ({"beta": 0.1}, {"kl_coef": 0.1, "kl_weighted": True}, {}),
    "beta without ratio": ({"beta": 0.1, "use_bias_correction_kl": False}, {"kl_coef": 0.1}, {}),
    "off-policy mask, beta": (
        {"off_policy_mask_threshold": 0.05, "beta": 0.1},
        {"kl_coef": 0.1, "kl_weighted": True},
        {"opsm_delta": 0.05},
    ),
}
SAMPLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence_mask": ({"clip_max": 3.0}, {"weight": "sequence", "cap": 3.0, "beyond": "zero"}),
    "sequence_truncate": ({"clip_max": 3.0}, {"weight": "sequence", "cap": 3.0}),
    "token_truncate": ({"clip_max": 1.3, "clip_min": 0.6}, {"weight": "token", "cap": 1.3, "floor": 0.6}),
    "token_mask": (
        {"clip_max": 1.5, "clip_min": 0.7},
        {"weight": "token", "cap": 1.5, "floor": 0.7, "beyond": "zero"},
    ),
}
DEFAULTS = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.25,
    "beta": 0.0,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "current_gradient_accumulation_steps": 1,
    "max_completion_length": WIDTH,
    "_entropy_bonus_enabled": False,
    "aux_loss_enabled": False,
}
ARGUMENTS = {
    "delta": None,
    "use_bias_correction_kl": True,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "steps_per_generation": 1,
}


class OneProcess:
    num_processes, sync_gradients = 1, False

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values


def lines_of_trl(first: str, last: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run GRPOTrainer's source from the line that starts with `first` up to the one before `last`."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions).splitlines()
    start = next(i for i, line in enumerate(source) if line.strip().startswith(first))
    stop = next(i for i in range(start, len(source)) if source[i].strip().startswith(last))
    exec(textwrap.dedent("\n".join(source[start:stop])), {"torch": torch, "math": math, "nanstd": nanstd}, names)
    return names


def importance(batch: Batch, mode: str, bounds: dict[str, Any]) -> torch.Tensor:
    trainer = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=bounds.get("clip_max"),
        vllm_importance_sampling_clip_min=bounds.get("clip_min"),
    )
    names = {"self": trainer, "old_per_token_logps": batch.now, "sampling_per_token_logps": batch.older}
    names |= {"mask": batch.mask}
    found = lines_of_trl("per_token_logps_diff =", "# Compute the per-token log probabilities for the ref", names)
    return found["vllm_importance_sampling_ratio"]


def loss(
    seed: int, theirs: dict[str, Any], mine: dict[str, Any], how: dict[str, Any], sampling: str | None = None
) -> float:
    batch = Batch.random(seed)
    logprobs = batch.now.clone().requires_grad_()
    trainer = SimpleNamespace(**(DEFAULTS | {k: v for k, v in theirs.items() if k in DEFAULTS}))
    trainer.args = SimpleNamespace(**(ARGUMENTS | {k: v for k, v in theirs.items() if k in ARGUMENTS}))
    trainer.model, trainer.accelerator = SimpleNamespace(training=True), OneProcess()
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros(ANSWERS, WIDTH), None)
    trainer.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    some = torch.zeros(ANSWERS, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": some,
        "prompt_mask": torch.ones_like(some),
        "completion_ids": torch.zeros(ANSWERS, WIDTH, dtype=torch.long),
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.older if sampling is None else batch.now,
        "ref_per_token_logps": batch.ref,
        "sampling_per_token_logps": batch.older,
        "num_items_in_batch": batch.mask.sum(),
    }
    if sampling is not None:
        trainer.use_vllm = True
        inputs["importance_sampling_ratio"] = importance(batch, sampling, SAMPLING[sampling][0])
    total = GRPOTrainer._compute_loss(trainer, None, inputs)
    own = {"clip_low": 0.2, "clip_high": 0.25, "loss_horizon": WIDTH}
    own |= {"proximal": "rollout" if sampling is None else "current"} | mine
    return apart(batch, total, logprobs, ours(batch, AlgorithmConfig(**own), CorrectionConfig(**how)))


def advantage(seed: int, scale: str, name: str) -> float:
    rng = np.random.default_rng(seed)
    rewards, size = rng.random(16), 4
    names: dict[str, Any] = {
        "self": SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards=scale,
            reward_weights=torch.ones(1, dtype=torch.float64),
        ),
        "rewards_per_func": torch.tensor(rewards)[:, None],
        "unscorable_mask": torch.zeros(16, dtype=torch.bool),
        "num_generations": size,
        "device": "cpu",
    }
    theirs = lines_of_trl("if self.multi_objective_aggregation ==", "elif self.multi_objective", names)["advantages"]
    config = AlgorithmConfig(advantage=name, advantage_eps=1e-4)
    found = group_advantages(rewards, np.repeat(np.arange(4), size), config).values
    shift, factor = rescale(config, Moments.of(found), Moments.of(rewards))
    return float(np.abs((found - shift) * factor - theirs.numpy()).max())


def overlong() -> float:
    lengths = np.array([1, 79, 80, 81, 90, 100, 101, 150])
    theirs = get_soft_overlong_punishment(100, 20)(completion_ids=[[1] * n for n in lengths])
    return float(np.abs(overlong_penalty(lengths, 100, 20, 1.0, "capped") - theirs).max())


def compare(seeds: int) -> dict[str, float]:
    worst: dict[str, float] = {"overlong": overlong()}
    for seed in range(seeds):
        found = {name: loss(seed, *case) for name, case in CASES.items()}
        found |= {mode: loss(seed, {}, {}, how, mode) for mode, (_, how) in SAMPLING.items()}
        found["control"] = loss(seed, {}, {"clip_high": 0.3}, {})
        for scale, name in (("group", "grpo"), ("batch", "grpo_batch"), ("none", "dr_grpo")):
            found[f"scale_rewards {scale}"] = advantage(seed, scale, name)
        for name, value in found.items():
            worst[name] = max(worst.get(name, 0.0), value)
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(compare(20)))
