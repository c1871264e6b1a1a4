"""The Kubernetes examples fit the recipe that they run and name only what exists."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from mindspeed_asyncflow.config import load_config

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
NPU = "huawei.com/Ascend910"


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def spec(request):
    job = yaml.safe_load(request.param.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    return job["spec"]


def groups(spec):
    """(number of pods, Ray's parameters, pod template) of the head and of every group of workers."""
    cluster = spec["rayClusterSpec"]
    head = cluster["headGroupSpec"]
    yield 1, head["rayStartParams"], head["template"]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] == group["maxReplicas"] == group["replicas"], "a run has all of its nodes"
        yield group["replicas"], group["rayStartParams"], group["template"]


def devices(template):
    [container] = template["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert container["resources"]["requests"] == limits, "devices and memory are not shared with others"
    return limits[NPU]


def recipe(spec):
    words = shlex.split(spec["entrypoint"])
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    return load_config(ROOT / words[words.index("--config") + 1], settings)


def test_devices_and_dock_pairs_are_those_of_the_recipe(spec):
    config = recipe(spec)
    assert sum(pods * devices(template) for pods, _, template in groups(spec)) == config.cluster.devices
    assert sum(pods for pods, _, _ in groups(spec)) == config.dock.pairs
    assert all(devices(template) == config.cluster.device.devices_per_node for _, _, template in groups(spec))


def test_ray_is_told_of_the_devices_that_the_plugin_gives(spec):
    for _, parameters, template in groups(spec):
        resources = json.loads(json.loads(parameters["resources"].strip("'")))
        assert resources.pop("NPU") == devices(template)
        assert [name for name in resources if name.startswith("superpod:")], "placement and plans know the superpod"


def test_the_entry_point_names_a_script_and_options_that_exist(spec):
    words = shlex.split(spec["entrypoint"])
    assert words[0] == "bash"
    known = (ROOT / words[1]).read_text(encoding="utf-8")
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"^ +(\S+ \| )*{option}( \| \S+)*\)", known, re.MULTILINE), option


def test_every_pod_has_the_project_and_memory_to_share_and_only_declared_volumes(spec):
    for _, _, template in groups(spec):
        [container] = template["spec"]["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        declared = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert mounted.keys() == declared.keys()
        assert container["workingDir"] == mounted["project"]
        assert mounted["shared-memory"] == "/dev/shm"
        assert declared["shared-memory"]["emptyDir"]["medium"] == "Memory"


def test_under_volcano_all_pods_are_scheduled_together_in_one_superpod():
    [file] = [file for file in FILES if "volcano" in file.stem]
    job = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert job["metadata"]["labels"]["ray.io/scheduler-name"] == "volcano"
    total = sum(pods * devices(template) for pods, _, template in groups(job["spec"]))
    for _, _, template in groups(job["spec"]):
        assert template["spec"]["schedulerName"] == "volcano"
        assert template["metadata"]["annotations"]["sp-block"] == str(total)
