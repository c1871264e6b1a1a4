"""Ranks, messages and receipts of native transfers, over every release, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_asyncflow.engines.vllm.native import NativeTransfer, Rendezvous
from mindspeed_asyncflow.engines.vllm.receipt import RECEIPT, CheckedLoad, byte_sum, with_receipt
from mindspeed_asyncflow.engines.vllm.versions import ascend_shape_for
from mindspeed_asyncflow.errors import EngineError, WeightSyncError
from mindspeed_asyncflow.records import ParamMeta, ShardMeta, WeightManifest

PARAMS = tuple(ParamMeta(n, "float32", (2, 3), (ShardMeta((0, 2, 0, 3), 24 * i, 24),)) for i, n in enumerate("ab"))
MANIFEST = WeightManifest(5, "", 48, PARAMS, (0, 0), "ffee000000000001")


class Calls:
    """What reaches a worker."""

    def __init__(self) -> None:
        self.log: list[tuple[str, tuple[Any, ...]]] = []

    def rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.log.append((method, args))
        return ["fp"]

    def __getitem__(self, method: str) -> tuple[Any, ...]:
        return dict(self.log)[method]


@pytest.mark.parametrize("release", ["0.23.0", "0.24.0", "0.26.0", "0.27.1"])
def test_an_hccl_update_announces_what_is_broadcast_with_the_verbs_of_the_release(release: str) -> None:
    calls, transfer = Calls(), NativeTransfer("hccl", 100, ascend_shape_for(release))
    transfer.join(calls.rpc, Rendezvous("10.1.1.1", 777, workers=4))
    assert calls["init_weight_transfer_engine"] == (  # workers are ranks 1 to 4, behind the sender
        {"master_address": "10.1.1.1", "master_port": 777, "rank_offset": 1, "world_size": 5},
    )
    assert transfer.receive(calls.rpc, MANIFEST) == ["fp"]
    order = ["relay_begin", "native_open", "start_weight_update", "update_weights", "finish_weight_update"]
    assert [name for name, _ in calls.log[1:]] == [*order, "native_close"]
    assert calls["start_weight_update"] == ((True,) if release < "0.27" else ())
    (info,) = calls["update_weights"]
    assert info["names"] == ["a", "b", RECEIPT] and info["dtype_names"] == ["float32", "float32", "int64"]
    assert info["shapes"] == [[2, 3], [2, 3], [4]]
    assert (info["packed"], info["packed_buffer_size_bytes"], info["packed_num_buffers"]) == (True, 100, 2)
    assert calls["native_close"] == (5, "ffee000000000001", ["a", "b"], False)


@pytest.mark.parametrize(("release", "packed", "prepares"), [("0.23.0", True, False), ("0.27.1", False, True)])
def test_npu_ipc_is_packed_only_where_that_reaches_the_model(release: str, packed: bool, prepares: bool) -> None:
    """0.27 receives a packed buffer and loads nothing, and prepares no reload."""
    calls, transfer = Calls(), NativeTransfer("npu_ipc", 100, ascend_shape_for(release))
    assert transfer.packed == packed
    transfer.join(calls.rpc)
    assert calls["init_weight_transfer_engine"] == (({"packed": False},) if prepares else ({},))
    transfer.receive(calls.rpc, MANIFEST, [{"n": 1}, {"n": 2}])
    assert calls["native_open"] == (prepares,)
    assert [args for name, args in calls.log if name == "update_weights"] == [({"n": 1},), ({"n": 2},)]


def test_what_a_release_does_not_have_is_refused() -> None:
    with pytest.raises(EngineError, match=r"vllm-ascend 0\.18 has no weight transfer 'hccl': none; weights come"):
        NativeTransfer("hccl", 100, ascend_shape_for("0.22.1"))
    with pytest.raises(EngineError, match="no weight transfer 'nccl': hccl, npu_ipc"):
        NativeTransfer("nccl", 100, ascend_shape_for("0.23.0"))
    with pytest.raises(EngineError, match="needs a rendezvous"):
        NativeTransfer("hccl", 100, ascend_shape_for("0.23.0")).join(Calls().rpc)
    for backend, chunks in (("npu_ipc", None), ("hccl", [{}])):
        with pytest.raises(WeightSyncError, match="handles"):
            NativeTransfer(backend, 100, ascend_shape_for("0.23.0")).receive(Calls().rpc, MANIFEST, chunks)


def weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(name, torch.randn(2, 3, generator=generator)) for name in "ab"]


def arrived(pairs: list[tuple[str, torch.Tensor]]) -> CheckedLoad:
    load = CheckedLoad(lambda given: None)
    for pair in pairs:
        load([pair])
    return load


def test_a_receipt_confirms_what_arrived_and_stays_out_of_the_model() -> None:
    loaded: list[str] = []
    load = CheckedLoad(lambda given: loaded.extend(name for name, _ in given))
    load(list(with_receipt(weights(), 5, MANIFEST.fingerprint)))
    load.verify(5, MANIFEST.fingerprint, ["a", "b"])
    assert loaded == ["a", "b"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_sum_of_bytes_sees_every_single_one(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    for place in range(tensor.numel() * tensor.element_size()):
        changed = tensor.clone()
        changed.view(-1).view(torch.uint8)[place] ^= 1
        assert byte_sum(changed) != byte_sum(tensor)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p[:-1], "2 tensors and no receipt"),
        (lambda p: [], "0 tensors and no receipt"),
        (lambda p: p[1:], r"1 of 2 tensors reached the model, 2 were sent; missing \['a'\]"),
        (lambda p: [*p[:2], ("c", p[0][1]), p[2]], "3 of 2 tensors"),
        (lambda p: [("a", p[0][1] + 1), *p[1:]], "1 tensors have other bytes than were sent, first 'a'"),
        (lambda p: [("a", p[1][1]), ("b", p[0][1]), p[2]], "2 tensors have other bytes"),
        (lambda p: list(with_receipt(p[:2], 4, MANIFEST.fingerprint)), "the sender gave version 4"),
        (lambda p: list(with_receipt(p[:2], 5, "00" * 8)), "the sender gave version 5"),
        (lambda p: list(with_receipt(p[:2], 5, MANIFEST.fingerprint, lambda: False)), "the sender took it back"),
    ],
)
def test_whatever_else_arrives_is_refused(change: Any, said: str) -> None:
    load = arrived(change(list(with_receipt(weights(), 5, MANIFEST.fingerprint))))
    with pytest.raises(WeightSyncError, match=said):
        load.verify(5, MANIFEST.fingerprint, ["a", "b"])


def test_a_tensor_that_comes_twice_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="'a' came twice"):
        arrived([weights()[0], weights()[0]])
