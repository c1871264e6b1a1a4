"""Keys of verl's trainer configurations (FSDP and Megatron, and its fully asynchronous recipe)."""

from __future__ import annotations

from mindspeed_asyncflow.migration import common, tracking
from mindspeed_asyncflow.migration.foreign import Foreign
from mindspeed_asyncflow.migration.table import Move, Outcome, System, shown
from mindspeed_asyncflow.migration.verl_rest import ACTOR, CORRECTION, LOST, MEGATRON, NEEDLESS, ROLLOUT

ADVANTAGES = {
    "grpo": "grpo",
    "gae": "gae",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "gmpo": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "dppo_tv": "dppo_tv",
}
AGGREGATIONS = {
    name: name for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
}
TRUNCATIONS = {"error": "error", "left": "cut_left", "right": "cut_right"}

MOVES = (
    Move("trainer.experiment_name", "run.name"),
    Move("trainer.device", "run.platform", change={"npu": "npu", "cpu": "cpu", "cuda": "auto"}),
    Move("data.seed", "run.seed"),
    Move("data.max_prompt_length", "data.max_prompt_tokens", 512),
    Move("data.max_response_length", "rollout.max_new_tokens", 512),
    Move("data.truncation", "data.too_long", "error", TRUNCATIONS),
    Move("trainer.total_epochs", "data.epochs", 30),
    Move("trainer.save_freq", "trainer.save_every", change=common.whole),
    Move("trainer.test_freq", "evaluation.every", change=common.whole),
    Move("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    Move(f"{ACTOR}.tau_pos", "algorithm.sapo_tau_positive"),
    Move(f"{ACTOR}.tau_neg", "algorithm.sapo_tau_negative"),
    Move("trainer.critic_warmup", "critic.warmup_steps"),
    Move("algorithm.adv_estimator", "algorithm.advantage", "gae", ADVANTAGES),
    Move("algorithm.gamma", "algorithm.gamma"),
    Move("algorithm.lam", "algorithm.gae_lambda"),
    Move("algorithm.filter_groups.enable", "algorithm.dynamic_sampling"),
    Move(f"{ROLLOUT}.n", "algorithm.group_size", 1),
    Move(f"{ACTOR}.policy_loss.loss_mode", "algorithm.loss", "vanilla", LOSSES),
    Move(f"{ACTOR}.loss_agg_mode", "algorithm.aggregation", "token-mean", AGGREGATIONS),
    Move(f"{ACTOR}.optim.lr", "trainer.lr", 1e-6),
    Move(f"{ACTOR}.optim.weight_decay", "trainer.weight_decay", 0.01),
    Move(f"{ACTOR}.optim.betas", "trainer.betas", [0.9, 0.999]),
    Move(f"{MEGATRON}.pipeline_model_parallel_size", "trainer.pipeline_parallel"),
    Move(f"{MEGATRON}.virtual_pipeline_model_parallel_size", "trainer.virtual_pipeline"),
    Move(f"{MEGATRON}.tensor_model_parallel_size", "trainer.tensor_parallel"),
    Move(f"{MEGATRON}.context_parallel_size", "trainer.context_parallel"),
    Move(f"{MEGATRON}.expert_model_parallel_size", "trainer.expert_parallel"),
    Move("critic.optim.lr", "critic.lr"),
    Move("critic.cliprange_value", "critic.value_clip"),
    Move("critic.grad_clip", "critic.grad_clip"),
    Move(f"{ROLLOUT}.temperature", "rollout.temperature"),
    Move(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel", 2),
    Move(f"{ROLLOUT}.max_num_seqs", "rollout.max_running", 1024),
    Move(f"{ROLLOUT}.update_weights_bucket_megabytes", "rollout.ascend.bucket_mb"),
    Move(f"{ROLLOUT}.val_kwargs.n", "evaluation.answers"),
    Move(f"{ROLLOUT}.val_kwargs.temperature", "evaluation.temperature"),
    Move(f"{ROLLOUT}.over_sample_rate", "workflow.oversample", change=lambda share: 1 + share if share else None),
    Move("reward_model.overlong_buffer.penalty_factor", "reward.overlong_factor"),
)


def derive(file: Foreign, out: Outcome) -> None:
    _data(file, out)
    _batch(file, out)
    _optimizer(file, out)
    _loss(file, out)
    _devices(file, out)
    _reward(file, out)
    tracking.take_verl(file, out)


def _data(file: Foreign, out: Outcome) -> None:
    common.take_model(file.get("actor_rollout_ref.model.path"), "actor_rollout_ref.model.path", out)
    out.put("model.dtype", "bfloat16", "verl trains in bfloat16 with fp32 masters")
    common.take_files(file.get("data.train_files"), "data.train_files", out)
    columns = {"prompt": file.get("data.prompt_key", "prompt"), "answer": "reward_model.ground_truth"}
    if "data.mix" in out.settings:
        mix = [{**source, "columns": columns} for source in out.value("data.mix", [])]
        out.put("data.mix", mix, "from data.train_files, in verl's columns")
    elif "data.task" in out.settings:
        out.put("data.columns", columns, "from data.prompt_key; verl's column of truths")
    rows = common.whole(file.get("data.train_max_samples"))
    if rows:
        out.put("data.size", rows, "from data.train_max_samples")
    held = file.get("data.val_files")
    names = [held] if isinstance(held, str) else held if isinstance(held, list) else []
    if names:
        sources = [{"task": f"file:{common.expanded(name)}", "columns": columns} for name in names]
        out.put("data.validation", sources, "from data.val_files")
    out.put("data.chat", True, "verl puts prompts into the chat template")
    if file.get("data.filter_overlong_prompts", False):
        out.put("data.too_long", "drop", "from data.filter_overlong_prompts")
    if not file.get("data.shuffle", True):
        out.lost.append(("data.shuffle: False", "prompts are shuffled by run.seed"))
    template = file.get("actor_rollout_ref.model.custom_chat_template")
    if template:
        out.undecided.append(("data.chat_template", "custom_chat_template is text in verl and the name of a file here"))


def _batch(file: Foreign, out: Outcome) -> None:
    batch = file.get("data.train_batch_size", 1024)
    mini = file.get(f"{ACTOR}.ppo_mini_batch_size", 256)
    steps, taken = file.get("trainer.total_training_steps"), 1
    if file.has("async_training"):
        _asynchronous(file, out, mini)
    elif _apart(file):
        out.put("workflow.groups_per_step", batch, "from data.train_batch_size")
        out.put("workflow.max_lag", 1, "answers of one step are generated beside training of the step before")
    elif isinstance(batch, int) and isinstance(mini, int) and 0 < mini < batch and batch % mini == 0:
        taken = batch // mini
        out.put("workflow.groups_per_step", mini, f"from {ACTOR}.ppo_mini_batch_size: one optimizer step each")
        out.undecided.append(
            (
                "workflow.max_lag",
                f"verl takes {taken} optimizer steps on each {batch} prompts; here each has its own {mini} prompts, "
                f"on-policy. max_lag: {taken - 1} with schedule separated lets answers be as old as there",
            )
        )
    else:
        out.put("workflow.groups_per_step", batch, "from data.train_batch_size")
    epochs = file.get(f"{ACTOR}.ppo_epochs", 1)
    if epochs != 1:
        out.lost.append((f"{ACTOR}.ppo_epochs: {shown(epochs)}", "every answer is trained once"))
    if isinstance(steps, int) and steps > 0:
        out.put("trainer.steps", steps * taken, f"from trainer.total_training_steps, {taken} optimizer steps each")
    else:
        out.undecided.append(("trainer.steps", "verl counts epochs: set steps to epochs x prompts / groups_per_step"))


def _apart(file: Foreign) -> bool:
    """Whether replicas have devices of their own, as in the recipes that train beside generation."""
    return file.has("async_training") or file.has("rollout.n_gpus_per_node")


def _asynchronous(file: Foreign, out: Outcome, mini: object) -> None:
    """verl's fully asynchronous recipe: a trainer and a pool of replicas with devices of their own."""
    batches = file.get("async_training.require_batches", 1)
    every = file.get("async_training.trigger_parameter_sync_step", 1)
    share = file.get("async_training.staleness_threshold", 0)
    if isinstance(mini, int) and isinstance(batches, int):
        out.put("workflow.groups_per_step", mini * batches, f"from {ACTOR}.ppo_mini_batch_size x require_batches")
    if file.get("async_training.partial_rollout", False):
        out.put("workflow.update", "in_flight", "from async_training.partial_rollout")
    if isinstance(every, int) and isinstance(share, int | float):
        lag = max(1, -int(-every * (1 + share) // 1) - (share == 0))
        out.put("workflow.max_lag", lag, "from trigger_parameter_sync_step and staleness_threshold")
        text = (
            f"verl gives over weights every {every} steps; here after each one, and no token is older than {lag} steps"
        )
        out.undecided.append(("workflow.max_lag", text))
    total = file.get("rollout.total_rollout_steps")
    if total:
        out.undecided.append(("trainer.steps", f"rollout.total_rollout_steps: {total} prompts / groups_per_step"))


def _optimizer(file: Foreign, out: Outcome) -> None:
    clip = file.get(f"{ACTOR}.optim.clip_grad", file.get(f"{ACTOR}.grad_clip", 1.0))
    out.put("trainer.grad_clip", clip, f"from {ACTOR}.grad_clip")
    warm, share = file.get(f"{ACTOR}.optim.lr_warmup_steps", -1), file.get(f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.0)
    if isinstance(warm, int) and warm >= 0:
        out.put("trainer.lr_warmup_steps", warm, f"from {ACTOR}.optim.lr_warmup_steps")
    else:
        common.take_warmup(share, f"{ACTOR}.optim.lr_warmup_steps_ratio", out)
    kind = file.get(f"{ACTOR}.optim.lr_scheduler_type", file.get(f"{ACTOR}.optim.lr_decay_style", "constant"))
    if kind in ("constant", "cosine", "linear"):
        out.put("trainer.lr_decay", kind, f"from {ACTOR}.optim")
    else:
        out.lost.append((f"{ACTOR}.optim.lr_decay_style: {shown(kind)}", "the rate is constant, linear or cosine"))


def _loss(file: Foreign, out: Outcome) -> None:
    clip = file.get(f"{ACTOR}.clip_ratio", 0.2)
    for side in ("low", "high"):
        key = f"{ACTOR}.clip_ratio_{side}"
        out.put(
            f"algorithm.clip_{side}", file.get(key, clip), f"from {key if file.has(key) else f'{ACTOR}.clip_ratio'}"
        )
    bound = file.get(f"{ACTOR}.clip_ratio_c", 3.0)
    if out.value("algorithm.loss", "ppo_clip") == "ppo_clip":
        out.put("algorithm.dual_clip", bound, f"from {ACTOR}.clip_ratio_c, 3 if not given")
    by_deviation = file.get("algorithm.norm_adv_by_std_in_grpo", True)
    if out.value("algorithm.advantage", "") == "grpo" and not by_deviation:
        out.put("algorithm.advantage", "dr_grpo", "from algorithm.norm_adv_by_std_in_grpo: false")
    if out.value("algorithm.aggregation", "") == "seq-mean-token-sum-norm":
        horizon = file.get(f"{ACTOR}.loss_scale_factor", out.value("rollout.max_new_tokens", 512))
        out.put("algorithm.loss_horizon", horizon, f"from {ACTOR}.loss_scale_factor, the longest answer if not given")
    entropy = file.get(f"{ACTOR}.entropy_coeff", 0)
    if entropy:
        out.lost.append((f"{ACTOR}.entropy_coeff: {shown(entropy)}", common.ENTROPY))
    in_reward = file.get("algorithm.use_kl_in_reward", False)
    in_loss = file.get(f"{ACTOR}.use_kl_loss", False)
    coefficients = file.get("algorithm.kl_ctrl.kl_coef", 0.001), file.get(f"{ACTOR}.kl_loss_coef", 0.001)
    kinds = file.get("algorithm.kl_penalty", "kl"), file.get(f"{ACTOR}.kl_loss_type", "low_var_kl")
    if in_reward and file.get("algorithm.kl_ctrl.type", "fixed") != "fixed":
        out.lost.append(("algorithm.kl_ctrl.type", "algorithm.kl_coef is constant; a moving one has no equivalent"))
    if in_reward and in_loss:
        out.undecided.append(("algorithm.kl_in", "verl has a KL term in loss and reward; here it is in one: the loss"))
    keys = (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type") if in_loss else ("algorithm.kl_ctrl.kl_coef",) * 2
    place = "loss" if in_loss or not in_reward else "reward"
    amount = coefficients[1] if in_loss else coefficients[0] if in_reward else 0
    common.take_kl(amount, kinds[1] if in_loss else kinds[0], place, (keys[0], keys[1]), out)
    _correction(file, out)
    common.take_sampling(file, out, {f"{ROLLOUT}.top_p": 1, f"{ROLLOUT}.top_k": -1})


def _correction(file: Foreign, out: Outcome) -> None:
    """Against the difference between the policy that sampled and the one that learns."""
    bypass = file.get(f"{CORRECTION}.bypass_mode", file.get(f"{CORRECTION}.bypass_old_logprob_for_rollout", False))
    bypass = bypass or file.get(f"{ACTOR}.use_rollout_log_probs", False)
    out.put(
        "algorithm.proximal", "rollout" if bypass else "current", f"from {CORRECTION}.bypass_mode, off if not given"
    )
    weight = file.get(f"{CORRECTION}.rollout_is")
    cap = file.get(f"{CORRECTION}.rollout_is_threshold", 2.0)
    if weight in ("token", "sequence", "geometric") and not bypass:
        out.put("correction.weight", weight, f"from {CORRECTION}.rollout_is")
        out.put("correction.cap", cap, f"from {CORRECTION}.rollout_is_threshold")
    elif weight:
        out.lost.append((f"{CORRECTION}.rollout_is: {shown(weight)}", "the weight of a bypass is the ratio itself"))
    reject = file.get(f"{CORRECTION}.rollout_rs")
    high = file.get(f"{CORRECTION}.rollout_rs_threshold", cap)
    low = file.get(f"{CORRECTION}.rollout_rs_threshold_lower")
    if reject in ("token", "sequence", "geometric") and isinstance(high, int | float) and high > 0:
        out.put("correction.reject", reject, f"from {CORRECTION}.rollout_rs")
        out.put("correction.reject_high", high, f"from {CORRECTION}.rollout_rs_threshold")
        out.put(
            "correction.reject_low", 1 / high if low is None else low, f"from {CORRECTION}.rollout_rs_threshold_lower"
        )
    elif reject:
        out.lost.append(
            (f"{CORRECTION}.rollout_rs: {shown(reject)}", "correction.reject knows token, sequence, geometric")
        )


def _devices(file: Foreign, out: Outcome) -> None:
    nodes, each = file.get("trainer.nnodes", 1), file.get("trainer.n_gpus_per_node", 8)
    devices = nodes * each if isinstance(nodes, int) and isinstance(each, int) else None
    longest = common.longest(out)
    tokens = file.get(f"{ACTOR}.ppo_max_token_len_per_gpu")
    samples = file.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if isinstance(tokens, int) and file.get(f"{ACTOR}.use_dynamic_bsz", False):
        out.put("trainer.micro_batch_tokens", tokens, f"from {ACTOR}.ppo_max_token_len_per_gpu")
    elif isinstance(samples, int) and longest:
        out.put("trainer.micro_batch_tokens", samples * longest, f"from {ACTOR}.ppo_micro_batch_size_per_gpu x longest")
    megatron = file.has(MEGATRON) or file.get(f"{ACTOR}.strategy") == "megatron"
    sizes = {name: out.value(f"trainer.{name}_parallel", 1) for name in ("tensor", "pipeline", "context")}
    checkpointed = file.get("actor_rollout_ref.model.enable_gradient_checkpointing", True)
    if megatron:
        cut = sizes["tensor"] != 1
        out.put(
            "trainer.sequence_parallel",
            file.get(f"{MEGATRON}.sequence_parallel", True) if cut else False,
            f"from {MEGATRON}",
        )
        shards = file.get(f"{MEGATRON}.use_distributed_optimizer", True)
        out.put("trainer.distributed_optimizer", shards, f"from {MEGATRON}.use_distributed_optimizer")
        part = f"{MEGATRON}.override_transformer_config.recompute_granularity"
        out.put("trainer.recompute", bool(file.get(part)), f"from {part}")
    else:
        out.put("trainer.recompute", checkpointed, "from actor_rollout_ref.model.enable_gradient_checkpointing")
        out.put("trainer.distributed_optimizer", True, "FSDP cuts optimizer state too")
        text = (
            "FSDP cuts weights over all ranks; here tensor, pipeline and expert sizes do: `asyncflow plan` finds them"
        )
        out.undecided.append(("trainer.tensor_parallel", text))
    common.take_ranks(devices, sizes, "trainer.nnodes x trainer.n_gpus_per_node", out)
    if _apart(file):
        nodes, each = file.get("rollout.nnodes", 1), file.get("rollout.n_gpus_per_node", 8)
        pool = nodes * each if isinstance(nodes, int) and isinstance(each, int) else None
        common.take_replicas(pool, out.value("rollout.tensor_parallel", 1), "rollout.nnodes x n_gpus_per_node", out)
    else:
        out.put("workflow.schedule", "colocated", "verl's trainer and rollout take turns on the same devices")
        out.put("workflow.max_lag", 0, "on-policy, as turns are")
        common.take_replicas(devices, out.value("rollout.tensor_parallel", 1), "all of trainer.*", out)


def _reward(file: Foreign, out: Outcome) -> None:
    own, name = file.get("custom_reward_function.path"), file.get("custom_reward_function.name", "compute_score")
    if own:
        text = f"{own}:{name} has verl's arguments: wrap it, and name it in reward.scorers as MODULE:FUNCTION"
        out.undecided.append(("reward.scorers", text))
    else:
        text = "verl chooses by data_source; an answer must equal its truth here, unless you name a scorer (math)"
        out.undecided.append(("reward.scorers", text))
    length = common.whole(file.get("reward_model.overlong_buffer.len"))
    if file.get("reward_model.overlong_buffer.enable", False) and length:
        out.put("reward.overlong_buffer", length, "from reward_model.overlong_buffer.len")
    if file.get("reward_model.enable", False):
        text = "no reward model runs here; a server that scores can be asked by the scorer http"
        out.undecided.append(("reward_model.enable: true", text))
    lora = file.get("actor_rollout_ref.model.lora.rank", file.get("actor_rollout_ref.model.lora_rank", 0))
    if lora:
        out.lost.append((f"actor_rollout_ref.model.lora_rank: {shown(lora)}", common.LORA))
    if file.get(f"{ROLLOUT}.multi_turn.enable", False):
        out.undecided.append(
            ("turns.environment", "tools and turns of verl: name an environment of yours, docs/turns.md")
        )


VERL = System("verl", ("actor_rollout_ref",), MOVES, derive, LOST, NEEDLESS)
