"""What a run takes when trainer and replicas share devices, or some replicas may come later."""

from dataclasses import replace

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.checks import check
from mindspeed_asyncflow.config.feasibility import needed_replicas, own_replicas, sharing_replicas
from mindspeed_asyncflow.config.host_memory import memory_bytes
from mindspeed_asyncflow.config.machine import _multiplies_bfloat16
from mindspeed_asyncflow.config.model import describe
from tests.config.test_checks import BOX, TINY, errors

NPUS = replace(BOX, npus=4)
MODEL = describe(TINY)
COLOCATED = ["workflow.schedule=colocated", "workflow.max_lag=0", "trainer.data_parallel=4", "rollout.replicas=4"]
LEND = ["workflow.lend=true", "trainer.data_parallel=2", "rollout.replicas=2"]


def replicas(*overrides):
    config = parse_config("", overrides)
    return own_replicas(config), sharing_replicas(config), needed_replicas(config)


def test_replicas_are_counted_by_whose_devices_they_use():
    assert replicas("rollout.replicas=3") == (3, 0, 3)
    assert replicas("rollout.replicas=3", "rollout.min_replicas=2") == (3, 0, 2)
    assert replicas(*COLOCATED) == (0, 4, 0)
    assert replicas(*LEND) == (2, 2, 2)
    assert replicas(*LEND, "rollout.tensor_parallel=2") == (2, 1, 2)


def test_shared_devices_count_once():
    npu = "run.platform=npu"
    assert errors(npu, *COLOCATED, machine=NPUS) == {}
    assert errors(npu, *LEND, machine=NPUS) == {}
    assert "5 NPUs wanted" in errors(npu, *LEND, "rollout.replicas=3", machine=NPUS)["run.platform"]


@pytest.mark.parametrize(
    ("cpuinfo", "fast"),
    [
        ("flags\t\t: fpu avx2 fma\n", False),
        ("processor : 0\nflags : avx2 avx512f avx512bw avx512vl avx512dq\n", True),
        ("flags : avx2 avx_vnni avx_ne_convert\n", True),
        ("Features\t: fp asimd\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("", True),
    ],
)
def test_a_dtype_that_the_cpus_are_slow_with_is_a_warning_on_cpus_only(cpuinfo, fast):
    box = replace(BOX, bfloat16=_multiplies_bfloat16(cpuinfo))
    slow = {
        f.keys for f in check(parse_config("", ["model.dtype=bfloat16"]), box, TINY) if "tens of times" in f.message
    }
    assert slow == (set() if fast else {("model.dtype",)})
    for settings, machine in ((["model.dtype=float32"], box), (["model.dtype=bfloat16", "run.platform=npu"], NPUS)):
        found = check(parse_config("", settings), replace(machine, bfloat16=False), TINY)
        assert not [f for f in found if "tens of times" in f.message]


def test_cpus_that_are_wanted_are_the_sum_of_what_is_listed():
    config = parse_config("", ["workflow.lend=true", "trainer.tensor_parallel=2", "rollout.threads=2"])
    said = [f.message for f in check(config, BOX, TINY) if "CPUs wanted" in f.message]
    assert said == [
        "4 CPUs wanted (2 trainer ranks x 1 threads + 1 rollout replicas x 1 ranks x 2 threads; the 2 on the trainer's "
        "devices wait while it works), 2 available: they take turns"
    ]


def test_replicas_that_may_come_later_need_no_device_yet():
    wanted = ["run.platform=npu", "rollout.replicas=8"]
    assert "9 NPUs wanted" in errors(*wanted, machine=NPUS)["run.platform"]
    assert errors(*wanted, "rollout.min_replicas=3", machine=NPUS) == {}


def test_memory_counts_engines_of_all_replicas_and_the_train_state_that_is_swapped_out():
    own, lent = (memory_bytes(parse_config("", [*LEND, f"workflow.lend={on}"]), BOX, MODEL) for on in ("false", "true"))
    swapped = "train state on the host, while others have its devices"
    assert swapped not in own
    assert lent[swapped] == 2 * MODEL.parameters * (4 + 8)  # float32 weights and two moments, twice
    assert lent["rollout weights"] == 2 * own["rollout weights"] > 0
    assert lent["rollout processes"] == 2 * own["rollout processes"] > 0
    in_place = memory_bytes(parse_config("", [*COLOCATED, "rollout.engine=reference"]), BOX, MODEL)
    assert (in_place["rollout processes"], in_place["weight relay"]) == (0, 0)
    assert in_place["rollout weights"] == 4 * MODEL.parameters * 4


def test_in_place_on_npus_is_said_to_be_slow():
    overrides = [*COLOCATED, "run.platform=npu"]
    for engine, said in (("reference", True), ("vllm", False)):
        found = check(parse_config("", [*overrides, f"rollout.engine={engine}"]), NPUS, TINY)
        warned = [f for f in found if "plain-torch engine answers, slowly on NPUs" in f.message]
        assert [f.level for f in warned] == ["warning"] * said
        assert not any(f.level == "error" and "workflow.schedule" in f.keys for f in found)
