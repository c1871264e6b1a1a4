"""Prints {case: largest difference} between verl 0.9.1 and us, as JSON. Run in the peers' venv."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl.trainer.ppo.core_algos as core
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig, PolicyLossConfig

from mindspeed_asyncflow.algorithms.advantages import group_advantages
from mindspeed_asyncflow.algorithms.gae import gae, returns_to_go, token_rewards
from mindspeed_asyncflow.algorithms.moments import Moments, rescale
from mindspeed_asyncflow.algorithms.overlong import overlong_penalty
from mindspeed_asyncflow.algorithms.value_loss import make_value_loss
from mindspeed_asyncflow.config.schema import AlgorithmConfig, CorrectionConfig, CriticConfig
from tests.algorithms.cases import micro_batch
from tests.peers.batch import ANSWERS, WIDTH, Batch, apart, ours

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")
LOSSES = {  # docs/algorithms.md: theirs -> ours
    "vanilla": {"loss": "ppo_clip", "dual_clip": 3.0},
    "gspo": {"loss": "gspo_token"},
    "geo_mean": {"loss": "gmpo", "aggregation": "seq-mean-token-mean"},
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo", "aggregation": "seq-mean-token-mean"},
    "dppo_tv": {"loss": "dppo_tv", "dppo_cap": 3.0},
}
WEIGHTS = {
    "token TIS": ({"rollout_is": "token", "rollout_is_threshold": 2.0}, {"weight": "token"}),
    "sequence TIS": ({"rollout_is": "sequence", "rollout_is_threshold": 2.0}, {"weight": "sequence"}),
    "IcePop": (
        {"rollout_is": "token", "rollout_is_threshold": "0.5_1.5"},
        {"weight": "token", "floor": 0.5, "cap": 1.5, "beyond": "zero"},
    ),
}
REJECTIONS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}


def loss(
    seed: int,
    name: str,
    mode: str,
    *,
    bypass: bool = True,
    how: CorrectionConfig | None = None,
    theirs: dict[str, Any] | None = None,
    kl: tuple[str, str] | None = None,
    small: bool = False,
    wrong: bool = False,
) -> float:
    batch = Batch.random(seed)
    low, high = (3e-4, 4e-4) if small else (0.2, 0.25)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=3.0,
        loss_agg_mode=mode,
        policy_loss=PolicyLossConfig(loss_mode=name),
    )
    logprobs = batch.now.clone().requires_grad_()
    weights, mask = None, batch.mask
    if theirs is not None:
        options = {"rollout_is": None, "rollout_rs": None} | theirs
        found, mask, _ = compute_rollout_correction_and_rejection_mask(batch.now, batch.older, batch.mask, **options)
        weights = None if found is None else found.batch["rollout_is_weights"]
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=mask.sum(), global_batch_size=ANSWERS, loss_scale_factor=WIDTH
    )
    total, _ = core.get_policy_loss_fn(name)(
        old_log_prob=batch.older if bypass else logprobs.detach(),
        log_prob=logprobs,
        advantages=batch.spread(),
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    if kl is not None:
        term = core.kl_penalty(logprobs, batch.ref, kl[0])
        total = total + 0.1 * core.agg_loss(term, mask, mode, **config.global_batch_info)
    own: dict[str, Any] = {"aggregation": mode, "loss_horizon": WIDTH, "clip_low": low, "clip_high": high}
    own |= {"kl_coef": 0.1, "kl_type": kl[1]} if kl else {}
    own |= {"proximal": "rollout" if bypass else "current"} | LOSSES[name]
    own |= {"clip_high": 0.3} if wrong else {}
    return apart(batch, total, logprobs, ours(batch, AlgorithmConfig(**own), how or CorrectionConfig()))


def advantages(seed: int) -> dict[str, float]:
    """Of rewards in groups that are not side by side, one of them of a single value."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(4), 4))
    rewards = np.where(groups == 0, 1.0, rng.random(16))
    lengths = rng.integers(1, WIDTH, 16)
    mask = (np.arange(WIDTH) < lengths[:, None]).astype(np.float64)
    per_token = np.zeros_like(mask)
    per_token[np.arange(16), lengths - 1] = rewards

    def verl(name: str, **options: Any) -> np.ndarray:
        found, _ = core.get_adv_estimator_fn(name)(
            token_level_rewards=torch.tensor(per_token), response_mask=torch.tensor(mask), **options
        )
        return found.numpy()[mask > 0]

    def mine(name: str, **options: Any) -> np.ndarray:
        config = AlgorithmConfig(advantage=name, **options)
        found = group_advantages(rewards, groups, config).values
        if name == "reinforce_pp":
            rows = [token_rewards(r, None, 0.0, np.ones(n)) for r, n in zip(rewards, lengths)]
            tokens = np.concatenate([returns_to_go(row, config.gamma) for row in rows])
        else:
            tokens = np.repeat(found, lengths)
        shift, factor = rescale(config, Moments.of(tokens), Moments.of(rewards))
        return (tokens - shift) * factor

    pairs = {
        "grpo": (verl("grpo", index=groups), mine("grpo", advantage_eps=1e-6)),
        "dr_grpo": (verl("grpo", index=groups, norm_adv_by_std_in_grpo=False), mine("dr_grpo")),
        "rloo": (verl("rloo", index=groups), mine("rloo")),
        "reinforce++ baseline": (verl("reinforce_plus_plus_baseline", index=groups), mine("reinforce_pp_baseline")),
    }
    for gamma in (1.0, 0.9):
        theirs = verl("reinforce_plus_plus", config=SimpleNamespace(gamma=gamma))
        pairs[f"reinforce++ gamma {gamma}"] = (theirs, mine("reinforce_pp", gamma=gamma))
    return {f"advantage {name}": float(np.abs(a - b).max()) for name, (a, b) in pairs.items()}


