"""Which platform a process is on."""

import sys
import types

import pytest

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms import base


@pytest.fixture
def fake_npus(monkeypatch):
    """A torch_npu that sees `count` devices."""

    def install(count):
        library = types.ModuleType("torch_npu")
        library.__spec__ = types.SimpleNamespace(name="torch_npu")
        library.npu = types.SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)
        monkeypatch.setitem(sys.modules, "torch_npu", library)

    monkeypatch.delenv(base.PLATFORM_ENV, raising=False)
    return install


def test_without_torch_npu_it_is_the_cpu(monkeypatch):
    monkeypatch.delenv(base.PLATFORM_ENV, raising=False)
    assert base.current().name == "cpu"


@pytest.mark.parametrize(("count", "name"), [(0, "cpu"), (2, "npu")])
def test_auto_takes_npus_only_where_some_are_seen(fake_npus, count, name):
    fake_npus(count)
    assert base.current("auto").name == name


def test_environment_replaces_auto_but_not_a_named_platform(fake_npus, monkeypatch):
    fake_npus(2)
    monkeypatch.setenv(base.PLATFORM_ENV, "cpu")
    assert base.current("auto").name == "cpu"
    assert base.current("npu").name == "npu"


def test_unknown_platform_names_the_knob():
    with pytest.raises(PlatformError, match=r"run\.platform"):
        base.current("gpu")
