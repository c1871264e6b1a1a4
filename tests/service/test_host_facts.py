import socket
from types import SimpleNamespace

import pytest

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.service import host_facts
from mindspeed_asyncflow.service.host_link import HostFailed, launch_words
from mindspeed_asyncflow.service.host_logs import LogTail
from mindspeed_asyncflow.service.superpod import forwarded, refuse_differences, refuse_twice


def test_an_address_must_be_one_of_this_host():
    assert host_facts.own_address("127.0.0.1", []) == "127.0.0.1"
    with pytest.raises(PlatformError, match=r"203\.0\.113\.7 is no address of this host: put address=IP"):
        host_facts.own_address("203.0.113.7", [])


def test_a_name_that_means_the_host_itself_is_no_address_for_others():
    """Debian gives a machine's own name 127.0.1.1."""
    peer = "192.0.2.1"
    try:
        assert not host_facts.own_address("127.0.1.1", [peer]).startswith("127.")
    except PlatformError as error:  # this machine has no way out at all
        assert "put address=IP" in str(error)


def test_a_host_with_one_address_need_not_be_told_which(monkeypatch):
    interfaces = {
        "lo": [SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")],
        "eth0": [SimpleNamespace(family=socket.AF_INET, address="10.0.0.4")],
        "down": [SimpleNamespace(family=socket.AF_INET, address="10.9.0.4")],
    }
    states = {name: SimpleNamespace(isup=name != "down") for name in interfaces}
    monkeypatch.setattr(host_facts.psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(host_facts.psutil, "net_if_stats", lambda: states)
    assert host_facts.own_address("", []) == "10.0.0.4"
    states["down"].isup = True
    with pytest.raises(PlatformError, match=r"which of 10\.0\.0\.4, 10\.9\.0\.4 .* put address=IP"):
        host_facts.own_address("", [])


def test_connections_between_hosts_never_take_the_proxy():
    found = host_facts.without_proxy(["10.0.0.1", "10.0.0.2"], {"no_proxy": "localhost,10.0.0.2"})
    assert found == {name: "localhost,10.0.0.2,10.0.0.1" for name in ("no_proxy", "NO_PROXY")}


def test_a_run_folder_that_a_host_does_not_see_is_refused(tmp_path):
    file = tmp_path / "seen"
    file.write_text("token")
    host_facts.check_shared(file, "token")
    with pytest.raises(PlatformError, match="holds something else"):
        host_facts.check_shared(file, "another")
    with pytest.raises(PlatformError, match=r"not on storage that all hosts share.*No such file.*run\.folder"):
        host_facts.check_shared(tmp_path / "missing", "token")


def test_the_fingerprint_of_source_changes_with_any_file_of_it(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    before = host_facts.fingerprint(tmp_path)
    (tmp_path / "notes.txt").write_text("no source")
    assert host_facts.fingerprint(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert host_facts.fingerprint(tmp_path) != before


def test_hosts_that_differ_are_refused_with_every_difference():
    same = {"Python": "3.11.9", "ray": "2.60.0", "torch": "2.7.1"}
    refuse_differences({"a": same, "b": dict(same)})
    with pytest.raises(HostFailed) as caught:
        refuse_differences({"a": same, "b": same | {"ray": "absent"}, "c": same | {"Python": "3.11.4"}})
    assert "b has ray absent, a has 2.60.0" in str(caught.value)
    assert "c has Python 3.11.4, a has 3.11.9" in str(caught.value)


def test_two_names_of_one_machine_are_refused():
    refuse_twice({"a": "10.0.0.1", "b": "10.0.0.2"})
    with pytest.raises(HostFailed, match=r"a and c are one machine \(10\.0\.0\.1\)"):
        refuse_twice({"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.1"})


def test_a_launcher_names_the_host_where_it_wants_or_at_its_end():
    *ssh, command = launch_words("ssh -p 22 root@{host} --", "n1", "/env/bin/python")
    assert ssh == ["ssh", "-p", "22", "root@n1", "--"]
    assert command.startswith("cd ") and command.endswith("-m mindspeed_asyncflow.service.host_agent")
    assert launch_words("enter", "n1", "python")[:2] == ["enter", "n1"]


def test_hosts_get_the_variables_of_the_launching_shell_that_the_run_depends_on():
    given = {"HCCL_BUFFSIZE": "200", "LD_LIBRARY_PATH": "/a", "HOME": "/b", "RAY_ADDRESS": "x:1", "ASCEND_HOME": "/c"}
    assert sorted(forwarded(given.items())) == ["ASCEND_HOME", "HCCL_BUFFSIZE", "LD_LIBRARY_PATH"]


def test_hosts_get_what_the_set_env_of_nnal_exports():
    nnal = {"ATB_HOME_PATH": "/n/atb", "ASDOPS_LOG_LEVEL": "ERROR", "LCAL_COMM_ID": "", "LCCL_DETERMINISTIC": "0"}
    assert forwarded({**nnal, "SHELL": "/bin/sh"}.items()) == nnal


def test_logs_of_a_node_are_passed_on_once_and_by_process(tmp_path):
    logs = tmp_path / "session_2026-01-01" / "logs"
    logs.mkdir(parents=True)
    said = []
    tail = LogTail(tmp_path, said.append)
    (logs / "worker-ab-01000000-77.err").write_text(":actor_name:Host\nfirst\nsecond, not ended")
    (logs / "raylet.err").write_text("E raylet\n")
    tail.finish()
    assert sorted(said) == ["process 77: first", "process 77: second, not ended", "raylet: E raylet"]
