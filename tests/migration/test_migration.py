"""Settings of other systems become ours: values, what they mean here, and nothing is dropped in silence."""

import contextlib
import copy

import pytest
import yaml

from mindspeed_asyncflow.config import checks, parse_config
from mindspeed_asyncflow.config.machine import Machine
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.migration import SYSTEMS, migrate
from mindspeed_asyncflow.migration.areal import sides
from mindspeed_asyncflow.migration.foreign import Foreign
from mindspeed_asyncflow.migration.table import apply

VERL = """
data:
  train_files: /data/questions.parquet
  max_prompt_length: 1024
  max_response_length: 2048
  train_batch_size: 128
  shuffle: false
actor_rollout_ref:
  model: {path: /models/small, enable_gradient_checkpointing: true}
  actor:
    strategy: megatron
    ppo_mini_batch_size: 128
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: ${oc.select:limits.tokens,9000}
    clip_ratio_high: 0.27
    use_kl_loss: true
    kl_loss_coef: 0.002
    kl_loss_type: low_var_kl
    entropy_coeff: 0.01
    optim: {lr: 3e-6, lr_warmup_steps_ratio: 0.1}
    megatron: {tensor_model_parallel_size: 2, param_offload: true}
  rollout: {n: 6, tensor_model_parallel_size: 4, top_k: 50, gpu_memory_utilization: 0.7, response_length: 1}
algorithm: {adv_estimator: grpo}
trainer: {total_training_steps: 40, nnodes: 2, n_gpus_per_node: 8, device: npu, blue_moon: 3}
"""
MINDSPEED_RL = """
megatron_training:
  reuse_fp32_param: true
  stage: ray_grpo
  bf16: true
  tokenizer_name_or_path: /models/small
  global_batch_size: 32
  train_iters: 90
  use_distributed_optimizer: true
  data_path: ./prepared
actor_config:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  num_layer_list: 7,5
  lr: 2e-6
  micro_batch_size: 2
  recompute_granularity: full
rl_config:
  n_samples_per_prompt: 8
  mini_batch_size: 16
  adv_estimator: group_norm
  clip_higher_enable: true
  clip_ratio_low: 0.2
  clip_ratio_high: 0.3
  init_kl_coef: 0.0
  verifier_function: [acc_for_dapo, my_rule]
  verifier_weight: [0.75, 0.25]
  actor_resource: {num_npus: 8}
generate_config:
  infer_tensor_parallel_size: 2
  sampling_config: {max_tokens: 900, temperature: 0.9, top_p: 1.0}
"""
AREAL = """
experiment_name: words
seed: 7
allocation_mode: vllm:d4t2+megatron:(attn:d2p2t2|ffn:d1p2t1e4)
total_train_steps: 30
rollout: {max_head_offpolicyness: 2, consumer_batch_size: "${train_dataset.batch_size}"}
gconfig: {n_samples: 4, max_new_tokens: 700, temperature: 1.0}
actor:
  path: /models/small
  ppo_n_minibatches: 2
  eps_clip: 0.3
  use_decoupled_loss: true
  behav_imp_weight_cap: 4.0
  kl_ctl: 0.0
  reward_scaling: 5.0
  reward_norm: {mean_level: group, std_level: group}
  optimizer: {lr: 1e-5, warmup_steps_proportion: 0.0}
train_dataset: {path: /data/words.jsonl, batch_size: 64, max_length: 300}
"""
FILES = {"verl": VERL, "mindspeed-rl": MINDSPEED_RL, "areal": AREAL}


def migrated(text):
    made = migrate(text)
    return made, parse_config(made.text)


def keys(pairs):
    return {key.split(":")[0] for key, _ in pairs}


