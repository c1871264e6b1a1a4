"""In place with the plain-torch engine, over the emulated torch_npu, whose tensors know on which side they are."""

import pytest

from tests.ascend.reshard import engine_ranks
from tests.engines.bench import make_model
from tests.reshard.ranks import Ranks

pytestmark = pytest.mark.slow

TRAIN = ("train weights", "gradients", "optimizer")


def test_an_npu_serves_what_its_trainer_has_and_answers_as_a_cpu_does(tmp_path):
    """Weights from two tensor-parallel ranks, over a group of the device's backend, into two whole replicas."""
    folder = make_model(tmp_path / "model", "dense", 0)
    with Ranks(2, engine_ranks.MODULES) as ranks:
        on_cpu, on_npu = (ranks.run(engine_ranks.turns, name=name, folder=folder) for name in ("cpu", "npu"))
    for there, here in zip(on_npu, on_cpu):
        assert (there["device"], here["device"]) == ("npu:0", "cpu")
        assert there["turns"] == here["turns"]
        assert there["calls"] == here["calls"]
        kinds = {call[0] for calls in here["calls"].values() for call in calls}
        assert kinds == {"new_group", "batch", "release", "restore", "pin", "copy", "all_reduce"}
        for turn, census in zip(there["turns"], there["census"]):
            assert turn["sent"] > 0
            assert not any(turn["generating"][kind] for kind in TRAIN) and turn["generating"]["generation weights"]
            assert census == sum(turn["training"][kind] for kind in TRAIN) == sum(turn["training"].values())
    assert len({turn["fingerprint"] for turn in on_npu[0]["turns"]}) == 3
