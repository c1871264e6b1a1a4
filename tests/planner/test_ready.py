"""What a plan writes can be read, passes the checks, and says what was expected."""

from __future__ import annotations

import pytest

from mindspeed_asyncflow.config import checks, parse_config
from mindspeed_asyncflow.config.machine import Machine
from mindspeed_asyncflow.planner import ready
from mindspeed_asyncflow.planner.memory import usable_bytes
from tests.planner.models import QWEN_7B, configuration
from tests.planner.test_search import plan

MANY = Machine(
    cpus=640, npus=64, memory_bytes=1 << 42, free_memory_bytes=1 << 42, shm_bytes=1 << 42, disk_bytes=1 << 42
)


@pytest.fixture(scope="module")
def planned():
    config = configuration("cluster.devices=16", "workflow.groups_per_step=32", "workflow.max_lag=3")
    found = plan(config, QWEN_7B, most=12)
    return config, found, ready.ready(found.best, config)


def test_the_written_settings_come_back_and_pass_the_checks(planned):
    _, _, settings = planned
    text = ready.yaml_text(settings, ["head"])
    back = parse_config(text)
    assert back == settings
    npu = back.model_copy(update={"run": back.run.model_copy(update={"platform": "npu"})})
    errors = [str(f) for f in checks.check(npu, MANY, QWEN_7B) if f.level == "error"]
    assert not [e for e in errors if "vllm is not installed" not in e]
    assert text.startswith("# head\n") and len(text.splitlines()) < 60


def test_deadlines_leave_time_for_what_is_expected(planned):
    _, found, settings = planned
    assert settings.rollout.timeout_s >= 4 * found.best.expected.generate_s
    assert settings.workflow.watchdog_s >= settings.rollout.timeout_s
    assert settings.dock.lease_s >= settings.rollout.timeout_s
    assert settings.workflow.keep_versions > settings.workflow.max_lag


def test_the_simulation_section_stays_the_users(planned):
    config, _, settings = planned
    assert settings.simulation == config.simulation


def test_the_next_best_are_named_with_what_they_lose(planned):
    config, found, _ = planned
    figures = ready.summary(found, config, 16, usable_bytes(config))
    assert len(figures["next"]) == 3
    for other in figures["next"]:
        assert "limits" in other["why"] or "waits for" in other["why"]
    assert figures["best"]["tokens_per_s"] > 0
    assert set(figures["best"]["memory_gb"]) == {"trainer", "rollout"}
    assert "simulated" in figures["label"]
