"""The division of ports among the processes of a run on NPU nodes. B92"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.ports import kernel_ports, overlap, plan_ports, port_warnings

CRITIC = "algorithm.advantage=gae"
LISTS = ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")


def config(*settings, engine="vllm"):
    return parse_config(f"rollout:\n  engine: {engine}\n", settings)


def bounds(text):
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


@given(
    ranks=st.sampled_from([1, 2, 8, 16, 64]),
    replicas=st.integers(1, 40),
    size=st.sampled_from([1, 2, 4, 8, 16]),
    first=st.integers(1024, 30000),
    schedule=st.sampled_from(["separated", "colocated"]),
    lend=st.booleans(),
    how=st.sampled_from(["ranges", "base_port"]),
)
def test_no_port_is_given_to_two_groups_and_none_lies_outside(ranks, replicas, size, first, schedule, lend, how):
    c = config(
        f"trainer.data_parallel={ranks}",
        f"rollout.replicas={replicas}",
        f"rollout.tensor_parallel={size}",
        f"workflow.schedule={schedule}",
        f"workflow.lend={str(lend).lower()}",
        f"placement.hccl_port_range=[{first}, {first + 9999}]",
        f"placement.hccl_ports={how}",
    )
    try:
        plan = plan_ports(c)
    except PlatformError as refused:
        assert how == "base_port" and (lend or schedule == "colocated"), refused
        return
    ranges = list(plan.groups().values())
    ports = [port for wanted in ranges for port in wanted]
    assert len(ports) == len(set(ports))
    assert first <= min(ports) and max(ports) <= first + 9999
    for index, group in enumerate(plan.replicas):
        assert len(group.host) >= 16 and len(group.host) >= min(size, 16), index
    assert len(plan.trainer.host) >= min(ranks, 16)


def test_what_processes_are_told_is_disjoint_and_starts_at_their_base_port():
    plan = plan_ports(config("rollout.replicas=3", "rollout.tensor_parallel=2", CRITIC))
    told = [group.environment() for group in (plan.trainer, plan.critic, *plan.replicas)]
    for environment in told:
        base = int(environment["HCCL_IF_BASE_PORT"])
        assert bounds(environment[LISTS[0]]).start == base
        assert set(range(base, base + 16)) <= set(bounds(environment[LISTS[0]])) and base <= 65520
    named = [bounds(environment[key]) for environment in told for key in LISTS] + [plan.relay]
    assert not [(a, b) for i, a in enumerate(named) for b in named[:i] if set(a) & set(b)]


def test_who_sends_weights_to_a_replica_has_two_ports_of_its_group_on_a_node():
    settings = ("rollout.tensor_parallel=8", "rollout.ascend.transfer=hccl")
    (alone,), (sent,) = (plan_ports(config(*s)).replicas for s in (settings[:1], settings))
    assert len(sent.host) == len(alone.host) + 2 == 2 * 9


def test_a_run_without_a_critic_keeps_no_ports_for_one():
    assert not [name for name in plan_ports(config()).groups() if name.startswith("critic")]
    assert [name for name in plan_ports(config(CRITIC)).groups() if name.startswith("critic")]


def test_two_runs_with_ranges_of_their_own_share_no_port():
    one, other = (
        plan_ports(config("rollout.replicas=4", f"placement.hccl_port_range=[{first}, {first + 499}]"))
        for first in (20000, 20500)
    )
    assert not set().union(*one.groups().values()) & set().union(*other.groups().values())


def test_base_port_leaves_devices_to_hccl():
    """Where MC2 operators run on Atlas A2, HCCL takes no port ranges."""
    environment = plan_ports(config("placement.hccl_ports=base_port")).trainer.environment()
    assert list(environment) == ["HCCL_IF_BASE_PORT"]


def test_auto_names_no_port():
    plan = plan_ports(config("placement.hccl_ports=auto", "workflow.schedule=colocated"))
    assert plan.trainer.environment() == dict.fromkeys(LISTS, "auto") == plan.replicas[0].environment()
    assert plan.groups() == {}


def test_replicas_in_the_trainers_process_have_its_ports():
    plan = plan_ports(config("workflow.schedule=colocated", engine="reference"))
    assert plan.replicas == ()


@pytest.mark.parametrize(
    "settings, said",
    [
        (["placement.hccl_port_range=[500, 9000]"], "between 1024 and 65535"),
        (["placement.hccl_port_range=[9000, 8000]"], "the smaller one first"),
        (["placement.hccl_port_range=[60000, 70000]"], r"\[60000, 70000\].*65535"),
        (["placement.hccl_port_range=[20000, 20099]", "rollout.replicas=2"], "has 100 ports, 136 are needed.*widen"),
        (["dock.port=20010", "dock.pairs=4"], "20010-20013.*dock.port"),
        (["placement.hccl_ports=base_port", "workflow.lend=true"], "base_port with 1 replicas.*workflow.lend"),
    ],
)
def test_an_impossible_range_is_refused_and_the_message_names_it(settings, said):
    with pytest.raises(PlatformError, match=said):
        plan_ports(config(*settings))


def test_ports_that_the_kernel_hands_out_are_warned_of_unless_reserved():
    plan = plan_ports(config("placement.hccl_port_range=[40000, 41000]"))
    handed_out = range(32768, 61000)
    assert len(port_warnings(plan, handed_out)) == len(plan.groups())
    assert "ip_local_reserved_ports" in port_warnings(plan, handed_out)[0]
    assert port_warnings(plan, handed_out, [range(40000, 41001)]) == []
    assert port_warnings(plan_ports(config()), handed_out) == []


def test_hccls_own_defaults_are_warned_of():
    plan = plan_ports(config("placement.hccl_port_range=[16600, 17000]"))
    assert [w for w in port_warnings(plan, range(0)) if "defaults" in w and "16666" not in w]


@pytest.mark.parametrize("reserved, kept", [("", ()), ("60000-60015,7000", (range(60000, 60016), range(7000, 7001)))])
def test_the_kernels_settings_are_read(tmp_path, reserved, kept):
    (tmp_path / "ip_local_port_range").write_text("32768\t60999\n")
    (tmp_path / "ip_local_reserved_ports").write_text(reserved + "\n")
    assert kernel_ports(tmp_path) == (range(32768, 61000), kept)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_overlap_is_what_both_contain(a, b, c, d):
    assert set(overlap(range(a, b), range(c, d))) == set(range(a, b)) & set(range(c, d))
