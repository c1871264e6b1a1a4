"""Native transfer of weights: what cannot be together with it, and where it has no use."""

from __future__ import annotations

import pytest

from mindspeed_asyncflow.config import parse_config, rules_transfer, rules_unused


def found(*settings: str, platform: str = "npu") -> list[tuple[str, str, str]]:
    given = [f"run.platform={platform}", "rollout.ascend.transfer=hccl", *settings]
    return [(level, ", ".join(keys), text) for level, keys, text in rules_transfer.rules(parse_config("", given))]


@pytest.mark.parametrize("platform", ["cpu", "npu"])
@pytest.mark.parametrize("update", ["delayed", "in_flight", "rolling"])
def test_it_goes_with_every_way_of_updating_on_both_platforms(platform: str, update: str) -> None:
    assert found(f"workflow.update={update}", "rollout.replicas=2", platform=platform) == []


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["workflow.schedule=colocated", "workflow.max_lag=0"], "workflow.schedule", "on the trainer's devices"),
        (["workflow.lend=true"], "workflow.lend", "on the trainer's devices"),
        (["workflow.relay=mirror"], "workflow.relay", "mirrors belong to the relay, not to hccl"),
        (["rollout.ascend.graphs=true"], "rollout.ascend.graphs", "graphs fail at the first replay"),
        (["placement.hccl_ports=base_port"], "placement.hccl_ports", "two processes on one device"),
        (
            ["trainer.data_parallel=32", "cluster.devices_per_node=16"],
            "cluster.devices_per_node",
            "32 trainer ranks are more than the 16 devices",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_both_settings(settings: list[str], key: str, said: str) -> None:
    ((level, keys, text),) = found(*settings)
    assert level == "error" and keys == f"rollout.ascend.transfer, {key}" and said in text


def test_what_only_npus_refuse_is_no_error_on_cpus() -> None:
    assert found("rollout.ascend.graphs=true", "trainer.data_parallel=32", platform="cpu") == []


def test_whole_versions_are_sent_so_differences_have_no_use() -> None:
    ((level, keys, _),) = found("workflow.relay_delta=true")
    assert level == "warning" and keys.startswith("workflow.relay_delta")


def test_it_is_used_on_cpus_too_and_its_bucket_only_with_it() -> None:
    def unused(*settings: str) -> list[str]:
        config = parse_config("", ["run.platform=cpu", *settings])
        return [keys[0] for _, keys, _ in rules_unused.rules(config)]

    assert unused("rollout.ascend.transfer=hccl", "rollout.ascend.bucket_mb=1") == []
    assert unused("rollout.ascend.bucket_mb=1") == ["rollout.ascend.bucket_mb"]
    assert unused("rollout.ascend.transfer=hccl", "rollout.engine=reference") == ["rollout.ascend.transfer"]
