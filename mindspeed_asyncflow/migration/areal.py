"""Keys of AReaL's configurations for GRPO, PPO and their relatives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.migration import common, tracking
from mindspeed_asyncflow.migration.foreign import Foreign
from mindspeed_asyncflow.migration.table import Move, Outcome, System, shown

MOVES = (
    Move("experiment_name", "run.name"),
    Move("seed", "run.seed"),
    Move("cluster.fileroot", "run.folder"),
    Move("total_train_epochs", "data.epochs"),
    Move("total_train_steps", "trainer.steps"),
    Move("train_dataset.max_length", "data.max_prompt_tokens", 1024),
    Move("gconfig.n_samples", "algorithm.group_size", 1),
    Move("gconfig.max_new_tokens", "rollout.max_new_tokens", 16384),
    Move("gconfig.temperature", "rollout.temperature"),
    Move("actor.dtype", "model.dtype", "bfloat16", {"bfloat16": "bfloat16", "float32": "float32"}),
    Move("actor.mb_spec.max_tokens_per_mb", "trainer.micro_batch_tokens"),
    Move("actor.gradient_checkpointing", "trainer.recompute"),
    Move("actor.optimizer.lr", "trainer.lr", 1e-3),
    Move("actor.optimizer.weight_decay", "trainer.weight_decay", 0.01),
    Move("actor.optimizer.gradient_clipping", "trainer.grad_clip"),
    Move("actor.c_clip", "algorithm.dual_clip"),
    Move("actor.sapo_tau_pos", "algorithm.sapo_tau_positive"),
    Move("actor.sapo_tau_neg", "algorithm.sapo_tau_negative"),
    Move("actor.dynamic_sampling", "algorithm.dynamic_sampling"),
    Move("critic.optimizer.lr", "critic.lr"),
    Move("critic.value_eps_clip", "critic.value_clip", change=lambda clip: clip or None),
    Move("rollout.max_concurrent_rollouts", "rollout.max_running"),
    Move("saver.freq_steps", "trainer.save_every"),
    Move("evaluator.freq_steps", "evaluation.every"),
)
# (mean over, standard deviation over) of the reward, whether an answer leaves itself out -> ours
NORMS = {
    ("group", "group", False): "grpo",
    ("group", "batch", False): "grpo_batch",
    ("group", None, False): "dr_grpo",
    ("group", None, True): "rloo",
    ("group", "group", True): "grpo_loo",
}
_SIZE = re.compile(r"([dptce])(\d+)")
SIZES = {"d": "data", "p": "pipeline", "t": "tensor", "c": "context", "e": "expert"}


def sides(allocation: str) -> tuple[dict[str, int], dict[str, int], str] | None:
    """`vllm:d4t2+megatron:d2p2t2` -> sizes of rollout and of the trainer, and the sign between; None: not clear."""
    text = allocation.replace(" ", "")
    for sign in ("+", "|"):
        rollout, between, trainer = text.partition(sign)
        depth = rollout.count("(") - rollout.count(")")
        if between and depth == 0:
            return _sizes(rollout), _sizes(trainer), sign
    return None


def _sizes(part: str) -> dict[str, int]:
    """`megatron:(attn:d4p4t2c1|ffn:d1p4t1e8)`: the sizes of attention, and of experts their `e`."""
    body = part.rpartition(":")[2] if "(" not in part else part
    attention, _, experts = body.partition("|ffn:")
    attention = attention.rpartition(":")[2]
    found = {SIZES[letter]: int(count) for letter, count in _SIZE.findall(attention.rpartition(".")[2])}
    expert = dict(_SIZE.findall(experts)).get("e")
    return found | ({"expert": int(expert)} if expert else {})


def derive(file: Foreign, out: Outcome) -> None:
    if not any(file.has(key) for key in ("gconfig", "rollout", "actor.eps_clip")):
        raise ConfigError("it has no gconfig and no rollout: it trains on given answers, not on its own")
    common.take_model(file.get("actor.path"), "actor.path", out)
    common.take_files(file.get("train_dataset.path"), "train_dataset.path", out)
    text = "the columns of your rows: data.columns; AReaL reads each data set by a loader of its own"
    out.undecided.append(("data.columns", text))
    if not file.get("train_dataset.shuffle", True):
        out.lost.append(("train_dataset.shuffle: False", "prompts are shuffled by run.seed"))
    out.put("data.chat", True, "AReaL's loaders make messages for the chat template")
    _batch(file, out)
    _optimizer(file, out)
    _advantage(file, out)
    _loss(file, out)
    _devices(file, out)
    tracking.take_areal(file, out)
    out.undecided.append(
        ("reward.scorers", "AReaL's script names the reward function; here reward.scorers does, e.g. math")
    )


def _batch(file: Foreign, out: Outcome) -> None:
    batch, parts = file.get("train_dataset.batch_size"), file.get("actor.ppo_n_minibatches", 4)
    lag = file.get("rollout.max_head_offpolicyness", 0)
    if not isinstance(batch, int) or not isinstance(parts, int) or parts < 1 or batch % parts:
        text = f"train_dataset.batch_size {shown(batch)} and actor.ppo_n_minibatches {shown(parts)}"
        out.undecided.append(("workflow.groups_per_step", text))
        return
    keys = "train_dataset.batch_size / actor.ppo_n_minibatches"
    out.put("workflow.groups_per_step", batch // parts, f"from {keys}: one optimizer step each")
    if isinstance(lag, int):
        out.put("workflow.max_lag", lag * parts, "from rollout.max_head_offpolicyness, in optimizer steps")
        if lag:
            out.put("workflow.update", "in_flight", "AReaL gives new weights to running answers")
    steps = out.value("trainer.steps", None)
    if isinstance(steps, int):
        out.put("trainer.steps", steps * parts, f"from total_train_steps, {parts} optimizer steps each")
    else:
        out.undecided.append(("trainer.steps", "AReaL counts epochs: set epochs x prompts / groups_per_step"))
    for what in ("saver", "evaluator", "recover"):
        for unit in ("epochs", "secs"):
            every = file.get(f"{what}.freq_{unit}")
            if every and what != "recover":
                text = "counted in optimizer steps here: trainer.save_every, evaluation.every"
                out.undecided.append((f"{what}.freq_{unit}: {shown(every)}", text))


def _optimizer(file: Foreign, out: Outcome) -> None:
    betas = [file.get("actor.optimizer.beta1", 0.9), file.get("actor.optimizer.beta2", 0.999)]
    out.put("trainer.betas", betas, "from actor.optimizer.beta1 and beta2")
    kind = file.get("actor.optimizer.lr_scheduler_type", "constant")
    if kind in ("constant", "linear", "cosine"):
        out.put("trainer.lr_decay", kind, "from actor.optimizer.lr_scheduler_type")
    else:
        out.lost.append(
            (f"actor.optimizer.lr_scheduler_type: {shown(kind)}", "trainer.lr_decay: constant, linear, cosine")
        )
    key = "actor.optimizer.warmup_steps_proportion"
    common.take_warmup(file.get(key, 0.001), key, out)


def _advantage(file: Foreign, out: Outcome) -> None:
    if file.has("critic.path"):
        out.put("algorithm.advantage", "gae", "there is a critic")
        out.put("algorithm.gae_lambda", file.get("actor.gae_lambda", 1.0), "from actor.gae_lambda")
        out.put("algorithm.gamma", file.get("actor.discount", 1.0), "from actor.discount")
        return
    norm: Mapping[str, Any] = file.get("actor.reward_norm", {})
    norm = norm if isinstance(norm, dict) else {}
    asked = (norm.get("mean_level", "batch"), norm.get("std_level", "batch"), bool(norm.get("mean_leave1out", False)))
    if norm and all(isinstance(part, str | bool | None) for part in asked) and asked in NORMS:
        out.put("algorithm.advantage", NORMS[asked], "from actor.reward_norm")
    else:
        text = "rewards are not normalised there; see docs/algorithms.md"
        if norm:
            text = f"reward_norm with mean over {asked[0]}, deviation over {asked[1]}; see docs/algorithms.md"
        out.undecided.append(("algorithm.advantage", text))
    whitened = file.get("actor.adv_norm", {})
    if isinstance(whitened, dict) and whitened.get("mean_level"):
        out.lost.append((f"actor.adv_norm: {shown(whitened)}", "group advantages are not normalised a second time"))
    for key, off in (("reward_scaling", 1.0), ("reward_bias", 0.0)):
        value = file.get(f"actor.{key}", off)
        if value != off:
            out.lost.append(
                (f"actor.{key}: {shown(value)}", "rewards are taken as scored; advantages in groups cancel it")
            )


def _loss(file: Foreign, out: Outcome) -> None:
    low = file.get("actor.eps_clip", 0.2)
    out.put("algorithm.clip_low", low, "from actor.eps_clip")
    out.put("algorithm.clip_high", file.get("actor.eps_clip_higher", low), "from actor.eps_clip_higher, or eps_clip")
    if file.get("actor.importance_sampling_level", "token") == "sequence":
        out.put("algorithm.loss", "gspo", "from actor.importance_sampling_level: sequence")
        out.put("algorithm.aggregation", "seq-mean-token-mean", "as GSPO is published")
    if file.get("actor.use_sapo_loss", False):
        out.put("algorithm.loss", "sapo", "from actor.use_sapo_loss")
    _correction(file, out)
    amount, kind = file.get("actor.kl_ctl", 0.1), file.get("actor.kl_estimator", "k1")
    common.take_kl(amount, kind, "reward", ("actor.kl_ctl", "actor.kl_estimator"), out)
    if file.get("actor.overlong_reward_penalty", False):
        out.put("reward.overlong_buffer", file.get("actor.overlong_tokens"), "from actor.overlong_tokens")
        out.put(
            "reward.overlong_factor",
            file.get("actor.overlong_penalty_factor", 1.0),
            "from actor.overlong_penalty_factor",
        )
    common.take_sampling(file, out, {"gconfig.top_p": 1.0, "gconfig.top_k": 100000000, "gconfig.min_new_tokens": 0})
    if file.get("gconfig.greedy", False):
        out.lost.append(("gconfig.greedy: True", common.SAMPLING))


def _correction(file: Foreign, out: Outcome) -> None:
    """The decoupled loss: a proximal policy beside the one that sampled, and the weight between both."""
    again, method = file.get("actor.recompute_logprob", False), file.get("actor.prox_logp_method", "recompute")
    limits = file.get("actor.rejection_sampling", {})
    limits = limits if isinstance(limits, dict) else {}
    cap = file.get("actor.behav_imp_weight_cap", file.get("actor.behave_imp_weight_cap", limits.get("upper")))
    if not file.get("actor.use_decoupled_loss", False):
        out.put("algorithm.proximal", "current" if again else "rollout", "from actor.recompute_logprob")
        return
    proximal = "log_linear" if method == "loglinear" else "current"
    out.put("algorithm.proximal", proximal, "from actor.use_decoupled_loss and actor.prox_logp_method")
    if limits.get("metric", "ratio") != "ratio":
        text = f"actor.rejection_sampling by {shown(limits['metric'])}: see correction.reject"
        out.undecided.append(("correction.reject", text))
        cap = None
    level = "geometric" if limits.get("level") == "sequence" else "token"
    out.put("correction.weight", level, "from actor.use_decoupled_loss")
    key = "actor.rejection_sampling" if limits else "actor.behav_imp_weight_cap"
    if cap is None:
        out.put("correction.cap", 1e6, "no limit there")
        return
    out.put("correction.cap", cap, f"from {key}")
    out.put("correction.floor", limits.get("lower") or 0.0, f"from {key}")
    out.put("correction.beyond", "clamp" if limits.get("action") == "clamp" else "zero", f"from {key}: left out beyond")


def _devices(file: Foreign, out: Outcome) -> None:
    allocation = file.get("allocation_mode", "")
    found = sides(str(allocation)) if allocation else None
    key = "allocation_mode"
    if not allocation and file.has("rollout.backend"):
        key = "rollout.backend and actor.backend"
        found = _sizes(str(file.get("rollout.backend", ""))), _sizes(str(file.get("actor.backend", ""))), "+"
    if found is None or not found[0] or not found[1]:
        text = f"{shown(allocation) or 'allocation_mode is not given'}: set replicas, and sizes of trainer and rollout"
        out.undecided.append(("rollout.replicas", text))
        return
    rollout, trainer, sign = found
    for name in ("tensor", "pipeline", "context", "expert", "data"):
        out.put(f"trainer.{name}_parallel", trainer.get(name, 1), f"from {key}")
    if trainer.get("data", 1) > 1:
        out.put("trainer.distributed_optimizer", True, "AReaL's trainers cut optimizer state over data ranks")
    out.put("rollout.replicas", rollout.get("data", 1), f"from {key}")
    out.put("rollout.tensor_parallel", rollout.get("tensor", 1), f"from {key}")
    if rollout.get("pipeline", 1) > 1:
        out.lost.append((f"{key}: {shown(allocation)}", "a replica has tensor parallelism only"))
    if sign == "|":
        out.put("workflow.schedule", "colocated", f"from {key}: both sides on the same devices")
        out.put("workflow.max_lag", 0, "on-policy, as turns are")
        out.put("workflow.update", "delayed", "replicas that sleep load at their turn")


LOST = {
    "sglang": "rollout is vLLM (vllm-ascend on NPUs)",
    "vllm.gpu_memory_utilization": common.CACHE,
    "vllm": "options of vllm-ascend go into rollout.ascend.additional",
    "actor.use_lora": common.LORA,
    "actor.lora_rank": common.LORA,
    "actor.lora_alpha": common.LORA,
    "actor.weight_update_mode": "rollout.ascend.transfer says how weights come to replicas",
    "actor.adv_norm": "advantages are normalised as algorithm.advantage and whiten say",
    "actor.reward_scaling": "rewards are taken as scored",
    "actor.reward_bias": "rewards are taken as scored",
    "actor.megatron": "options of Megatron go into trainer.* and trainer.mindspeed.*",
    "gconfig.max_tokens": "data.max_prompt_tokens and rollout.max_new_tokens bound it",
    "workflow": "an agent is an environment here, turns.environment",
    "rollout.agent": "an agent is an environment here, turns.environment",
    "rollout.use_lora": common.LORA,
    "actor.entropy_coeff": common.ENTROPY,
    "actor.reward_clip": "rewards are not clipped",
    "actor.m2_threshold": "no such mask; see correction.*",
    "critic": "the critic is cut like the trainer and takes its other settings",
    "valid_dataset": "evaluation takes held-out prompts, or data.validation",
    "scheduler": "processes are placed by Ray",
    "cluster": "nodes and devices are found; cluster.* describes them for `check` and `plan`",
    "rollout.queue_size": "the dock has room for what workflow.max_lag allows",
    "recover": "`asyncflow train --resume` goes on from the newest checkpoint",
    "enable_offload": common.OFFLOAD,
    "stats_logger": "observe.* says what is written beside metrics.jsonl",
    "dynamic_bs": "a step has workflow.groups_per_step groups, whatever was filtered",
}
_EVERYWHERE = ("experiment_name", "trial_name", "fileroot", "tokenizer_path", "scheduling_spec", "scheduling_strategy")
_ROOMS = ("rollout", "actor", "ref", "critic", "saver", "recover", "evaluator", "stats_logger", "perf_tracer")
NEEDLESS = (
    *("trial_name", "tokenizer_path", "ref", "perf_tracer", "launcher", "server_only", "async_training"),
    *(f"{room}.{name}" for room in _ROOMS for name in _EVERYWHERE),
    *(
        "actor.init_from_scratch",
        "actor.disable_dropout",
        "actor.optimizer.type",
        "actor.optimizer.eps",
        "actor.mb_spec",
    ),
    *("actor.max_new_tokens", "actor.temperature", "actor.group_size", "actor.backend", "actor.log_agent_stats"),
    *("eval_workflow", "gconfig.lora_name", "actor.peft_type", "actor.target_modules", "actor.pad_to_maximum"),
    *("actor.attn_impl", "rollout.enable_rollout_tracing", "rollout.consumer_batch_size", "rollout.dump_to_file"),
    *("rollout.backend", "rollout.pause_grace_period", "rollout.setup_timeout", "rollout.request_timeout"),
    *("train_dataset.type", "train_dataset.pin_memory", "train_dataset.num_workers", "actor.recompute_logprob"),
    *("vllm.model", "vllm.seed", "vllm.dtype", "vllm.max_model_len", "vllm.skip_tokenizer_init", "vllm.enforce_eager"),
    *("sglang.model_path", "sglang.random_seed", "sglang.skip_tokenizer_init", "sglang.dtype", "sglang.context_length"),
    *("stats_logger.wandb.mode", "recover.mode", "scheduler.type", "actor.optimizer.offload"),
)
AREAL = System("AReaL", ("gconfig", "train_dataset", "allocation_mode"), MOVES, derive, LOST, NEEDLESS)
