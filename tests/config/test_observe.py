"""What `asyncflow check` says about trackers: never an error, always what to do."""

import json

import pytest

from mindspeed_asyncflow.config import checks, parse_config
from mindspeed_asyncflow.config.machine import Machine

HERE = Machine(2, 0, 24 << 30, 24 << 30, 12 << 30, 50 << 30)


def found(monkeypatch, observe, modules=(), free=True):
    monkeypatch.setattr(Machine, "has_module", lambda self, module: module in ("vllm", "tensorboard", *modules))
    monkeypatch.setattr(Machine, "port_is_free", lambda self, port: free)
    findings = checks.check(parse_config(json.dumps({"observe": observe})), HERE)
    return [f for f in findings if f.keys[0].startswith("observe.")]


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow"])
def test_a_library_that_is_missing_is_named_with_the_way_out(monkeypatch, name):
    (finding,) = found(monkeypatch, {"trackers": ["tensorboard", name]})
    assert (finding.level, finding.keys) == ("warning", ("observe.trackers",))
    assert name in finding.message and "scripts/trackers.sh" in finding.message
    assert found(monkeypatch, {"trackers": [name]}, modules=(name,)) == []
    assert found(monkeypatch, {"trackers": [name], "trackers_python": "elsewhere/python"}) == []


def test_another_python_does_not_help_tensorboard(monkeypatch):
    monkeypatch.setattr(Machine, "has_module", lambda self, module: module == "vllm")
    config = parse_config('{"observe": {"trackers_python": "elsewhere/python"}}')
    assert [f.level for f in checks.check(config, HERE) if "tensorboard is not installed" in f.message] == ["warning"]


def test_an_endpoint_that_cannot_be_is_named(monkeypatch):
    (finding,) = found(monkeypatch, {"prometheus_port": 9400})
    assert "prometheus_client" in finding.message
    (finding,) = found(monkeypatch, {"prometheus_port": 9400}, modules=("prometheus_client",), free=False)
    assert finding.level == "warning" and "9400 is in use" in finding.message
    assert found(monkeypatch, {"prometheus_port": 9400}, modules=("prometheus_client",)) == []
    assert found(monkeypatch, {"prometheus_port": 0}, modules=("prometheus_client",), free=False) == []