def test_verl_keys_arrive_under_our_names():
    made, c = migrated(VERL)
    assert (made.system, c.run.platform) == ("verl", "npu")
    assert (c.model.source, c.model.dtype, c.data.task) == ("/models/small", "bfloat16", "file:/data/questions.parquet")
    assert c.data.columns == {"prompt": "prompt", "answer": "reward_model.ground_truth"}
    assert (c.data.max_prompt_tokens, c.rollout.max_new_tokens) == (1024, 2048)
    assert (c.algorithm.advantage, c.algorithm.group_size, c.workflow.groups_per_step) == ("grpo", 6, 128)
    assert (c.algorithm.clip_low, c.algorithm.clip_high, c.algorithm.dual_clip) == (0.2, 0.27, 3.0)
    assert (c.algorithm.kl_coef, c.algorithm.kl_in, c.algorithm.kl_type) == (0.002, "loss", "k3")
    assert (c.trainer.steps, c.trainer.lr, c.trainer.lr_warmup_steps) == (40, 3e-6, 4)
    assert (c.trainer.tensor_parallel, c.trainer.data_parallel, c.rollout.replicas) == (2, 8, 4)
    assert (c.workflow.schedule, c.workflow.max_lag) == ("colocated", 0)
    assert c.trainer.micro_batch_tokens == 9000


def test_what_verl_has_and_we_have_not_is_listed_with_its_reason():
    made, _ = migrated(VERL)
    lost = keys(made.lost)
    for key in ("data.shuffle", "actor_rollout_ref.actor.entropy_coeff", "actor_rollout_ref.rollout.top_k"):
        assert key in lost
    assert "actor_rollout_ref.actor.megatron.param_offload" in lost
    assert all(why for _, why in made.lost)
    assert made.unknown == ("trainer.blue_moon: 3",)
    assert "reward.scorers" in keys(made.undecided)


def test_every_line_says_which_key_it_came_from_and_nothing_equals_our_default():
    made, c = migrated(VERL)
    default = parse_config("")
    settings = [line for line in made.text.splitlines() if not line.startswith("#") and not line.endswith(":")]
    assert len(settings) == made.settings
    assert all("  # " in line for line in settings)
    assert "trainer.data_parallel" not in made.text  # nested, not dotted
    assert any("lr: 3e-06" in line and "actor_rollout_ref.actor.optim.lr" in line for line in settings)
    assert any("weight_decay" in line and "verl's default" in line for line in settings)
    for section, values in yaml.safe_load(made.text).items():
        for name in values:
            assert getattr(getattr(c, section), name) != getattr(getattr(default, section), name)


def test_several_optimizer_steps_on_one_batch_become_steps_with_batches_of_their_own():
    made, c = migrated(VERL.replace("ppo_mini_batch_size: 128", "ppo_mini_batch_size: 32"))
    assert (c.workflow.groups_per_step, c.trainer.steps) == (32, 160)
    assert "workflow.max_lag" in keys(made.undecided)


def test_verls_asynchronous_recipe_gets_devices_of_its_own_and_a_lag():
    more = "async_training: {staleness_threshold: 0.5, trigger_parameter_sync_step: 2, partial_rollout: true}\n"
    _, c = migrated(VERL + more + "rollout: {nnodes: 1, n_gpus_per_node: 8}\n")
    assert (c.workflow.schedule, c.workflow.update, c.workflow.max_lag) == ("separated", "in_flight", 3)
    assert (c.rollout.replicas, c.workflow.keep_versions) == (2, 4)


def test_mindspeed_rl_keys_arrive_under_our_names():
    made, c = migrated(MINDSPEED_RL)
    assert (made.system, c.run.platform, c.model.dtype) == ("MindSpeed-RL", "npu", "bfloat16")
    assert (c.workflow.groups_per_step, c.trainer.steps) == (16, 180)  # two optimizer steps of each iteration
    assert (c.trainer.pipeline_layers, c.trainer.data_parallel, c.rollout.replicas) == ([7, 5], 2, 4)
    assert (c.algorithm.clip_low, c.algorithm.clip_high) == (0.2, 0.3)
    assert (c.rollout.temperature, c.rollout.max_new_tokens, c.trainer.recompute) == (0.9, 900, True)
    assert c.trainer.mindspeed.reuse_fp32_param
    assert [(s.name, s.weight) for s in c.reward.scorers] == [("math", 0.75)]
    assert {"data.task", "reward.scorers"} <= keys(made.undecided)


