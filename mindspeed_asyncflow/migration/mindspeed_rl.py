"""Keys of MindSpeed-RL's GRPO, DAPO and PPO configurations."""

from __future__ import annotations

from typing import Any

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.migration import common, tracking
from mindspeed_asyncflow.migration.foreign import Foreign
from mindspeed_asyncflow.migration.table import Move, Outcome, System, shown

SAMPLING = "generate_config.sampling_config"
ADVANTAGES = {"group_norm": "grpo", "gae": "gae"}
DECAYS = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
# Their rules for answers that are compared as mathematics; the others have no scorer of the same name here.
MATHEMATICS = ("acc", "base_acc", "math_17k_acc", "acc_for_dapo", "acc_for_ppo", "math_verify_reward")


def layers(value: Any) -> list[int] | None:
    """`16,17,16,15`, as text or as a list."""
    parts = value.split(",") if isinstance(value, str) else value
    return [int(part) for part in parts]


MOVES = (
    Move("megatron_training.seed", "run.seed"),
    Move("megatron_training.train_iters", "trainer.steps"),
    Move("megatron_training.save_interval", "trainer.save_every", change=common.whole),
    Move("megatron_training.tokenizer_name_or_path", "model.source"),
    Move("megatron_training.sequence_parallel", "trainer.sequence_parallel"),
    Move("megatron_training.use_distributed_optimizer", "trainer.distributed_optimizer"),
    Move("megatron_training.use_fused_rmsnorm", "trainer.mindspeed.fused_rmsnorm"),
    Move("megatron_training.use_fused_swiglu", "trainer.mindspeed.fused_swiglu"),
    Move("megatron_training.use_fused_rotary_pos_emb", "trainer.mindspeed.fused_rope"),
    Move("megatron_training.use_flash_attn", "trainer.mindspeed.flash_attention"),
    Move("megatron_training.swap_attention", "trainer.mindspeed.swap_attention"),
    Move("megatron_training.moe_grouped_gemm", "trainer.moe_grouped_gemm"),
    Move("megatron_training.reuse_fp32_param", "trainer.mindspeed.reuse_fp32_param"),
    Move("actor_config.tensor_model_parallel_size", "trainer.tensor_parallel"),
    Move("actor_config.pipeline_model_parallel_size", "trainer.pipeline_parallel"),
    Move("actor_config.context_parallel_size", "trainer.context_parallel"),
    Move("actor_config.expert_model_parallel_size", "trainer.expert_parallel"),
    Move("actor_config.num_layer_list", "trainer.pipeline_layers", change=layers),
    Move("actor_config.lr", "trainer.lr"),
    Move("actor_config.lr_decay_style", "trainer.lr_decay", change=DECAYS),
    Move("actor_config.weight_decay", "trainer.weight_decay"),
    Move("actor_config.clip_grad", "trainer.grad_clip"),
    Move("critic_config.lr", "critic.lr"),
    Move("critic_config.clip_grad", "critic.grad_clip"),
    Move("rl_config.cliprange_value", "critic.value_clip"),
    Move("rl_config.adv_estimator", "algorithm.advantage", "group_norm", ADVANTAGES),
    Move("rl_config.n_samples_per_prompt", "algorithm.group_size", 1),
    Move("rl_config.filter_groups_enable", "algorithm.dynamic_sampling"),
    Move("rl_config.epochs", "data.epochs"),
    Move("rl_config.max_prompt_length", "data.max_prompt_tokens", 512),
    Move("rl_config.verifier_parallel", "reward.workers"),
    Move("rl_config.verifier_timeout", "reward.timeout_s", 30),
    Move("rl_config.hccl_buffersize", "rollout.ascend.hccl_buffer_mb"),
    Move("generate_config.infer_tensor_parallel_size", "rollout.tensor_parallel"),
    Move("generate_config.enable_expert_parallel", "rollout.ascend.expert_parallel"),
    Move("generate_config.max_num_seqs", "rollout.max_running"),
    Move(f"{SAMPLING}.max_tokens", "rollout.max_new_tokens"),
    Move(f"{SAMPLING}.temperature", "rollout.temperature"),
)


