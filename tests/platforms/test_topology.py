import pytest

from mindspeed_asyncflow.errors import ConfigError, PlatformError
from mindspeed_asyncflow.platforms import topology
from mindspeed_asyncflow.platforms.topology import Host, cluster_nodes, declared_hosts, format_hosts, parse_hosts

SPOD = """        SDID                           : 16777216
        Super Pod Size                 : 384
        Super Pod ID                   : 7
        Server Index                   : 4
"""


def test_a_host_file_reads_back_what_it_says():
    hosts = parse_hosts("# all\nnode0\n\n node1 slots=8 superpod=b address=10.0.0.5 # the second\n")
    assert hosts == [Host("node0"), Host("node1", 8, "b", "10.0.0.5")]
    assert parse_hosts(format_hosts(hosts)) == hosts


def test_all_mistakes_of_a_host_file_are_told_with_their_lines():
    with pytest.raises(ConfigError) as caught:
        parse_hosts("a slots=0\nb speed=9\na b\n-oProxyCommand=x\nc slots=1 slots=2\nd\nd\n", "hosts.txt")
    message = str(caught.value)
    assert message.startswith("hosts.txt: expected `host [slots=N]")
    for said in (
        "line 1: slots=0",
        "line 2: 'speed=9'",
        "line 3: 'b' is none of",
        "line 4: '-oProxyCommand=x' is no host name",
        "line 5: slots is given twice",
        "line 7: d stands in line 6 already",
    ):
        assert said in message


def test_a_host_file_without_a_host_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no host in it"):
        parse_hosts("# nobody\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        topology.read_hosts(tmp_path / "missing")


def test_the_superpod_is_hccls_own_name_before_what_npu_smi_says(tmp_path, monkeypatch):
    tool = tmp_path / "npu-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'E'\n{SPOD}E\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert topology.own_superpod({}) == "7"
    assert topology.own_superpod({"HCCL_LOGIC_SUPERPOD_ID": "left"}) == "left"
    tool.write_text("#!/bin/sh\necho 'Super Pod ID : 9'; exit 1\n")
    assert topology.own_superpod({}) == ""


def ray_node(ip, alive=True, **resources):
    return {"NodeID": f"id-{ip}", "NodeManagerAddress": ip, "NodeManagerHostname": "", "Alive": alive} | {
        "Resources": {name.replace("_", ":"): count for name, count in resources.items()}
    }


def test_without_a_topology_file_nodes_of_a_superpod_follow_each_other_by_address():
    listed = [
        ray_node("10.0.0.10", NPU=8.0, superpod_a=1.0),
        ray_node("10.0.0.2", NPU=8.0, superpod_b=1.0),
        ray_node("10.0.0.9", NPU=4.0, superpod_a=1.0),
        ray_node("10.0.0.1", alive=False, NPU=8.0),
    ]
    found = cluster_nodes(listed, "NPU", None)
    assert [(n.ip, n.devices, n.superpod) for n in found] == [
        ("10.0.0.9", 4, "a"),
        ("10.0.0.10", 8, "a"),
        ("10.0.0.2", 8, "b"),
    ]


def test_a_topology_file_gives_order_and_superpods_and_must_know_every_node():
    hosts = parse_hosts("second address=10.0.0.2 superpod=x\n10.0.0.1 superpod=y\n")
    listed = [ray_node("10.0.0.1", NPU=1.0), ray_node("10.0.0.2", NPU=1.0)]
    assert [(n.ip, n.superpod) for n in cluster_nodes(listed, "NPU", hosts)] == [("10.0.0.2", "x"), ("10.0.0.1", "y")]
    with pytest.raises(PlatformError, match=r"node 10\.0\.0\.3 of the Ray cluster is not in the topology"):
        cluster_nodes([*listed, ray_node("10.0.0.3")], "NPU", hosts)


def test_a_variable_names_the_topology_file(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a slots=2\n")
    assert declared_hosts({"ASYNCFLOW_TOPOLOGY": str(file)}) == [Host("a", 2)]
    assert declared_hosts({}) is None
