"""Settings that cannot work together, or not on this machine, are refused before any worker starts."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.checks import Finding, check, refuse_errors
from mindspeed_asyncflow.config.host_memory import memory_bytes
from mindspeed_asyncflow.config.machine import MIB, Machine
from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.errors import ConfigError

TINY = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


class FullMachine(Machine):
    """Every library is installed."""

    __slots__ = ()

    def has_module(self, name: str) -> bool:
        return True


CONFIGS = Path(__file__).parents[2] / "configs"
BOX = FullMachine(2, 0, 24 << 30, 20 << 30, 8 << 30, 50 << 30)


def errors(*overrides: str, machine: Machine = BOX, model=TINY) -> dict[str, str]:
    """First key of each error, and its text."""
    found = check(parse_config("", overrides), machine, model)
    return {f.keys[0]: str(f) for f in found if f.level == "error"}


def test_the_defaults_have_no_error():
    assert errors() == {}


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["algorithm.group_size=1"], "algorithm.group_size", "2 or more"),
        (["algorithm.group_size=1", "algorithm.advantage=dr_grpo"], "algorithm.group_size", "2 or more"),
        (["workflow.groups_per_step=31", "trainer.data_parallel=2"], "workflow.groups_per_step", "take 32"),
        (["workflow.groups_per_step=2", "trainer.data_parallel=6"], "workflow.groups_per_step", "take 6"),
        (["trainer.stream_groups=5"], "workflow.groups_per_step", "5 at a time"),
        (["workflow.overlap=false"], "workflow.overlap", "max_lag must be 0"),
        (["data.heldout=10000"], "data.heldout", "leave none"),
        (["data.size=420"], "data.size", "20 training prompts < 32"),
        (["data.size=420", "data.drop_last=false", "data.epochs=3"], "trainer.steps", "data ends after 3 steps"),
        (["data.epochs=1", "trainer.steps=301"], "trainer.steps", "raise data.epochs to 2"),
        (["rollout.top_p=0.9"], "rollout.top_p", "must be 1.0"),
        (["rollout.top_k=20"], "rollout.top_k", "must be -1"),
        (["workflow.update=rolling"], "workflow.update", "set rollout.replicas to 2"),
        (["trainer.micro_batch_tokens=68"], "trainer.micro_batch_tokens", "69 tokens"),
        (["rollout.max_new_tokens=4000", "dock.arena_mb=8"], "dock.arena_mb", "512 samples"),
        (["trainer.betas=[0.9, 1.0]"], "trainer.betas", "below 1"),
        (["trainer.virtual_pipeline=2"], "trainer.virtual_pipeline", "pipeline_parallel"),
        (["trainer.sequence_parallel=true"], "trainer.sequence_parallel", "tensor_parallel"),
        (["trainer.tensor_parallel=3"], "trainer.tensor_parallel", "does not divide"),
        (["trainer.expert_parallel=2"], "trainer.expert_parallel", "no experts"),
        (["data.task=file:nothing.jsonl"], "data.task", "no such file or folder"),
        (["model.source=nothing"], "model.source", "no such folder"),
        (["rollout.kv_cache_mb=1", "rollout.max_new_tokens=600"], "rollout.kv_cache_mb", "664 tokens"),
    ],
)
def test_impossible_combination_names_key_and_fix(overrides, key, said):
    """B81, B86, B88"""
    model = None if key == "model.source" else TINY
    found = errors(*overrides, model=model)
    assert list(found) == [key]
    assert said in found[key]


def test_divisible_batches_pass():
    """B81"""
    assert errors("workflow.groups_per_step=6", "trainer.data_parallel=6", "trainer.stream_groups=3") == {}


def test_fewer_kept_versions_than_the_trainer_may_be_ahead_are_warned_of():
    found = check(parse_config("", ["workflow.max_lag=3"]), BOX, TINY)
    assert [(f.level, f.keys[0]) for f in found] == [("warning", "workflow.keep_versions")]
    assert "set keep_versions to 4" in found[0].message
    assert check(parse_config("", ["workflow.max_lag=3", "workflow.keep_versions=4"]), BOX, TINY) == []


def test_the_relay_takes_memory_for_the_kept_versions_and_the_one_that_is_written():
    config, model = parse_config("", ["workflow.keep_versions=5", "model.dtype=bfloat16"]), describe(TINY)
    assert memory_bytes(config, BOX, model)["weight relay"] == 6 * 2 * model.parameters


def test_a_finding_says_first_what_it_is_about_and_names_every_key():
    assert str(Finding("error", ("a.b",), "is 3; take 4")) == "error: a.b: is 3; take 4"
    assert str(Finding("error", ("a.b", "c.d"), "a.b is 3; take 4")) == "error: a.b is 3; take 4"
    many = ("a.b", "c.d", "e.f")
    assert str(Finding("warning", many, "3 wanted, 2 there")) == "warning: 3 wanted, 2 there (a.b, c.d, e.f)"
    assert str(Finding("error", many, "a.b is 3; take 4")) == "error: a.b is 3; take 4 (c.d, e.f)"


def test_all_errors_are_listed_together_and_warnings_do_not_stop():
    with pytest.raises(ConfigError, match="3 settings cannot work") as caught:
        settings = parse_config("", ["algorithm.group_size=1", "rollout.top_p=0.5", "rollout.top_k=3"])
        refuse_errors(check(settings, BOX, TINY))
    assert all(key in str(caught.value) for key in ("algorithm.group_size", "rollout.top_p", "rollout.top_k"))
    warnings = refuse_errors(check(parse_config("", ["data.heldout=100"]), BOX, TINY))
    assert [w.keys[0] for w in warnings] == ["evaluation.prompts"]


@pytest.mark.parametrize(
    ("overrides", "machine", "said"),
    [
        (["rollout.threads=64"], replace(BOX, cpus=4), "64 CPUs wanted by each process, 4 available"),
        (["run.ray_cpus=64"], replace(BOX, cpus=4), "64 CPUs wanted, 4 available"),
        (
            ["rollout.replicas=32"],
            replace(BOX, cpus=4, memory_bytes=1 << 40, free_memory_bytes=1 << 40),
            "at most 32 make",
        ),
        (["run.platform=npu"], BOX, "2 NPUs wanted (1 trainer ranks + 1 rollout replicas x 1), 0 available"),
        (["trainer.data_parallel=2", "rollout.replicas=2"], replace(BOX, npus=2), "4 NPUs wanted"),
        (["rollout.kv_cache_mb=40000"], BOX, "the machine has 24576"),
        (["dock.arena_mb=9000"], BOX, "free in /dev/shm"),
    ],
)
def test_resources_that_cannot_exist_are_refused_with_wanted_and_available(overrides, machine, said):
    """B93"""
    found = errors(*overrides, machine=machine)
    assert said in " ".join(found.values())


def test_more_ranks_than_cores_are_allowed_on_cpu_and_said():
    overrides = ["trainer.tensor_parallel=2", "trainer.pipeline_parallel=2", "rollout.replicas=2"]
    found = check(parse_config("", overrides), BOX, TINY)
    assert [f.level for f in found] == ["warning"]
    assert "6 CPUs wanted" in found[0].message


def test_busy_port_is_refused():
    """B92"""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in errors(f"dock.port={port}")["dock.port"]
    assert errors(f"dock.port={port}") == {}


def test_head_size_without_a_vllm_kernel_is_refused_on_cpu_only():
    odd = TINY | {"head_dim": 24}
    assert "head size 24" in errors(model=odd)["model.source"]
    assert errors("rollout.engine=reference", model=odd) == {}
    assert errors(machine=replace(BOX, npus=8), model=odd) == {}


def test_missing_library_names_the_way_out():
    bare = Machine(2, 0, 24 << 30, 20 << 30, 8 << 30, 50 << 30)
    found = errors("model.source=package:no_such_module_here", machine=bare)
    assert "no_such_module_here is not installed" in found["model.source"]


def test_model_folder_is_read_for_its_sizes(tmp_path):
    big = TINY | {"hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 80, "num_attention_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(big))
    assert "MiB of memory wanted" in " ".join(errors(f"model.source={tmp_path}", model=None).values())
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in errors(f"model.source={tmp_path}", model=None)["model.source"]
    (tmp_path / "config.json").unlink()
    assert "is missing" in errors(f"model.source={tmp_path}", model=None)["model.source"]


def test_run_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in errors(f"run.folder={tmp_path}/file/runs")["run.folder"]


def test_this_machine_is_measured():
    from mindspeed_asyncflow.config.machine import probe

    machine = probe("a/folder/that/does/not/exist")
    assert machine.cpus >= 1
    assert 64 * MIB < machine.free_memory_bytes <= machine.memory_bytes
    assert machine.disk_bytes > 0


@pytest.mark.parametrize("rope", [{"rope_scaling": {"type": "yarn"}}, {"rope_parameters": {"rope_type": "linear"}}])
def test_rotary_scaling_that_the_trainer_does_not_know_is_refused_and_of_an_assumed_cluster_said(rope):
    levels = {}
    for assumed in (False, True):
        found = check(parse_config("", []), replace(BOX, assumed=assumed), TINY | rope)
        levels[assumed] = [f.level for f in found if "rotary scaling" in f.message]
    assert levels == {False: ["error"], True: ["warning"]}
    plain = check(parse_config("", []), BOX, TINY | {"rope_scaling": None})
    assert not any("rotary" in f.message for f in plain)


@pytest.mark.parametrize(("all_dim", "refused"), [(1.0, False), (0.7, True), (None, True)])
def test_yarn_of_deepseek_is_known_where_it_does_not_lengthen_rotated_parts(all_dim, refused):
    model = json.loads((CONFIGS / "models/deepseek-r1/config.json").read_text())
    model["rope_scaling"]["mscale_all_dim"] = all_dim
    found = check(parse_config("", []), BOX, model)
    assert any("rotary" in f.message for f in found) == refused