@pytest.mark.parametrize(("experts", "overlap"), [(2, "alltoall"), (1, "off")])
def test_messages_of_experts_run_beside_computation_where_there_are_any(experts, overlap):
    key = "moe_alltoall_overlap_comm"
    text = MINDSPEED_RL.replace(
        "megatron_training:\n", f"megatron_training:\n  {key}: true\n  moe_grouped_gemm: true\n"
    )
    text = text.replace("actor_config:\n", f"actor_config:\n  expert_model_parallel_size: {experts}\n")
    made, c = migrated(text)
    assert (c.trainer.mindspeed.moe_overlap, c.trainer.moe_grouped_gemm) == (overlap, True)
    assert any(key in name for name in keys(made.lost)) == (overlap == "off")


def test_areal_keys_arrive_under_our_names():
    made, c = migrated(AREAL)
    assert (made.system, c.run.name, c.run.seed) == ("AReaL", "words", 7)
    assert (c.rollout.replicas, c.rollout.tensor_parallel) == (4, 2)
    assert (c.trainer.data_parallel, c.trainer.pipeline_parallel, c.trainer.expert_parallel) == (2, 2, 4)
    assert (c.workflow.groups_per_step, c.workflow.max_lag, c.trainer.steps) == (32, 4, 60)
    assert (c.algorithm.proximal, c.correction.weight, c.correction.cap) == ("current", "token", 4.0)
    assert (c.algorithm.clip_low, c.algorithm.clip_high) == (0.3, 0.3)
    assert "actor.reward_scaling" in keys(made.lost)


@pytest.mark.parametrize(
    ("text", "rollout", "trainer", "sign"),
    [
        ("sglang.d4p1t1+d2p1t1", {"data": 4, "pipeline": 1, "tensor": 1}, {"data": 2, "pipeline": 1, "tensor": 1}, "+"),
        ("vllm:d2t4|fsdp:d8", {"data": 2, "tensor": 4}, {"data": 8}, "|"),
        ("vllm:d1+megatron:d2p2t2c1", {"data": 1}, {"data": 2, "pipeline": 2, "tensor": 2, "context": 1}, "+"),
    ],
)
def test_allocation_modes_are_read(text, rollout, trainer, sign):
    assert sides(text) == (rollout, trainer, sign)


def test_an_allocation_that_is_not_understood_is_left_to_the_user():
    made, _ = migrated(AREAL.replace("vllm:d4t2+megatron:(attn:d2p2t2|ffn:d1p2t1e4)", "everything"))
    assert "rollout.replicas" in keys(made.undecided)


@pytest.mark.parametrize("name", FILES)
def test_the_check_of_what_came_out_finds_only_what_is_left_to_the_user(name):
    _, c = migrated(FILES[name])
    machine = Machine(64, 16, 1 << 41, 1 << 41, 1 << 40, 1 << 42, assumed=True)
    left = {"data.task", "model.source", "rollout.top_k", "trainer.steps", "data.epochs", "rollout.kv_cache_mb"}
    errors = [f for f in checks.check(c, machine) if f.level == "error" and not left & set(f.keys)]
    assert errors == []


def test_references_between_keys_are_followed_and_circles_are_named():
    file = Foreign("a: {b: 3, c: '${.b}', d: 'x-${a.c}', e: '${oc.env:HOME}', f: '${a.g}', g: '${a.f}'}", "f.yaml")
    assert (file.get("a.c"), file.get("a.d"), file.get("a.e")) == (3, "x-3", None)
    assert file.unresolved == {"a.e": "${oc.env:HOME}"}
    with pytest.raises(ConfigError, match=r"a\.f.*circle"):
        file.get("a.f")


