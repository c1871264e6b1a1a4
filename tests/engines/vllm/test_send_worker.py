"""A sender between the relay and a replica, with the library's engine replaced by one that gathers what it sends."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.vllm import environment, sender
from mindspeed_asyncflow.engines.vllm.native import Rendezvous
from mindspeed_asyncflow.engines.vllm.receipt import CheckedLoad, with_receipt
from mindspeed_asyncflow.engines.vllm.send_worker import SendWorker
from mindspeed_asyncflow.errors import PlatformError, WeightSyncError
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.ports import hold_port
from mindspeed_asyncflow.records import WeightManifest
from tests.reshard.whole_writer import WholeWriter


class Gathers:
    """In place of `HcclSender`: the replica has loaded what was sent, bucket by bucket."""

    made: list[Gathers] = []

    def __init__(self, rendezvous: Rendezvous, bucket_bytes: int) -> None:
        self.rendezvous, self.bucket_bytes = rendezvous, bucket_bytes
        self.between: Callable[[], Any] = lambda: None  # happens before the last tensor is taken
        self.model: dict[str, torch.Tensor] = {}
        self.made.append(self)

    def send(self, manifest: WeightManifest, tensors: Any, valid: Callable[[], bool]) -> None:
        load = self.load = CheckedLoad(self.model.update)
        for name, tensor in with_receipt(tensors, manifest.version, manifest.fingerprint, valid):
            load([(name, tensor)])
            if len(self.model) == len(manifest.params) - 1:
                self.between()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[SendWorker]:
    monkeypatch.setattr(environment, "prepare", lambda rollout, cpu: None)  # it writes the environment of the process
    monkeypatch.setattr(sender, "load_engines", lambda platform: None)
    monkeypatch.setattr(sender, "HcclSender", Gathers)
    monkeypatch.setattr(Gathers, "made", [])
    rollout = RolloutConfig(tensor_parallel=1)
    made = SendWorker(rollout, CpuPlatform(), "127.0.0.1", range(1), Tracer("", "", enabled=False))
    yield made
    made.close()


@pytest.fixture
def relay() -> Iterator[WholeWriter]:
    writer = WholeWriter(f"/dev/shm/asyncflow-test-{uuid.uuid4().hex}", keep=2)
    yield writer
    writer.close()


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((3, 4), value + i) for i, name in enumerate("abc")}


def test_the_port_is_held_until_the_library_takes_it(worker: SendWorker) -> None:
    with pytest.raises(PlatformError, match="cannot be bound"):
        hold_port(worker.port)
    worker.join()
    hold_port(worker.port).close()
    assert Gathers.made[0].rendezvous == Rendezvous("127.0.0.1", worker.port, workers=1)
    assert Gathers.made[0].bucket_bytes == RolloutConfig().ascend.bucket_mb << 20


def test_a_version_is_sent_as_copies_of_what_the_relay_holds(worker: SendWorker, relay: WholeWriter) -> None:
    worker.join()
    manifest = relay.publish(0, weights(1.0).items())
    worker.ready(manifest)
    worker.send(manifest)
    gathered = Gathers.made[0]
    gathered.load.verify(0, manifest.fingerprint, ["a", "b", "c"])
    for version in (1, 2, 3):  # the slot is used again
        relay.publish(version, weights(10.0 * version).items())
    assert all(torch.equal(gathered.model[n], t) for n, t in weights(1.0).items())


def test_a_version_that_is_not_there_is_refused_before_anything_is_sent(worker: SendWorker, relay: WholeWriter) -> None:
    worker.join()
    manifest = relay.publish(0, weights(1.0).items())
    for version in (1, 2, 3):
        relay.publish(version, weights(float(version)).items())
    with pytest.raises(WeightSyncError, match="version 0"):
        worker.ready(manifest)
    assert Gathers.made[0].model == {}


def test_a_version_that_is_dropped_while_it_is_sent_is_sent_to_its_end_and_accepted_by_nobody(
    worker: SendWorker, relay: WholeWriter
) -> None:
    """Bytes of two versions with sums that fit: only the receipt can say so."""
    worker.join()
    gathered = Gathers.made[0]
    manifest = relay.publish(0, weights(1.0).items())
    gathered.between = lambda: [relay.publish(v, weights(10.0 * v).items()) for v in (1, 2, 3)]
    with pytest.raises(WeightSyncError, match="version 0"):
        worker.send(manifest)
    assert len(gathered.model) == 3
    with pytest.raises(WeightSyncError, match="took it back"):
        gathered.load.verify(0, manifest.fingerprint, ["a", "b", "c"])
