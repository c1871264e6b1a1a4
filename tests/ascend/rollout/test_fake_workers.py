"""Updates and sleeps over workers that behave as those of vllm-ascend's releases do; importing vLLM takes seconds."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_asyncflow.engines.vllm import versions
from mindspeed_asyncflow.engines.vllm.native import NativeTransfer, Rendezvous
from mindspeed_asyncflow.engines.vllm.receipt import with_receipt
from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.relay import manifest_to_json
from tests.reshard.whole_writer import WholeWriter

pytestmark = pytest.mark.slow
RELEASES = ["0.18.0", "0.23.0", "0.24.0", "0.26.0", "0.27.1"]
NATIVE = [(release, backend) for release in RELEASES[1:] for backend in ("hccl", "npu_ipc")]


class Yard:
    """Makes workers, and publishes checkpoints by their seed."""

    def __init__(self) -> None:
        from tests.ascend.rollout import fake_workers

        self.fakes, self.version = fake_workers, 0
        self.relay = WholeWriter(f"/dev/shm/asyncflow-test-{uuid.uuid4().hex}")

    def worker(self, release: str, backend: str = "relay") -> Any:
        return self.fakes.WORKERS[release](self.fakes.checkpoint(0), backend)

    def publish(self, seed: int) -> WeightManifest:
        self.version += 1
        return self.relay.publish(self.version, self.fakes.checkpoint(seed).items())

    def load(self, worker: Any, release: str, seed: int) -> None:
        shape = versions.ascend_shape_for(release)
        (loaded,) = versions.update_weights(worker.rpc, shape, manifest_to_json(self.publish(seed)))
        assert loaded

    def receive(self, worker: Any, transfer: NativeTransfer, seed: int, **sent: Any) -> list[str]:
        """A native update; `sent`: what of the manifest the sender has otherwise."""
        manifest = self.publish(seed)
        given = replace(manifest, **sent)
        pairs = self.fakes.checkpoint(seed).items()
        worker.weight_transfer_engine.pairs = list(with_receipt(pairs, given.version, given.fingerprint))
        return transfer.receive(worker.rpc, manifest, [{}] if transfer.backend == "npu_ipc" else None)

    def assert_holds(self, worker: Any, seed: int) -> None:
        expected = self.fakes.kernel_form(self.fakes.checkpoint(seed))
        for name, weight in worker.weights.items():
            assert torch.equal(weight, expected[name]), name


@pytest.fixture
def yard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    from mindspeed_asyncflow.engines.vllm import transfer

    monkeypatch.setattr(transfer, "set_current_vllm_config", lambda config: nullcontext())  # workers have no vLLM's
    yard = Yard()
    yield yard
    yard.relay.close()


def native(release: str, backend: str, bucket_bytes: int = 1 << 20) -> NativeTransfer:
    return NativeTransfer(backend, bucket_bytes, versions.ascend_shape_for(release))


@pytest.mark.parametrize("release", RELEASES)
def test_workers_have_the_verbs_of_their_row_and_not_those_of_newer_ones(release: str, yard: Yard) -> None:
    worker = yard.worker(release)
    versions.check_verbs(worker.rpc, versions.ascend_shape_for(release), release)
    assert bool(worker.missing_verbs(versions.UPDATE_VERBS)) == (release == "0.18.0")


@pytest.mark.parametrize("release", RELEASES)
def test_expert_weights_are_turned_once_by_each_relay_update(release: str, yard: Yard) -> None:
    """Known issue 3, B69: three times the same, another one, and back, all bit for bit."""
    worker = yard.worker(release)
    for seed in (1, 1, 1, 2, 1):
        yard.load(worker, release, seed)
        yard.assert_holds(worker, seed)


@pytest.mark.parametrize("release", RELEASES)
def test_waking_leaves_expert_weights_as_they_were(release: str, yard: Yard) -> None:
    """Known issue 2: an answer after a sleep that kept the weights finds them in the layout of its kernels."""
    worker = yard.worker(release)
    yard.load(worker, release, 1)
    for call in (worker.keep_weights, lambda: worker.sleep(1), worker.wake_up):
        call()
    assert worker.put_weights_back() == (2 if versions.ascend_shape_for(release).wake_turns_experts else 0)
    yard.assert_holds(worker, 1)


@pytest.mark.parametrize("release", RELEASES)
def test_a_reload_after_a_sleep_without_weights_is_right(release: str, yard: Yard) -> None:
    """Known issues 2 and 3, B69: sleep(2), wake, update; twice, since the second one finds what the first has left."""
    worker = yard.worker(release)
    for seed in (1, 2):
        for call in (worker.keep_weights, lambda: worker.sleep(2), lambda: worker.wake_up(["weights"])):
            call()
        worker.put_weights_back()
        yard.load(worker, release, seed)
        yard.assert_holds(worker, seed)


@pytest.mark.parametrize("release", [r for r in RELEASES if r != "0.27.1"])
def test_without_putting_them_back_the_same_reload_breaks(release: str, yard: Yard) -> None:
    """Known issue 2, the control of the test above."""
    worker = yard.worker(release)
    worker.sleep(2)
    worker.wake_up(["weights"])
    with pytest.raises((AssertionError, RuntimeError)):
        yard.load(worker, release, 1)
        yard.assert_holds(worker, 1)


@pytest.mark.parametrize(("release", "backend"), NATIVE)
def test_native_updates_reach_the_kernels_in_their_layout(release: str, backend: str, yard: Yard) -> None:
    """Known issue 3, B69; npu_ipc of 0.27 has no reload of its own."""
    worker, transfer = yard.worker(release, backend), native(release, backend)
    transfer.join(worker.rpc, Rendezvous("10.0.0.1", 50000, workers=1))
    for seed in (1, 1, 2, 1):
        assert yard.receive(worker, transfer, seed) == [yard.publish(seed).fingerprint]  # of these bytes
        yard.assert_holds(worker, seed)


@pytest.mark.parametrize(("release", "backend"), NATIVE)
def test_a_native_update_that_breaks_off_is_healed_by_the_next(release: str, backend: str, yard: Yard) -> None:
    worker, transfer = yard.worker(release, backend), native(release, backend)
    manifest = yard.publish(1)
    pairs: list[Any] = list(with_receipt(yard.fakes.checkpoint(1).items(), manifest.version, manifest.fingerprint))
    for broken_at in range(len(pairs)):
        worker.weight_transfer_engine.pairs = [*pairs[:broken_at], ("", WeightSyncError("the sender died"))]
        with pytest.raises(WeightSyncError, match="the sender died"):
            transfer.receive(worker.rpc, manifest, [{}] if backend == "npu_ipc" else None)
        yard.receive(worker, transfer, 2)
        yard.assert_holds(worker, 2)


@pytest.mark.parametrize(("release", "backend"), NATIVE)
def test_a_native_engine_that_loads_nothing_or_another_version_is_found_out(
    release: str, backend: str, yard: Yard
) -> None:
    """What packed npu_ipc of 0.27 does, and a group whose library is missing: nothing, without an error."""
    worker, transfer = yard.worker(release, backend), native(release, backend)
    worker.weight_transfer_engine.lost = True
    with pytest.raises(WeightSyncError, match="0 tensors and no receipt reached the model"):
        yard.receive(worker, transfer, 1)
    worker.weight_transfer_engine.lost = False
    with pytest.raises(WeightSyncError, match="the sender gave version 77"):
        yard.receive(worker, transfer, 1, version=77)
    yard.receive(worker, transfer, 2)
    yard.assert_holds(worker, 2)


def test_an_update_begins_when_the_device_has_done_its_work(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known issue 15: a pause that looks at the host only returns before the last kernels have read the weights."""
    worker = yard.worker("0.23.0", "hccl")
    synchronize = SimpleNamespace(synchronize=lambda: worker.calls.append("device synchronized"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: synchronize)
    yard.receive(worker, native("0.23.0", "hccl"), 1)
    assert worker.calls[:4] == ["relay_begin", "device synchronized", "native_open", "start_weight_update"]


def test_weights_that_an_update_moves_are_named(yard: Yard) -> None:
    """Known issue 5: a graph would go on reading the tensor that a layer holds beside its parameters."""
    worker = yard.worker("0.23.0")
    experts = worker.model_runner.model.experts
    experts.w_uv = torch.zeros(3)
    yard.load(worker, "0.23.0", 1)
    assert worker.moved_weights() == []
    kept, experts.w_uv = experts.w_uv, torch.zeros(3)
    yard.load(worker, "0.23.0", 2)
    assert worker.moved_weights() == ["experts.w_uv"] and kept is not experts.w_uv
