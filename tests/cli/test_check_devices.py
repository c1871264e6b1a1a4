"""Device memory by kind and the expected step, as `asyncflow check` shows them for NPUs."""

import pytest

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.cli import devices, preflight
from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.machine import assume, probe

SIZED = """
run: {platform: npu}
model: {source: configs/models/qwen2.5-7b, dtype: bfloat16}
cluster: {devices: 8}
data: {max_prompt_tokens: 1024}
trainer: {tensor_parallel: 4, sequence_parallel: true, recompute: true}
rollout: {replicas: 4, max_new_tokens: 1024, kv_cache_mb: 8000}
dock: {arena_mb: 256}
workload: {prompt_mean: 110, prompt_p95: 250, answer_mean: 600, answer_p95: 1000}
"""


def found(*overrides, assumed=8):
    config = parse_config(SIZED, overrides)
    machine = assume(assumed, config.cluster, probe())
    return {f.keys[0]: f.message for f in preflight.inspect(config, machine) if f.level == "error"}


def test_sizes_that_fit_are_accepted():
    assert found() == {}


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("trainer.tensor_parallel=1 trainer.sequence_parallel=false", "trainer.micro_batch_tokens", "gradients 30.5"),
        ("rollout.kv_cache_mb=60000", "rollout.kv_cache_mb", "kv cache 62.9"),
        ("cluster.memory_gb=20", "rollout.kv_cache_mb", "has 18.0 GB to use"),
        ("cluster.devices=7", "cluster.devices", "is 7, and 8 NPUs are wanted"),
    ],
)
def test_what_a_device_or_the_cluster_does_not_hold_is_refused_by_kind(override, key, said):
    assert said in found(*override.split())[key]


def test_the_expected_step_follows_the_slower_side():
    slow, fast = (parse_config(SIZED, [f"rollout.replicas={n}"]) for n in (1, 4))
    work = preflight.device_work(fast, assume(8, fast.cluster, probe()), [])
    (few, few_tokens), (many, many_tokens) = devices.expected(slow, work), devices.expected(fast, work)
    assert few.limit == "generation" and few.step_s > 1.2 * many.step_s > 1.2 * many.train_s
    assert many_tokens == pytest.approx(few_tokens * few.step_s / many.step_s)


def test_a_critic_is_not_priced_and_that_is_said():
    config = parse_config(SIZED, ["algorithm.advantage=gae"])
    work = preflight.device_work(config, assume(12, config.cluster, probe()), [])
    assert next(devices.expected_lines(config, work)).startswith("not estimated: algorithm.advantage")


def test_on_a_cpu_nothing_is_said_of_devices(capsys):
    assert cli.main(["check", "configs/qwen_tiny_cpu.yaml"]) == 0
    assert "== device memory" not in capsys.readouterr().out


def test_figures_of_npus_carry_their_label(capsys, tmp_path):
    path = tmp_path / "sized.yaml"
    path.write_text(SIZED)
    assert cli.main(["check", str(path), "--platform", "npu", "--assume-devices", "8"]) == 0
    out = capsys.readouterr().out
    assert "simulated, not run on NPUs" in out and "a rollout rank, of 57.6 usable" in out


def test_buffers_of_groups_fit_what_a_device_leaves_to_libraries():
    """Nine of megatron and one for weights, twice 200 MiB each; where devices are shared, a replica's as well."""
    config = parse_config(SIZED, [])
    assert list(devices.communicator_findings(config, {})) == []
    (found,) = devices.communicator_findings(config, {"HCCL_BUFFSIZE": "400"})
    assert found.level == "error" and found.keys[0] == "cluster.memory_reserve"
    assert "take 8.4 GB of a device (twice 400 MiB (HCCL_BUFFSIZE) for each of 10 of a trainer" in found.message
    assert "6.4 GB are left to libraries" in found.message
    shared = [*("workflow.schedule=colocated", "workflow.max_lag=0"), "rollout.tensor_parallel=4", "rollout.replicas=1"]
    both = parse_config(SIZED, [*shared, "rollout.ascend.hccl_buffer_mb=600"])
    (found,) = devices.communicator_findings(both, {})
    assert "take 6.7 GB" in found.message and "a trainer rank: 4.2 GB + twice 600 MiB" in found.message
    assert found.keys == ("cluster.memory_reserve", "rollout.ascend.hccl_buffer_mb")
    (found,) = devices.communicator_findings(config, {"HCCL_BUFFSIZE": "much"})
    assert "HCCL_BUFFSIZE='much'" in found.message


def test_buffers_of_a_replica_are_named_by_the_numbers_that_make_them_too_large():
    config = parse_config(SIZED, ["rollout.tensor_parallel=2", "rollout.ascend.hccl_buffer_mb=99999"])
    (found,) = devices.communicator_findings(config, {})
    size = 2 * 2 * 99999 * 2**20 / 1e9
    said = "twice 99999 MiB (rollout.ascend.hccl_buffer_mb) for each of 2 of a rollout rank"
    assert f"take {size:.1f} GB of a device ({said}: {size:.1f} GB), and 6.4 GB" in found.message
    assert "trainer" not in found.message


def test_senders_of_weights_take_buffers_on_the_trainers_devices():
    """Two ranks and five replicas: three senders on a device, each with one group."""
    given = ["trainer.data_parallel=2", "trainer.tensor_parallel=1", "rollout.replicas=5"]
    native = [*given, "rollout.ascend.transfer=hccl", "rollout.ascend.hccl_buffer_mb=800"]
    assert list(devices.communicator_findings(parse_config(SIZED, given), {})) == []
    (found,) = devices.communicator_findings(parse_config(SIZED, native), {})
    assert "twice 800 MiB (rollout.ascend.hccl_buffer_mb) for each of 3 of senders beside it: 5.0 GB" in found.message
    assert "for each of 10 of a trainer rank: 4.2 GB" in found.message


def test_the_trainers_own_variable_sets_its_buffers_and_not_the_replicas():
    def found(text, *more):
        config = parse_config(SIZED, [f"placement.trainer_env={{HCCL_BUFFSIZE: '{text}'}}", *more])
        return list(devices.communicator_findings(config, {"HCCL_BUFFSIZE": "200"}))

    (large,) = found("99999", "rollout.tensor_parallel=2")
    assert large.keys == ("cluster.memory_reserve", "placement.trainer_env") and "of a rollout" not in large.message
    (wrong,) = found("abc")
    assert wrong.keys == ("placement.trainer_env",) and "HCCL_BUFFSIZE='abc'" in wrong.message
    assert found("100") == []


def test_a_large_reference_policy_on_host_cpus_is_warned_of_with_its_time():
    def warned(text, *overrides):
        config = parse_config(text, overrides)
        machine = assume(8, config.cluster, probe())
        found = preflight.inspect(config, machine)
        return [f.message for f in found if (f.level, f.keys) == ("warning", ("algorithm.kl_coef",))]

    (said,) = warned(SIZED, "algorithm.kl_coef=0.001")
    assert "7.1 billion weights for each token" in said and "about 42 minutes a step" in said  # 2 x 7.07e9 x 179,883
    assert warned(SIZED) == warned("run: {platform: npu}", "algorithm.kl_coef=0.001", "model.dtype=bfloat16") == []
