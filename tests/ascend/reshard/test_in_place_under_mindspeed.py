"""Trainer and plain-torch engine in turn on an emulated NPU: the real MindSpeed, weights over the device's backend."""

import pytest

from tests.ascend.emulation.emulated import HERE, needs_mindspeed

pytestmark = [pytest.mark.slow, needs_mindspeed]

SHARED = ("workflow.schedule=colocated", "rollout.replicas=2", "trainer.tensor_parallel=2")


def test_a_colocated_job_has_the_losses_of_the_cpu(monkeypatch, tmp_path):
    """The main job: Ray, dock, two ranks that train and answer in turn, three steps."""
    monkeypatch.syspath_prepend(str(HERE))
    import main_job

    on_cpu, on_npu = (main_job.train(tmp_path / str(e), SHARED, emulated=e) for e in (False, True))
    assert len(on_npu) == len(on_cpu) == 3
    for there, here in zip(on_npu, on_cpu):
        assert {name: there[name] - here[name] for name in here if abs(there[name] - here[name]) > 1e-5} == {}
