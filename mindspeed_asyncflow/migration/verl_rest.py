"""Keys of verl that have no equivalent, with the reason, and those that need none."""

from __future__ import annotations

from mindspeed_asyncflow.migration import common

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
LOST = {
    f"{ROLLOUT}.gpu_memory_utilization": common.CACHE,
    f"{ROLLOUT}.free_cache_engine": common.OFFLOAD,
    f"{ROLLOUT}.pipeline_model_parallel_size": "a replica has tensor parallelism only",
    f"{ROLLOUT}.data_parallel_size": "set rollout.replicas; a replica has no data parallelism inside",
    f"{ROLLOUT}.expert_parallel_size": "see rollout.ascend.expert_parallel",
    f"{ROLLOUT}.engine_kwargs": "options of vllm-ascend go into rollout.ascend.additional",
    f"{ROLLOUT}.quantization": "rollout has the data type of the trainer",
    f"{MEGATRON}.param_offload": common.OFFLOAD,
    f"{MEGATRON}.grad_offload": common.OFFLOAD,
    f"{MEGATRON}.optimizer_offload": common.OFFLOAD,
    f"{MEGATRON}.expert_tensor_parallel_size": "experts are cut over the tensor ranks",
    f"{ACTOR}.router_replay": "expert choices are not replayed",
    f"{ROLLOUT}.enable_rollout_routing_replay": "expert choices are not replayed",
    "actor_rollout_ref.model.mtp": "multi-token-prediction layers are left out",
    f"{ACTOR}.fsdp_config": "the trainer is Megatron, not FSDP",
    f"{ACTOR}.policy_loss": "parameters of losses that are not here",
    f"{ACTOR}.checkpoint": "checkpoints hold everything (docs/checkpoints.md)",
    f"{ACTOR}.ulysses_sequence_parallel_size": "set trainer.context_parallel",
    "critic": "the critic is cut like the trainer and takes its other settings",
    f"{ROLLOUT}.val_kwargs": "evaluation samples from the whole distribution, at evaluation.temperature",
    "data.custom_cls": "a class of prompts is data.task: python:MODULE:CLASS (docs/data.md)",
    "data.apply_chat_template_kwargs": "the chat template gets no arguments",
    "algorithm.filter_groups": "dropped groups are replaced up to workflow.max_refills",
    "algorithm.pf_ppo": "no such weighting of answers",
    "algorithm.use_pf_ppo": "no such weighting of answers",
    "algorithm.kl_ctrl": "algorithm.kl_coef is constant",
    f"{CORRECTION}": "correction.* has no such term",
    "trainer.resume_mode": "`asyncflow train --resume` says it",
    "trainer.default_local_dir": "run.folder holds the runs",
    "trainer.val_before_train": "there is always an evaluation at the start",
    "reward_manager": "scoring is by functions (docs/rewards.md)",
    "reward_model": "scoring is by functions (docs/rewards.md)",
}
_OF_DATA = (
    *(
        "tokenizer",
        "use_shm",
        "val_max_samples",
        "reward_fn_key",
        "val_batch_size",
        "gen_batch_size",
        "tool_config_path",
    ),
    *(
        "return_raw_input_ids",
        "return_raw_chat",
        "return_full_prompt",
        "return_multi_modal_inputs",
        "sampler",
        "datagen",
    ),
    *("dataloader_num_workers", "filter_overlong_prompts_workers", "image_key", "video_key", "image_patch_size"),
    *("validation_shuffle", "trust_remote_code"),
)
_OF_TRAINER = (
    *("balance_batch", "log_val_generations", "esi_redundant_time", "resume_from_path", "del_local_ckpt_after_load"),
    *("default_hdfs_dir", "max_critic_ckpt_to_keep", "ray_wait_register_center_timeout", "rollout_data_dir"),
    *("validation_data_dir", "use_legacy_worker_impl", "controller_nsight_options", "worker_nsight_options"),
    *("npu_profile", "val_only", "profile_steps"),
)
_OF_ACTOR = (
    *("_target_", "profiler", "shuffle", "use_torch_compile", "use_fused_kernels", "optim", "strategy", "megatron"),
    *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "use_dynamic_bsz"),
    *("rollout_n", "calculate_entropy", "entropy_from_logits_with_chunking", "entropy_checkpointing", "profile"),
    *(
        "use_remove_padding",
        "load_weight",
        "data_loader_seed",
        "freeze_vision_tower",
        "nccl_timeout",
        "kl_loss_coef",
        "kl_loss_type",
    ),
)
_OF_MODEL = (
    *("external_lib", "trust_remote_code", "use_remove_padding", "use_fused_kernels", "use_shm", "override_config"),
    *("_target_", "enable_activation_offload", "target_modules", "use_liger", "fused_kernel_options", "tiled_mlp"),
    *("lora", "lora_alpha", "hf_config_path", "tokenizer_path", "exclude_modules"),
)
_OF_ROLLOUT = (
    *("_target_", "name", "mode", "dtype", "prompt_length", "response_length", "ignore_eos", "enforce_eager"),
    *("cudagraph_capture_sizes", "max_num_batched_tokens", "max_model_len", "enable_chunked_prefill", "do_sample"),
    *("enable_prefix_caching", "load_format", "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"),
    *("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "disable_log_stats", "multi_stage_wake_up"),
    *("calculate_log_probs", "trace", "skip_rollout", "skip_dump_dir", "skip_tokenizer_init", "profiler", "prometheus"),
    *("val_kwargs._target_", "val_kwargs.do_sample", "use_block_quant_rollout", "layer_name_map", "checkpoint_engine"),
    *("multi_turn", "agent", "logprobs_mode", "scheduling_policy", "layered_summon", "mtp"),
)
NEEDLESS = (
    *("hydra", "defaults", "global_profiler", "transfer_queue", "ray_kwargs", "ray_init", "actor_rollout_ref.ref"),
    *(
        "actor_rollout_ref.profiler",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.nccl_timeout",
        "algorithm._target_",
        "rollout",
    ),
    *("async_training", "custom_reward_function.name", "critic._target_", "critic.profiler", "reward_model.profiler"),
    *(f"data.{name}" for name in _OF_DATA),
    *(f"trainer.{name}" for name in _OF_TRAINER),
    *(f"{ACTOR}.{name}" for name in _OF_ACTOR),
    *(f"actor_rollout_ref.model.{name}" for name in _OF_MODEL),
    *(f"{ROLLOUT}.{name}" for name in _OF_ROLLOUT),
)
