"""A setting that was changed and that the others leave without effect is named, with the key that would give it one."""

from dataclasses import replace

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.checks import check
from mindspeed_asyncflow.config.feasibility import findings
from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.rules_unused import rules
from mindspeed_asyncflow.config.schema import Config
from tests.config.test_checks import BOX, TINY

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


def warned(sections):
    return {keys for level, keys, _ in rules(Config.model_validate(sections)) if level == "warning"}


@pytest.mark.parametrize(
    ("idle", "key", "used"),
    [
        ({"algorithm": {"gamma": 0.9}}, "algorithm.advantage", {"algorithm": {"advantage": "reinforce_pp"}}),
        ({"algorithm": {"gae_lambda": 0.9}}, "algorithm.advantage", {"algorithm": {"advantage": "gae"}}),
        ({"algorithm": {"whiten": False}}, "algorithm.advantage", {"algorithm": {"advantage": "gae"}}),
        ({"critic": {"lr": 0.1}}, "algorithm.advantage", {"algorithm": {"advantage": "gae"}}),
        ({"algorithm": {"dual_clip": 3.0, "loss": "cispo"}}, "algorithm.loss", {"algorithm": {"loss": "ppo_clip"}}),
        ({"algorithm": {"clip_high": 0.3, "loss": "sapo"}}, "algorithm.loss", {"algorithm": {"loss": "gspo"}}),
        ({"algorithm": {"dppo_cap": 3.0}}, "algorithm.loss", {"algorithm": {"loss": "dppo_tv"}}),
        (
            {"algorithm": {"loss_horizon": 9}},
            "algorithm.aggregation",
            {"algorithm": {"aggregation": "seq-mean-token-sum-norm"}},
        ),
        ({"algorithm": {"kl_type": "k2"}}, "algorithm.kl_coef", {"algorithm": {"kl_coef": 0.1}}),
        ({"correction": {"cap": 3.0}}, "correction.weight", {"correction": {"weight": "token"}}),
        ({"correction": {"reject_high": 3.0}}, "correction.reject", {"correction": {"reject": "token"}}),
        (
            {"correction": {"stale_power": 0.5}, "workflow": {"max_lag": 0}},
            "workflow.max_lag",
            {"workflow": {"max_lag": 1}},
        ),
        ({"reward": {"overlong_factor": 0.5}}, "reward.overlong_buffer", {"reward": {"overlong_buffer": 2}}),
        ({"turns": {"max_turns": 3}}, "turns.environment", {"turns": {"environment": "calculator"}}),
    ],
)
def test_what_has_no_use_is_named_until_the_setting_is_there_that_uses_it(idle, key, used):
    ((_, named),) = warned(idle)
    assert named == key
    sections = {name: {**idle.get(name, {}), **used.get(name, {})} for name in {*idle, *used}}
    assert not warned(sections)


def test_defaults_are_never_complained_about():
    assert not warned({})


def test_a_weight_in_validation_is_named_with_its_place():
    sources = [{"task": "sort4"}, {"task": "sort5", "weight": 2.0}]
    assert warned({"data": {"validation": sources}}) == {("data.validation[1].weight", "evaluation.prompts")}


@pytest.mark.parametrize(
    "setting",
    [
        *("placement.hccl_ports=auto", "placement.hccl_port_range=[30000, 31000]"),
        *("placement.trainer_expandable_segments=false", "placement.rollout_expandable_segments=false"),
        *("rollout.ascend.graphs=true", "trainer.mindspeed.swap_attention=true"),
    ],
)
@pytest.mark.parametrize("platform", ["auto", "cpu"])
def test_settings_of_npus_are_named_where_a_run_will_be_on_cpus(setting, platform):
    """Also where the machine decides that, and not the file."""

    def warned(machine, *more):
        config = parse_config("", [f"run.platform={platform}", setting, *more])
        return [f.keys for f in check(config, machine, TINY) if f.message.startswith("has no use")]

    assert warned(BOX) == [(setting.partition("=")[0], "run.platform")]
    assert warned(replace(BOX, npus=4), "run.platform=auto") == []


def test_experts_over_devices_are_named_where_a_model_has_none():
    config = parse_config("", ["run.platform=npu", "rollout.ascend.expert_parallel=true"])
    keys = [f.keys for f in check(config, replace(BOX, npus=4), TINY) if f.level == "warning"]
    assert ("rollout.ascend.expert_parallel", "model.source") in keys
    some = describe(TINY | {"model_type": "qwen3_moe", **EXPERTS})
    assert not [keys for _, keys, _ in findings(config, replace(BOX, npus=4), some) if "expert" in keys[0]]