def derive(file: Foreign, out: Outcome) -> None:
    stage = file.get("megatron_training.stage", "ray_grpo")
    if stage not in ("ray_grpo", "ray_dapo", "ray_ppo"):
        raise ConfigError(f"megatron_training.stage: {stage} is no GRPO, DAPO or PPO: it trains on given answers")
    out.put("run.platform", "npu", "MindSpeed-RL runs on NPUs")
    tracking.take_mindspeed_rl(file, out)
    out.put(
        "model.dtype",
        "bfloat16" if file.get("megatron_training.bf16", False) else "float32",
        "from megatron_training.bf16",
    )
    common.take_model(
        file.get("megatron_training.tokenizer_name_or_path"), "megatron_training.tokenizer_name_or_path", out
    )
    place = file.get("megatron_training.data_path")
    text = f"{shown(place)} is preprocessed for Megatron: name what it was made from, file:PATH, and data.columns"
    out.undecided.append(("data.task", text))
    out.put("data.chat", True, "their preprocessing puts prompts into a chat template")
    _batch(file, out)
    _optimizer(file, out)
    _loss(file, out)
    _devices(file, out)
    _reward(file, out)


def _batch(file: Foreign, out: Outcome) -> None:
    batch = file.get("megatron_training.global_batch_size")
    mini = file.get("rl_config.mini_batch_size", batch)
    if not isinstance(batch, int) or not isinstance(mini, int) or mini < 1:
        out.undecided.append(("workflow.groups_per_step", "megatron_training.global_batch_size is not given"))
    elif mini < batch and batch % mini == 0:
        out.put("workflow.groups_per_step", mini, "from rl_config.mini_batch_size: one optimizer step each")
        steps = out.value("trainer.steps", None)
        if isinstance(steps, int):
            taken = f"from megatron_training.train_iters, {batch // mini} optimizer steps each"
            out.put("trainer.steps", steps * (batch // mini), taken)
    else:
        out.put("workflow.groups_per_step", batch, "from megatron_training.global_batch_size")
    if "trainer.steps" not in out.settings:
        out.undecided.append(("trainer.steps", "megatron_training.train_iters is not given"))
    split = file.get("rl_config.partial_rollout_max_split", 1)
    if isinstance(split, int) and split > 1:
        text = f"partial_rollout_max_split: {split} lets answers go on later; here partial_rounds: {split}"
        out.undecided.append(
            ("workflow.partial_rounds", f"{text}, which needs max_lag 1 or more and schedule separated")
        )


def _optimizer(file: Foreign, out: Outcome) -> None:
    betas = [file.get("actor_config.adam_beta1", 0.9), file.get("actor_config.adam_beta2", 0.999)]
    out.put(
        "trainer.betas", betas, "from actor_config.adam_beta1 and adam_beta2, Megatron's 0.9 and 0.999 if not given"
    )
    common.take_warmup(file.get("actor_config.lr_warmup_fraction", 0.0), "actor_config.lr_warmup_fraction", out)
    if file.get("actor_config.min_lr", 0.0):
        out.lost.append((f"actor_config.min_lr: {shown(file.get('actor_config.min_lr'))}", "a falling rate ends at 0"))
    granularity = file.get("actor_config.recompute_granularity", file.get("megatron_training.recompute_granularity"))
    if granularity == "full":
        out.put("trainer.recompute", True, "from recompute_granularity: full")
    elif granularity:
        out.put("trainer.mindspeed.recompute", ["attention"], f"from recompute_granularity: {granularity}")


def _loss(file: Foreign, out: Outcome) -> None:
    rl = "rl_config"
    higher = file.get(f"{rl}.clip_higher_enable", False)
    clip = file.get(f"{rl}.clip_ratio", 0.2)
    for side in ("low", "high"):
        asked = file.get(f"{rl}.clip_ratio_{side}", 0.1)
        key = f"{rl}.clip_ratio_{side}" if higher else f"{rl}.clip_ratio"
        out.put(f"algorithm.clip_{side}", asked if higher else clip, f"from {key}")
    by_token = file.get(f"{rl}.token_level_loss", True)
    aggregation = "token-mean" if by_token else "seq-mean-token-mean"
    out.put("algorithm.aggregation", aggregation, f"from {rl}.token_level_loss, true if not given")
    if out.value("algorithm.advantage", "") == "gae":
        out.put("algorithm.gae_lambda", file.get(f"{rl}.lam", 0.95), f"from {rl}.lam")
        out.put("algorithm.gamma", file.get(f"{rl}.gamma", 1.0), f"from {rl}.gamma")
        out.put("algorithm.whiten", file.get(f"{rl}.advantage_whiten", True), f"from {rl}.advantage_whiten")
    dapo = file.get("megatron_training.stage") == "ray_dapo"
    amount = 0 if dapo else file.get(f"{rl}.init_kl_coef", 0.01)
    place = "reward" if file.get(f"{rl}.use_kl_in_reward", False) else "loss"
    common.take_kl(
        amount, file.get(f"{rl}.kl_penalty", "low_var_kl"), place, (f"{rl}.init_kl_coef", f"{rl}.kl_penalty"), out
    )
    if amount:
        text = "the reference computes on host CPUs here, slow for large models; 0 leaves it out"
        out.undecided.append(("algorithm.kl_coef", text))
    if file.get(f"{rl}.kl_ctrl_type", "fixed") != "fixed":
        out.lost.append((f"{rl}.kl_ctrl_type", "algorithm.kl_coef is constant"))
    entropy = file.get(f"{rl}.entropy_coeff", 0)
    if entropy:
        out.lost.append((f"{rl}.entropy_coeff: {shown(entropy)}", common.ENTROPY))
    common.take_sampling(file, out, {f"{SAMPLING}.top_p": 1, f"{SAMPLING}.top_k": -1, f"{SAMPLING}.min_p": 0})


def _devices(file: Foreign, out: Outcome) -> None:
    devices = common.whole(file.get("rl_config.actor_resource.num_npus"))
    key = "rl_config.actor_resource.num_npus"
    sizes = {name: out.value(f"trainer.{name}_parallel", 1) for name in ("tensor", "pipeline", "context")}
    common.take_ranks(devices, sizes, key, out)
    common.take_replicas(devices, out.value("rollout.tensor_parallel", 1), key, out)
    if devices:
        out.put("cluster.devices", devices, f"from {key}")
    out.put("workflow.schedule", "colocated", "actor and rollout share devices there")
    out.put("workflow.max_lag", 0, "on-policy, as turns are")
    samples = file.get("actor_config.micro_batch_size", 1)
    longest = common.longest(out)
    packed = file.get("rl_config.update_max_packing_token_size", file.get("rl_config.max_packing_token_size"))
    if file.get("rl_config.use_dynamic_bsz", False) and isinstance(packed, int):
        out.put("trainer.micro_batch_tokens", packed, "from rl_config.update_max_packing_token_size")
    elif isinstance(samples, int) and longest:
        out.put("trainer.micro_batch_tokens", samples * longest, "from actor_config.micro_batch_size x longest")
    key = "megatron_training.moe_alltoall_overlap_comm"
    if file.get(key, False) and out.value("trainer.expert_parallel", 1) > 1:
        out.put("trainer.mindspeed.moe_overlap", "alltoall", f"from {key}")
    elif file.get(key, False):
        out.lost.append((f"{key}: True", "one expert-parallel rank has nobody to exchange tokens with"))


def _reward(file: Foreign, out: Outcome) -> None:
    names, weights = file.get("rl_config.verifier_function", ["base_acc"]), file.get("rl_config.verifier_weight", [1.0])
    names = names if isinstance(names, list) else [names]
    weights = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    scorers = []
    for name, weight in zip(names, weights, strict=True):
        if name in MATHEMATICS:
            scorers.append({"name": "math", "weight": weight})
        else:
            text = f"{shown(name)} (weight {weight}) is not here: name a function of yours, MODULE:FUNCTION"
            out.undecided.append(("reward.scorers", text))
    if scorers:
        out.put("reward.scorers", scorers, "from rl_config.verifier_function")
    length = common.whole(file.get("rl_config.overlong_buffer"))
    factor = file.get("rl_config.overlong_buffer_penalty_factor", 1.0)
    if file.get("rl_config.overlong_buffer_enable", False) and length:
        out.put("reward.overlong_buffer", length, "from rl_config.overlong_buffer")
        out.put("reward.overlong_factor", factor, "from rl_config.overlong_buffer_penalty_factor")
    if file.get("rl_config.multi_turn_enable", False):
        text = f"{shown(file.get('rl_config.tool_config_path'))}: name an environment of yours (docs/turns.md)"
        out.undecided.append(("turns.environment", text))
        turns = common.whole(file.get("rl_config.max_tool_calls"))
        if turns:
            out.put("turns.max_turns", turns + 1, "from rl_config.max_tool_calls")
    for role in ("reward", "reference"):
        if file.get(f"rl_config.{role}_resource"):
            text = f"the {role} has no NPUs of its own here"
            out.lost.append((f"rl_config.{role}_resource: {shown(file.get(f'rl_config.{role}_resource'))}", text))


LOST = {
    "generate_config.gpu_memory_utilization": common.CACHE,
    "generate_config.infer_pipeline_parallel_size": "a replica has tensor parallelism only",
    "generate_config.infer_expert_parallel_size": "rollout.ascend.expert_parallel deals experts over the tensor ranks",
    "generate_config.offload_train_optimizer": common.OFFLOAD,
    "generate_config.offload_train_grad": common.OFFLOAD,
    "generate_config.offload_train_param": common.OFFLOAD,
    "megatron_training.swap_optimizer": common.OFFLOAD,
    "megatron_training.no_shuffle": "prompts are shuffled by run.seed",
    "megatron_training.split": "data.heldout and data.validation say what is kept apart",
    "actor_config.moe_tp_extend_ep": "experts are cut over the tensor ranks",
    "actor_config.noop_layers": "set trainer.pipeline_layers",
    "actor_config.load": "weights come from the Hugging Face folder model.source",
    "actor_config.save": "run.folder holds the runs, with their checkpoints",
    "megatron_training.lora_r": common.LORA,
    "actor_config.context_parallel_algo": "trainer.mindspeed.context_parallel: ulysses or ring",
    "generate_config.expert_map_path": "experts are not moved between devices by their load",
    "profiler_config": "observe.trace writes a trace of all processes",
    "actor_config.lora_r": common.LORA,
    "actor_config.lora_alpha": common.LORA,
    "critic_config": "the critic is cut like the trainer and takes its other settings",
    "rl_config.filter_groups_max_batches": "dropped groups are replaced up to workflow.max_refills",
    "rl_config.critic_resource": "the critic is as large as the trainer",
    "rl_config.rollout_max_tokens": "rollout.max_new_tokens is meant",
}
_OF_MEGATRON = (
    *("model", "use_mcore_models", "no_masked_softmax_fusion", "attention_softmax_in_fp32", "seq_length", "stage"),
    *("no_gradient_accumulation_fusion", "tokenizer_type", "attention_dropout", "hidden_dropout", "init_method_std"),
    *("distributed_backend", "no_shared_storage", "no_pad_to_seq_lengths", "dataset_additional_keys", "shape_order"),
    *("lora_alpha", "lora_fusion", "lora_target_modules", "lora_ckpt_filter", "use_rotary_position_embeddings"),
    *("full_shuffle_instruction_dataset", "reset_attention_mask", "reset_position_ids", "variable_seq_lengths"),
)
_OF_ACTOR = (
    *("model", "finetune", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng", "initial_loss_scale"),
    *(
        "num_layers",
        "attention_mask_type",
        "recompute_method",
        "recompute_num_layers",
        "gemm_gradient_accumulation_fusion",
    ),
)
_OF_RL = (
    *("blocking", "use_remove_padding", "use_integrated_worker", "guarantee_order", "async_engine", "rule_reward"),
    *("ref_forward_micro_batch_size", "actor_forward_micro_batch_size", "reward_dispatch_size", "adv_dispatch_size"),
    *("actor_update_dispatch_size", "log_max_throughput", "shuffle_mini_batch", "num_cpus_for_local_task", "gamma"),
    *("lam", "use_dp_batch_balance", "zmq_communication", "overlong_buffer", "overlong_buffer_penalty_factor"),
    *("filter_groups_metric", "filter_groups_train_batch_size", "max_parallel_calls", "max_total_response_length"),
    *("max_tool_response_length", "tool_response_truncate_side", "tool_parser_format", "data_strategy", "beta"),
    *("runtime_env_path", "num_samples_per_step", "actor_rollout_dispatch_size", "ref_dispatch_size", "init_kl_coef"),
    *("dynamic_max_batch_size", "ref_max_packing_token_size", "actor_max_packing_token_size", "kl_penalty"),
    *("wandb_exp_name", "wandb_save_dir", "swanlab_exp_name", "swanlab_save_dir"),
)
_OF_ROLLOUT = (
    *("enforce_eager", "trust_remote_code", "max_model_len", "max_num_batched_tokens", "dtype", "num_scheduler_steps"),
    *("enable_prefix_caching", "ascend_scheduler_config_enabled", "torchair_graph", "sampling_config.seed"),
    *("sampling_config.logprobs", "sampling_config.detokenize"),
)
NEEDLESS = (
    *("defaults", "hydra", "model", "msprobe_config"),
    *(f"megatron_training.{name}" for name in _OF_MEGATRON),
    *(f"actor_config.{name}" for name in _OF_ACTOR),
    *(f"rl_config.{name}" for name in _OF_RL),
    *(f"generate_config.{name}" for name in _OF_ROLLOUT),
)
MINDSPEED_RL = System("MindSpeed-RL", ("rl_config", "megatron_training"), MOVES, derive, LOST, NEEDLESS)
