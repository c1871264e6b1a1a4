"""Replicas in a Python environment with other releases of torch and numpy than everything else. Real Ray."""

import asyncio
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import EngineError, PlatformError
from mindspeed_asyncflow.platforms.devices import VISIBLE_ENV
from mindspeed_asyncflow.service.actors import spawn
from mindspeed_asyncflow.service.placement import Cluster
from mindspeed_asyncflow.service.sides import check_environments

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PINNED = dict(
    line.split("==") for line in (ROOT / "scripts/requirements/second.txt").read_text().split() if "==" in line
)


class Echo:
    """Lives in the other environment."""

    def double(self, arrays):
        return [array + array for array in arrays]

    def version(self, library):
        return __import__(library).__version__

    def break_torch(self):
        import torch

        raise torch.linalg.LinAlgError("the matrix is singular")


class Sees:
    """Lives on devices."""

    def __init__(self):
        self.visible = os.environ.get(VISIBLE_ENV)


@pytest.fixture(scope="module")
def cluster():
    """Its node has two devices, of the numbers 6 and 2."""
    before = dict(os.environ)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["PYTHONPATH"] = str(HERE)  # where its processes find the classes above
    os.environ[VISIBLE_ENV] = "6,2"
    made = Cluster(Config(), "cpu")
    made.make_folder()
    try:
        made.start()
        yield
    finally:
        made.stop()
        made.remove_folder()
        os.environ.clear()
        os.environ.update(before)


def test_a_worker_in_another_environment_understands_ours_and_we_understand_it(cluster, second_python):
    """Arrays of either release of numpy; an error of a library that we need not have."""
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.float32([0.5, -1.5]), np.zeros((0, 4)), np.float64(2.5)]

    async def talk():
        worker = spawn("echo", resources={}, python=second_python, environment={"MARKED": "yes"})
        try:
            await worker.build(Echo)
            assert await worker.version("numpy") == PINNED["numpy"] != np.__version__
            assert (await worker.version("torch")).startswith(PINNED["torch"])
            assert not PINNED["torch"].startswith(version("torch").split("+")[0])
            doubled = await worker.double(arrays)
            with pytest.raises(EngineError, match=r"torch\S*LinAlgError: the matrix is singular"):
                await worker.break_torch()
            return doubled
        finally:
            worker.kill()

    doubled = asyncio.run(talk())
    assert [(a.dtype, a.shape) for a in doubled] == [(a.dtype, a.shape) for a in arrays]
    assert all((a == 2 * b).all() for a, b in zip(doubled, arrays))


def test_a_process_sees_its_own_devices_ascending_whether_ray_narrows_the_list_or_not(cluster):
    """B90: a list that is not ascending, physical numbers, the override flag."""
    noset = {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}

    async def seen(name, count, environment):
        worker = spawn(name, resources={"NPU": count}, environment=environment)
        try:
            await worker.build(Sees)
            return sorted(map(int, await worker.devices())), await worker.get("visible")
        finally:
            worker.kill()

    async def both():
        one = await asyncio.gather(seen("first", 1.0, None), seen("second", 1.0, noset))
        return one, await seen("narrowed", 2.0, None), await seen("whole", 2.0, noset)

    one, narrowed, whole = asyncio.run(asyncio.wait_for(both(), 120))
    assert sorted(one) == [([2], "2"), ([6], "6")]
    assert narrowed == whole == ([2, 6], "2,6")


def placed(**named):
    return parse_config("", [f"placement.{side}_python={python}" for side, python in named.items()])


def test_pythons_are_asked_on_the_nodes_before_a_worker_starts(cluster, second_python, tmp_path):
    """B93: Ray starts a Python that is not there again and again, and only warns of another version."""
    found = check_environments(placed(rollout=second_python), 120)
    assert found["placement.rollout_python"].versions["torch"].startswith(PINNED["torch"])
    assert check_environments(Config(), 120) == {}
    with pytest.raises(PlatformError, match=r"placement\.trainer_python: \S*nowhere/python does not exist"):
        check_environments(placed(trainer=tmp_path / "nowhere/python", rollout=second_python), 120)
    old = tmp_path / "python"
    answer = json.dumps(["3.12.1", {"ray": version("ray"), "torch": "2.10.0"}, []])
    old.write_text(f"#!/bin/sh\necho '{answer}'\n")
    old.chmod(0o755)
    with pytest.raises(
        PlatformError, match=r"placement\.rollout_python has Python 3\.12, the run itself has Python 3\.1"
    ):
        check_environments(placed(rollout=old), 120)


# What Ray may carry for a run beside values of the language itself.
OURS = re.compile(r"mindspeed_asyncflow\.(?!.*(torch|numpy))[\w.]+$")


def test_a_whole_run_has_replicas_in_another_environment_and_no_message_depends_on_a_library(second_python, tmp_path):
    names = tmp_path / "names.json"
    settings = [
        *("trainer.steps=3", "workflow.groups_per_step=8", "evaluation.prompts=16", "rollout.engine=reference"),
        *(f"run.folder={tmp_path / 'runs'}", "algorithm.kl_coef=0.01", f"placement.rollout_python={second_python}"),
    ]
    command = [sys.executable, HERE / "inspected_train.py", names, "train", ROOT / "configs" / "qwen_tiny_cpu.yaml"]
    command += [word for setting in settings for word in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "latest"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["samples_trained"] == 3 * 64 and summary["max_lag"] <= 1
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4
    lived = dict(re.findall(r"(\w+) is process \d+ with (.*)", (folder / "log.txt").read_text()))
    assert f"torch {PINNED['torch']}" in lived["rollout0"] and f"numpy {PINNED['numpy']}" in lived["rollout0"]
    for other in ("trainer0", "reference0"):
        assert f"torch {version('torch')}" in lived[other] and f"numpy {np.__version__}" in lived[other]
    crossed = json.loads(names.read_text())
    assert {"mindspeed_asyncflow.workflow.workers.Question"} <= set(crossed["sent"])
    assert {"mindspeed_asyncflow.records.Completion"} <= set(crossed["received"])
    assert [name for name in crossed["sent"] + crossed["received"] if not OURS.match(name)] == []