def test_a_value_that_we_refuse_is_left_to_the_user_with_the_reason_and_the_rest_still_loads():
    made, c = migrated(VERL.replace("lr: 3e-6", "lr: -3"))
    assert ("trainer.lr" in keys(made.undecided)) and c.trainer.lr == parse_config("").trainer.lr
    assert any(key == "trainer.lr" and "-3" in why and "greater than" in why for key, why in made.undecided)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("junk", ["words", -1, [1], {"a": 1}, True, 1e300, "1e-6", ["x", None]])
def test_no_value_of_any_key_breaks_the_table(name, junk):
    whole = yaml.safe_load(FILES[name])

    def places(node, path=()):
        for key, value in node.items():
            yield (*path, key)
            if isinstance(value, dict):
                yield from places(value, (*path, key))

    for *path, leaf in places(whole):
        changed = copy.deepcopy(whole)
        node = changed
        for part in path:
            node = node[part]
        node[leaf] = junk
        with contextlib.suppress(ConfigError):  # said in words
            apply(SYSTEMS[name], Foreign(yaml.safe_dump(changed), "f.yaml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "no key by which a system is known"),
        ("gconfig: {}\nrl_config: {}", "keys of mindspeed-rl and areal"),
        ("- 1", "mapping"),
        ("a: [", "line 1"),
        ("rl_config: {a: 1, a: 2}", "given twice"),
        ("megatron_training: {stage: dpo}", "stage: dpo"),
        ("train_dataset: {path: x}", "given answers"),
    ],
)
def test_what_is_no_settings_file_is_refused_in_words(text, said):
    with pytest.raises(ConfigError, match=said):
        migrate(text, "theirs.yaml")


@pytest.mark.parametrize(
    ("system", "settings", "trackers", "online"),
    [
        ("verl", {"trainer": {"logger": ["console", "wandb"]}}, ("wandb",), True),
        ("verl", {"trainer": {"logger": "['console']"}}, (), False),
        ("verl", {"trainer": {"logger": ["mlflow", "tensorboard"]}}, ("tensorboard", "mlflow"), True),
        ("verl", {"trainer": {"logger": "tensorboard"}}, ("tensorboard",), False),
        ("verl", {}, ("tensorboard",), False),
        ("mindspeed-rl", {"rl_config": {"use_wandb": True}}, ("wandb",), True),
        ("mindspeed-rl", {"rl_config": {"use_tensorboard": False}}, (), False),
        ("mindspeed-rl", {"rl_config": {"use_swanlab": True, "swanlab_mode": "local"}}, ("swanlab",), False),
        ("areal", {"stats_logger": {"wandb": {"mode": "online"}}}, ("wandb",), True),
        ("areal", {"stats_logger": {"wandb": {"mode": "offline"}}}, ("wandb",), False),
        ("areal", {"stats_logger": {"wandb": {"mode": "disabled"}}}, ("tensorboard",), False),
        ("areal", {"stats_logger": {"tensorboard": {"path": "/x"}, "swanlab": {"mode": "local"}}},
         ("tensorboard", "swanlab"), False),
    ],
)  # fmt: skip
def test_where_metrics_go_is_carried_over(system, settings, trackers, online):
    written = yaml.safe_load({"verl": VERL, "mindspeed-rl": MINDSPEED_RL, "areal": AREAL}[system])
    for section, values in settings.items():
        written[section] = written.get(section, {}) | values
    migrated = migrate(yaml.safe_dump(written), system=system)
    observe = parse_config(migrated.text).observe
    assert (observe.beside, observe.online) == (trackers, online)
    assert any(key == "observe.trackers_python" for key, _ in migrated.undecided) == online


def test_trackers_that_are_not_here_and_projects_are_not_forgotten():
    written = yaml.safe_load(VERL)
    written["trainer"] |= {"logger": ["console", "clearml"], "project_name": "my project"}
    migrated = migrate(yaml.safe_dump(written), system="verl")
    assert [why for key, why in migrated.lost if "clearml" in key] == [
        "observe.trackers knows tensorboard, wandb, swanlab, mlflow"
    ]
    assert parse_config(migrated.text).observe.project == "my project"
