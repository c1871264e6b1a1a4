"""A process beside a trainer rank that sends weight versions, out of the relay of its node, to one replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.vllm import environment
from mindspeed_asyncflow.engines.vllm.native import Rendezvous
from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.platforms.base import Platform
from mindspeed_asyncflow.platforms.ports import HeldPort, hold_port
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.relay import RelayReader


class SendWorker:
    """`host` and `ports`: where the replica's workers meet it; the first free port is held until `join`.

    Trainer ranks take no part: they write versions into the relay as ever, and go on computing.
    """

    def __init__(self, rollout: RolloutConfig, platform: Platform, host: str, ports: range, tracer: Tracer) -> None:
        environment.prepare(rollout, cpu=platform.name == "cpu")
        from mindspeed_asyncflow.engines.vllm import sender

        sender.load_engines(platform.name)
        self._make, self.tracer = sender.HcclSender, tracer
        self._bucket_bytes = rollout.ascend.bucket_mb << 20
        self._workers, self._device = rollout.tensor_parallel, platform.device()
        self._held: HeldPort | None = hold_port(ports.start, host=host, attempts=len(ports), knob="its range")
        self.port = self._held.port
        self._host = host
        self._sender: Any = None  # an HcclSender, as soon as the replica has joined

    def join(self) -> None:
        """Meet the workers of the replica, once; returns when all are there."""
        if self._held is not None:
            self._held.close()  # the library binds the port by itself
            self._held = None
        self._sender = self._make(Rendezvous(self._host, self.port, self._workers), self._bucket_bytes)

    def ready(self, manifest: WeightManifest) -> None:
        """Raise `WeightSyncError` unless the relay holds this version with all its bytes; nothing is sent."""
        RelayReader(manifest).verify()

    def send(self, manifest: WeightManifest) -> None:
        """Send a version to the replica, which must be receiving it.

        Raises `WeightSyncError` where the relay dropped the version meanwhile: all was sent then, and the replica does
        not accept it.
        """
        reader = RelayReader(manifest)
        lost: list[WeightSyncError] = []

        def valid() -> bool:
            try:
                reader.check()
            except WeightSyncError as error:
                lost.append(error)
            return not lost

        with self.tracer.span("send/version", lane="sends", version=manifest.version):
            self._sender.send(manifest, self._copies(reader), valid)
        if lost:
            raise lost[0]

    def _copies(self, reader: RelayReader) -> Iterator[tuple[str, Any]]:
        """Tensors of the version on the device; copies, so that they are what `valid` speaks of."""
        for name, tensor in reader:
            yield name, tensor.to(self._device, copy=True)

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
        self.tracer.close()
