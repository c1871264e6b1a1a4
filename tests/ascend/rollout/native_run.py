"""A sender process and a real vLLM engine on CPU, weights from one to the other by stand-ins of `hccl` and `npu_ipc`.

`python -m tests.ascend.rollout.native_run FOLDER` prints what happened as one line of JSON. A process of its own, since
vLLM changes the one that it runs in.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.vllm import environment
from mindspeed_asyncflow.engines.vllm.engine import VLLMEngine
from mindspeed_asyncflow.engines.vllm.native import Rendezvous
from mindspeed_asyncflow.engines.vllm.receipt import with_receipt
from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.platforms.ports import hold_port
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.relay import RelayReader, manifest_from_json, manifest_to_json
from tests.engines.bench import MAX_LEN, Policy, ask, make_model, prompt
from tests.reshard.whole_writer import WholeWriter

BUCKET_BYTES = 40_000  # smaller than the embedding, and several tensors of other layers fit one
PAIR = (prompt(*range(40)), prompt(3, 1, 4, 1, 5, 9, 2, 6))
ROLLOUT = RolloutConfig(max_running=8, timeout_s=60.0)


def send(pipe: Connection, rendezvous: Rendezvous) -> None:
    """The sender process: whatever version it is told, from the relay; `spoil` changes a tensor on the way."""
    from mindspeed_asyncflow.engines.vllm.gloo_engine import GlooEngine, register
    from mindspeed_asyncflow.engines.vllm.sender import HcclSender

    register()
    pipe.send("ready")
    sender = HcclSender(rendezvous, BUCKET_BYTES)
    while (order := pipe.recv()) is not None:
        manifest = manifest_from_json(order["manifest"])
        if order["spoil"]:
            pairs = [(n, t.clone()) for n, t in with_receipt(RelayReader(manifest), manifest.version, "00" * 8)]
            pairs[3][1].view(-1)[0] += 1.0
            pairs[-1][1][1] = int.from_bytes(bytes.fromhex(manifest.fingerprint), "big", signed=True)
            arguments = {"packed": True, "packed_buffer_size_bytes": BUCKET_BYTES, "packed_num_buffers": 2}
            GlooEngine.trainer_send_weights(iter(pairs), {**arguments, "group": sender._group})
        else:
            sender.send(manifest, RelayReader(manifest))
        pipe.send("sent")


class Run:
    def __init__(self, folder: Path) -> None:
        self.policies = {n: Policy(make_model(folder / n, "experts", seed)) for seed, n in enumerate("ab")}
        self.relay = WholeWriter(f"/dev/shm/asyncflow-test-{uuid.uuid4().hex}")
        self.version = 0

    def publish(self, name: str) -> WeightManifest:
        self.version += 1
        return self.relay.publish(self.version, self.policies[name].tensors())

    def engine(self, backend: str, npu: bool = False) -> VLLMEngine:
        """`npu`: the adapter goes its way for NPUs, on the CPU's vLLM."""
        environment.prepare(ROLLOUT, cpu=not npu)
        os.environ["HCCL_IF_BASE_PORT"] = "50000"
        from tests.ascend.rollout.stand_in import register

        register()
        return VLLMEngine(
            self.policies["a"].folder,
            ROLLOUT,
            dtype="float32",
            max_model_len=MAX_LEN,
            seed=0,
            stop_token_ids=(),
            npu=npu,
            native=(backend, BUCKET_BYTES),
        )

    def error_of(self, engine: VLLMEngine, name: str) -> float:
        (score,) = engine.score([PAIR])
        return float(np.abs(score - self.policies[name].logprobs(*PAIR)).max())

    def hccl(self) -> dict[str, Any]:
        with hold_port() as held:
            port = held.port
        rendezvous = Rendezvous("127.0.0.1", port, workers=1)
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        sender = context.Process(target=send, args=(there, rendezvous), daemon=True)
        sender.start()
        engine = self.engine("hccl")
        assert here.poll(120.0) and here.recv() == "ready"
        engine.join(rendezvous.address, rendezvous.port)

        def update(manifest: WeightManifest, sent: WeightManifest | None = None, spoil: bool = False) -> str:
            here.send({"manifest": manifest_to_json(sent or manifest), "spoil": spoil})
            try:
                return engine.update(manifest).fingerprint
            except WeightSyncError as error:
                return str(error)
            finally:
                assert here.poll(60.0) and here.recv() == "sent"

        found: dict[str, Any] = {"transports": engine.capabilities().transports, "before": self.error_of(engine, "a")}
        stream = engine.generate([ask("r", PAIR[0], 120, seed=3)], 60.0)
        engine.score([PAIR])
        first = self.publish("b")
        found["fingerprint"] = (update(first), first.fingerprint)
        (done,) = stream
        found["answer"] = len(done.token_ids)
        found["spans"] = [(s.version, s.start, s.end) for s in done.spans]
        names = {0: "a", 1: "b"}
        found["span_errors"] = [
            float(np.abs(done.logprobs[s.start : s.end] - self.all_of(done, names[s.version])[s.start : s.end]).max())
            for s in done.spans
        ]
        found["b"] = self.error_of(engine, "b")
        older, newer = self.publish("a"), self.publish("a")
        found["other version"] = (update(newer, sent=older), engine.state)
        found["spoilt"] = (update(newer, spoil=True), engine.state)
        found["healed"] = (update(newer), newer.fingerprint, engine.state, self.error_of(engine, "a"))
        here.send(None)
        sender.join(20.0)
        engine.close()
        return found

    def all_of(self, done: Any, name: str) -> np.ndarray:
        return self.policies[name].logprobs(PAIR[0], done.token_ids)

    def npu_ipc(self) -> dict[str, Any]:
        engine = self.engine("npu_ipc", npu=True)
        engine.join()
        stream = engine.generate([ask("r", PAIR[0], 20, seed=3)], 60.0)
        found: dict[str, Any] = {"answers": [len(done.token_ids) for done in stream]}
        for name in ("b", "a", "b"):
            manifest = self.publish(name)
            engine.update_from(manifest, messages(manifest, RelayReader(manifest)))
            found.setdefault("errors", []).append(self.error_of(engine, name))
        manifest = self.publish("a")
        try:
            engine.update_from(manifest, messages(manifest, list(RelayReader(manifest))[:-1]))
        except WeightSyncError as error:
            found["short"] = (str(error), engine.state)
        engine.close()
        return found


def messages(manifest: WeightManifest, tensors: Any) -> Iterator[dict[str, Any]]:
    """What an unpacked npu_ipc sender delivers: one message."""
    pairs = list(with_receipt(tensors, manifest.version, manifest.fingerprint))
    yield {
        "names": [name for name, _ in pairs],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in pairs],
        "shapes": [list(tensor.shape) for _, tensor in pairs],
        "ipc_handles": [{"chip": tensor} for _, tensor in pairs],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = Run(Path(sys.argv[1]))
    try:
        print(json.dumps({"hccl": run.hccl(), "npu_ipc": run.npu_ipc()}))
    finally:
        run.relay.close()