def critic(seed: int) -> dict[str, float]:
    """GAE over answers with masked tokens inside, whitened; and the critic's loss."""
    batch = Batch.random(seed)
    rng = np.random.default_rng(seed)
    mask = batch.mask.numpy().copy()
    mask[0, 1] = 0
    rewards, values = rng.normal(size=mask.shape) * mask, rng.normal(size=mask.shape)
    theirs, returns = core.compute_gae_advantage_return(*map(torch.tensor, (rewards, values, mask)), 0.97, 0.9)
    found = [gae(*row, 0.97, 0.9) for row in zip(rewards, values, mask)]
    flat = np.concatenate([a[m > 0] for (a, _), m in zip(found, mask)])
    shift, factor = rescale(AlgorithmConfig(advantage="gae"), Moments.of(flat), Moments())
    my_returns = np.concatenate([r[m > 0] for (_, r), m in zip(found, mask)])
    inside = batch.mask.numpy() > 0
    lengths = inside.sum(axis=1).tolist()
    old, target, new = (np.round(rng.normal(size=inside.shape) * 64) / 64 for _ in range(3))
    theirs_loss, _ = core.compute_value_loss(*map(torch.tensor, (new, target, old)), batch.mask, 0.5)
    packed = micro_batch(lengths, np.zeros(ANSWERS), np.zeros(inside.sum()))
    places = np.flatnonzero(packed.loss_mask)
    on_places = {name: np.zeros(len(packed.input_ids)) for name in ("values", "returns", "new")}
    for name, array in zip(on_places, (old, target, new)):
        on_places[name][places] = array[inside]
    object.__setattr__(packed, "values", on_places["values"])
    object.__setattr__(packed, "returns", on_places["returns"])
    now = torch.tensor(on_places["new"])
    my_loss = make_value_loss(CriticConfig(value_clip=0.5))(now, now, packed)[0] / inside.sum()
    return {
        "gae": float(np.abs((flat - shift) * factor - theirs.numpy()[mask > 0]).max()),
        "gae returns": float(np.abs(my_returns - returns.numpy()[mask > 0]).max()),
        "value loss": abs(theirs_loss.item() - my_loss.item()),
    }


def overlong() -> float:
    limit, buffer, factor = 100, 20, 0.7
    manager = object.__new__(DAPORewardManager)
    manager.overlong_buffer_cfg = SimpleNamespace(enable=True, len=buffer, penalty_factor=factor, log=False)
    manager.max_resp_len, manager.reward_router_address, manager.is_async_reward_score = limit, None, False
    manager.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
    manager.compute_score = lambda **_: 0.0

    class Data(list):
        def __getitem__(self, place: Any) -> Any:
            return self if isinstance(place, slice) else list.__getitem__(self, place)

    def theirs(length: int) -> float:
        item = SimpleNamespace(
            batch={"responses": torch.zeros(160), "attention_mask": (torch.arange(160) < length).long()},
            non_tensor_batch={"data_source": "", "reward_model": {"ground_truth": ""}},
        )

        async def ask() -> float:
            manager.loop = asyncio.get_running_loop()
            return float((await manager.run_single(Data([item])))["reward_score"])

        return asyncio.run(ask())

    lengths = np.array([1, 79, 80, 81, 90, 100, 101, 150])
    mine = overlong_penalty(lengths, limit, buffer, factor, "falling")
    return float(np.abs(mine - [theirs(int(n)) for n in lengths]).max())


def compare(seeds: int) -> dict[str, float]:
    worst: dict[str, float] = {"overlong": overlong()}

    def note(name: str, value: float) -> None:
        worst[name] = max(worst.get(name, 0.0), value)

    for seed in range(seeds):
        for name in LOSSES:
            for mode in MODES:
                note(f"{name} {mode}", loss(seed, name, mode))
        note("control", loss(seed, "vanilla", "token-mean", wrong=True))
        note("gspo small bounds", loss(seed, "gspo", "seq-mean-token-mean", small=True))
        for names in (("low_var_kl", "k3"), ("mse", "k2"), ("k3+", "k3+")):
            note(f"kl {names[0]}", loss(seed, "vanilla", "token-mean", kl=names, bypass=False))
        for mode in MODES[:4]:
            for name, (theirs, how) in WEIGHTS.items():
                correction = CorrectionConfig(**how)
                note(f"{name} {mode}", loss(seed, "vanilla", mode, bypass=False, how=correction, theirs=theirs))
            for name, level in REJECTIONS.items():
                if (level, mode) == ("token", "seq-mean-token-mean"):
                    continue  # docs/algorithms.md, "Not the same"
                correction = CorrectionConfig(
                    reject=level,
                    reject_low=1 / 1.4,
                    reject_high=1 / 0.8,
                    rejected="leave_out" if mode == "token-mean" else "count",
                )
                theirs = {"rollout_rs": name, "rollout_rs_threshold": "0.8_1.4"}
                note(f"{name} {mode}", loss(seed, "vanilla", mode, bypass=False, how=correction, theirs=theirs))
        for name, value in (advantages(seed) | critic(seed)).items():
            note(name, value)
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(compare(10)))
