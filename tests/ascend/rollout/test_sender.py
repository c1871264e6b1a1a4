"""Senders call the trainer side of each release's engines as it is; importing vLLM takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_asyncflow.engines.vllm.native import NativeTransfer, Rendezvous
from mindspeed_asyncflow.engines.vllm.receipt import RECEIPT
from mindspeed_asyncflow.engines.vllm.versions import ascend_shape_for
from mindspeed_asyncflow.errors import PlatformError, WeightSyncError
from mindspeed_asyncflow.records import ParamMeta, ShardMeta, WeightManifest

pytestmark = pytest.mark.slow
PARAMS = tuple(ParamMeta(n, "float32", (2, 3), (ShardMeta((0, 2, 0, 3), 24 * i, 24),)) for i, n in enumerate("ab"))
MANIFEST = WeightManifest(5, "", 48, PARAMS, (0, 0), "00ee000000000001")
WEIGHTS = [(name, torch.full((2, 3), float(i))) for i, name in enumerate("ab")]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """vLLM's registry of engines, and what its trainer side was called with."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    engines: dict[str, Any] = {}
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", engines)
    yield engines


@dataclass
class Sent:
    """`hccl` and static `npu_ipc`."""

    disabled: bool = False
    init: Any = None
    names: tuple[str, ...] = ()
    args: Any = None

    def trainer_init(self, init_info: dict[str, Any]) -> Any:
        self.init = init_info
        return SimpleNamespace(disabled=self.disabled)

    def trainer_send_weights(self, iterator: Iterator[Any], trainer_args: dict[str, Any]) -> None:
        self.names, self.args = tuple(name for name, _ in iterator), trainer_args


def test_the_sender_is_rank_0_and_sends_the_receipt_last(registry: dict[str, Any]) -> None:
    from mindspeed_asyncflow.engines.vllm.sender import HcclSender

    engine = Sent()
    registry["hccl"] = lambda: engine
    sender = HcclSender(Rendezvous("10.0.0.1", 777, workers=6), bucket_bytes=10)
    assert engine.init == {"master_address": "10.0.0.1", "master_port": 777, "world_size": 7}
    sender.send(MANIFEST, WEIGHTS)
    assert engine.names == ("a", "b", RECEIPT)
    assert {k: engine.args[k] for k in ("packed", "packed_buffer_size_bytes", "packed_num_buffers")} == {
        "packed": True,
        "packed_buffer_size_bytes": 10,
        "packed_num_buffers": 2,
    }


def test_a_sender_that_could_send_nothing_says_so(registry: dict[str, Any]) -> None:
    from mindspeed_asyncflow.engines.vllm.sender import HcclSender

    with pytest.raises(PlatformError, match="no weight transfer 'hccl' is registered in this process"):
        HcclSender(Rendezvous("10.0.0.1", 777, workers=1), 10)
    registry["hccl"] = lambda: Sent(disabled=True)
    with pytest.raises(PlatformError, match="HCCL's library cannot be loaded"):
        HcclSender(Rendezvous("10.0.0.1", 777, workers=1), 10)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (WEIGHTS[::-1], r"\('b', 'float32', \(2, 3\)\) is sent where receivers expect \('a'"),
        (WEIGHTS[:1], "'b' is not among what is sent"),
        ([("a", torch.zeros(3, 2)), WEIGHTS[1]], r"\(3, 2\)\) is sent"),
        ([("a", torch.zeros(2, 3, dtype=torch.bfloat16)), WEIGHTS[1]], "'bfloat16'"),
        ([*WEIGHTS, ("c", torch.zeros(1))], "receivers expect None"),
    ],
)
def test_what_receivers_do_not_expect_is_not_sent(registry: dict[str, Any], given: Any, said: str) -> None:
    from mindspeed_asyncflow.engines.vllm.sender import HcclSender

    registry["hccl"] = lambda: Sent()
    with pytest.raises(WeightSyncError, match=said):
        HcclSender(Rendezvous("10.0.0.1", 777, workers=1), 10).send(MANIFEST, given)


def test_static_npu_ipc_delivers_messages_by_our_call(registry: dict[str, Any]) -> None:
    from mindspeed_asyncflow.engines.vllm.sender import IpcSender

    @dataclass
    class Update:
        names: list[str]

    engine = Sent()
    registry["npu_ipc"] = lambda: engine
    delivered: list[dict[str, Any]] = []
    transfer = NativeTransfer("npu_ipc", 24, ascend_shape_for("0.23.0"))
    IpcSender(transfer).send(MANIFEST, WEIGHTS, delivered.append)
    assert engine.names == ("a", "b", RECEIPT)
    assert engine.args["packed"] and engine.args["packed_buffer_size_bytes"] == 24
    engine.args["send_mode"](Update(["a"]))
    assert delivered == [{"names": ["a"]}]


def test_a_weight_larger_than_an_npu_ipc_bucket_is_refused_before_anything_is_sent(registry: dict[str, Any]) -> None:
    """Known issue 19."""
    from mindspeed_asyncflow.engines.vllm.sender import IpcSender

    engine = Sent()
    registry["npu_ipc"] = lambda: engine
    with pytest.raises(WeightSyncError, match="'a' of 24 bytes does not fit a bucket of 23: buckets need 24"):
        IpcSender(NativeTransfer("npu_ipc", 23, ascend_shape_for("0.23.0"))).send(MANIFEST, WEIGHTS, print)
    assert engine.args is None


def test_npu_ipc_of_main_is_driven_by_vllms_trainer_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine calls the whole life cycle on a client; the replica has done all of it but the update."""
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, VLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from mindspeed_asyncflow.engines.vllm.sender import IpcSender

    @dataclass
    class Info(TrainerInitInfo):
        backend = "npu_ipc"
        packed: bool = False

    class Engine:
        @classmethod
        def trainer_init(cls, init_info: Info, *, client: Any, source: Any) -> Any:
            assert init_info.is_sender and not init_info.packed and isinstance(client, VLLMWeightSyncClient)
            client.init_weight_transfer_engine({"packed": init_info.packed})
            engine = cls()
            engine.client, engine.source = client, source  # type: ignore[attr-defined]
            return engine

        def send_weights(self) -> None:
            self.client.start_weight_update()  # type: ignore[attr-defined]
            self.client.update_weights({"names": [name for name, _ in self.source]})  # type: ignore[attr-defined]
            self.client.finish_weight_update()  # type: ignore[attr-defined]

    module: Any = ModuleType("vllm_ascend.distributed.weight_transfer.npu_ipc_engine")
    module.NPUIPCTrainerInitInfo = Info
    parents = ("vllm_ascend", "vllm_ascend.distributed", "vllm_ascend.distributed.weight_transfer")
    for name in parents:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(WeightTransferTrainerFactory._registry, "npu_ipc", lambda: Engine)
    delivered: list[dict[str, Any]] = []
    IpcSender(NativeTransfer("npu_ipc", 1, ascend_shape_for("0.27.1"))).send(MANIFEST, WEIGHTS, delivered.append)
    assert delivered == [{"names": ["a", "b", RECEIPT]}]
